"""Can the stiffness of a smooth potential be learned, and from how many crystals?

    python benchmarks/relaxation/learning_curve.py FOLDER                      # 50 minutes; continues where it stopped
    python benchmarks/relaxation/learning_curve.py FOLDER --axis width rows    # more rows for the table

SevenNet-0 relaxes rattled crystals of MP-20 (cells fixed, 3 to 14 atoms, to 0.002 eV/Å, by `universal`), each of them
once; all is kept in FOLDER. The first 40 crystals (seed 77) are for validation, none of another with their formula is
learned from. New networks learn from nothing, from 40, 80, 160 and 320 other crystals, all by the same number of
updates. What still pulls at the end of a relaxation is subtracted, so the tolerance blurs no label.

Printed is the mean relative error of the step (`train/supervised/fit.py`; 3 at most) at the states of the validation
relaxations, by how far the farthest atom is from the end. Beside it: the springs times the best factor, the shipped
`universal` with and without one, and the Hessian of the potential at the first states, by differences, eigenvalues
taken by their size and none below 0.3 eV/Å². Factors are chosen on the crystals learned from.

Axes, with 320 crystals: `width` (96 channels), `rows` (four products of the Hessian at each minimum with vectors, two
at random and two soft ones, as further examples).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from ase import Atoms
from own_kinds import network_of_policy
from teaching import DISTANCES, LARGEST_ERROR, missed, newton, settings_of
from torch import Tensor

from relaxion.batch import BatchRelaxer, BatchSettings
from relaxion.database import RelaxationDatabase
from relaxion.model.solve import solve
from relaxion.model.stiffness import Unknowns, strain_vectors
from relaxion.model.stiffness_network import SolveInputs, StiffnessNetwork, StiffnessSettings, pulls_of
from relaxion.potentials import potential
from relaxion.potentials.base import Potential
from relaxion.structures import Move, State, Structures
from relaxion.structures.trajectory import Trajectory
from relaxion.train.data.kinds import CollectSettings, file_structures
from relaxion.train.data.perturbations import displaced
from relaxion.train.supervised.fit import (
    ExampleDataset,
    Examples,
    Fit,
    bases_of,
    relative_errors,
    state_of,
    towards_minimum,
)
from relaxion.train.tasks.settings import find, read_toml

SEED, ENGINE, POLICY = 77, "sevennet", "universal"
SIZES, FMAX, MOST_CALLS = (3, 14), 2e-3, 60
RATTLE = (0.03, 0.25)  # Å
VALIDATION, NUMBERS = 40, (40, 80, 160, 320)
ROWS, ROW_LENGTH = 4, 0.02  # products of each Hessian; Å between the two places of a difference
FACTORS = (0.6, 0.8, 1.0, 1.2, 1.4, 1.7, 2.0, 2.5, 3.0)
HESSIANS = 64  # the first states, those of about twelve crystals: a Hessian takes a hundred force calls
AT_ONCE = 100

Step = Callable[[Examples], Tensor]  # relative errors, (number,)


def crystals() -> tuple[list[Atoms], list[Atoms]]:
    """For validation and to learn from, no formula on both sides; rattled."""
    kind = CollectSettings.of(read_toml(find("universal-data")), {}).kinds["crystal"]
    kind = kind.model_copy(update={"smallest_n_atoms": SIZES[0], "largest_n_atoms": SIZES[1]})
    every, random = file_structures(kind, "training"), np.random.default_rng(SEED)
    shuffled = [every[place] for place in random.permutation(len(every))]
    starts = [displaced(atoms, random, random.uniform(*RATTLE)) for atoms in shuffled]
    test, rest = starts[:VALIDATION], starts[VALIDATION:]
    apart = {atoms.get_chemical_formula("reduce") for atoms in test}
    return test, [atoms for atoms in rest if atoms.get_chemical_formula("reduce") not in apart][: NUMBERS[-1]]


def collect(folder: Path, engine: Potential) -> tuple[list[Trajectory], list[Trajectory]]:
    """Relaxations of both sides in their order, those that converged; what is there is not done again."""
    sides = dict(zip(("test", "rest"), crystals(), strict=True))
    database = RelaxationDatabase.open_or_create(folder / "relaxations", {"made_by": "learning_curve"})
    done, begun = database.keys(), time.process_time()
    for side, starts in sides.items():
        for number, atoms in enumerate(starts):
            if f"{side}-{number}" in done:
                continue
            relaxer = BatchRelaxer(engine, BatchSettings(POLICY, FMAX, max_force_calls=MOST_CALLS), None, database)
            relaxer.add(atoms, f"{side}-{number}")
            while relaxer.n_running or relaxer.has_finished:
                relaxer.advance()
    found = {one.key: one for one in database}
    print(f"collected: {len(found)} relaxations, {sum(map(len, found.values()))} calls, ", end="")
    print(f"{time.process_time() - begun:.0f} s now", flush=True)
    named = [[found.get(f"{side}-{number}") for number in range(len(starts))] for side, starts in sides.items()]
    test, rest = ([one for one in own if one is not None and examples_of(one) is not None] for own in named)
    return test, rest


def examples_of(trajectory: Trajectory) -> Examples | None:
    """The bases of its steps and their ways to the end, with what still pulls there."""
    if trajectory.fmax != FMAX or float(trajectory.forces[-1].norm(dim=1).max()) > FMAX or len(trajectory) < 2:
        return None
    bases = bases_of(trajectory)[:-1]
    every = state_of(trajectory)
    ends = every.select(torch.full_like(bases, len(trajectory) - 1))
    return with_rests(towards_minimum(ends.structures, every.select(bases)), ends.select(torch.tensor([0])))


def with_rests(examples: Examples | None, end: State) -> Examples | None:
    if examples is None:
        return None
    rest = pulls_of(end)
    return replace(
        examples, left_over=Unknowns(rest.atoms.repeat(examples.number, 1), rest.cells.repeat(examples.number, 1))
    )


def rows_of(trajectory: Trajectory, engine: Potential, file: Path) -> Examples | None:
    """Differences of forces around its end along random vectors and along soft ones, as secants."""
    end = state_of(trajectory).select(torch.tensor([len(trajectory) - 1]))
    if not file.exists():
        generator = torch.Generator().manual_seed(SEED)
        noise = torch.randn((ROWS, trajectory.n_atoms, 3), generator=generator, dtype=torch.float64)
        noise[ROWS // 2 :] = torch.stack([springs_step(end, one) for one in noise[ROWS // 2 :]])
        noise -= noise.mean(dim=1, keepdim=True)
        steps = ROW_LENGTH * noise / noise.norm(dim=2).amax(dim=1)[:, None, None]
        places = [moved(end.structures, sign * step / 2) for step in steps for sign in (-1, 1)]
        answers = [engine(one) for one in places]
        np.savez(file, steps=steps.numpy(), forces=torch.stack([one.forces for one in answers]).numpy())
    with np.load(file) as kept:
        steps, forces = torch.from_numpy(kept["steps"]), torch.from_numpy(kept["forces"]).double()
    parts = []
    for number, step in enumerate(steps):
        structures = moved(end.structures, -step / 2)
        evaluation = replace(end.evaluation, forces=forces[2 * number])
        state = replace(end, structures=structures, evaluation=evaluation)
        rest = Unknowns(forces[2 * number + 1], torch.zeros((1, 6), dtype=torch.float64))
        parts.append(Examples(state, Move(step, torch.zeros((1, 3, 3), dtype=torch.float64)), rest))
    return Examples.concatenate(parts)


def springs_step(state: State, pulls: Tensor) -> Tensor:
    """Where the springs go under such forces: mostly along what is soft."""
    frame = SolveInputs.of(state, StiffnessSettings(), torch.float64)
    return solve(frame.prior(), Unknowns(pulls, torch.zeros((1, 6), dtype=torch.float64))).atoms


def moved(structures: Structures, step: Tensor) -> Structures:
    return replace(structures, positions=structures.positions.double() + step)


def of_network(network: StiffnessNetwork, factor: float = 1.0) -> Step:
    """Steps of a network; `factor`: of its stiffness."""

    def errors(examples: Examples) -> Tensor:
        found = []
        for part in torch.arange(examples.number).split(AT_ONCE):
            own = examples.select(part)
            with torch.no_grad():
                found.append(relative_errors(network, softer(own, factor)))
        return torch.cat(found)

    return errors


def softer(examples: Examples, factor: float) -> Examples:
    """The same, with pulls divided by a factor: what a stiffness so many times as large does with them."""
    if factor == 1 or examples.left_over is None:
        return examples
    pulls = pulls_of(examples.state)
    difference = pulls - examples.left_over
    smaller = Unknowns(difference.atoms / factor, difference.cells / factor)
    return replace(examples, left_over=pulls - smaller)


def of_springs(factor: float) -> Step:
    """Steps of the springs alone, times a factor."""

    def errors(examples: Examples) -> Tensor:
        assert examples.left_over is not None
        frame = SolveInputs.of(examples.state, StiffnessSettings(), torch.float64)
        springs, structures = frame.prior(), examples.state.structures
        goal = Unknowns(examples.goal.displacements.double(), strain_vectors(examples.goal.strains).double())
        pulls = pulls_of(examples.state) - examples.left_over
        wrong = solve(springs, Unknowns(pulls.atoms / factor, pulls.cells / factor)) - goal
        square = wrong.dot(springs.apply(wrong), structures) / goal.dot(springs.apply(goal), structures)
        return square.sqrt()

    return errors


def of_hessian(examples: Examples, engine: Potential, file: Path) -> Tensor:
    """The errors of the potential's own Hessian; made once."""
    kept = np.loadtxt(file, ndmin=1).tolist() if file.exists() else []
    for number in range(len(kept), min(HESSIANS, examples.number)):
        one = examples.select(torch.tensor([number]))
        kept.append(missed(one, newton(one, engine)))
        np.savetxt(file, kept)
    return torch.tensor(kept[:HESSIANS])


def best_factor(of: Callable[[float], Step], examples: Examples) -> float:
    few = examples.select(torch.linspace(0, examples.number - 1, 300).long())
    return min(FACTORS, key=lambda factor: float(of(factor)(few).clamp_max(LARGEST_ERROR).mean()))


def taught(
    parts: Sequence[Examples], shares: Sequence[float], seed: int, updates: int, **changes: object
) -> StiffnessNetwork:
    """A new network, by examples of these sets, each with its share of every update."""
    settings = settings_of(POLICY, {"fit_updates": updates, **changes})
    generator = torch.Generator().manual_seed(seed)
    network = StiffnessNetwork(settings.stiffness, generator)
    fit = Fit(network, ExampleDataset(), settings.fit)
    number = settings.fit.examples_per_update
    while not fit.done:
        drawn = [
            part.select(torch.randint(part.number, (round(share * number),), generator=generator))
            for part, share in zip(parts, shares, strict=True)
        ]
        fit.learn_from(Examples.concatenate(drawn))
    return network


class Table:
    """Rows for all states and by distance; those that are in the file are printed, not made again."""

    def __init__(self, file: Path, test: Examples) -> None:
        self.file = file
        self.ways = test.goal.largest_displacements(test.state.structures)
        self.kept = json.loads(file.read_text()) if file.exists() else {}
        counts = [int(((self.ways >= low) & (self.ways < high)).sum()) for low, high in DISTANCES.values()]
        heads = [f"{name} ({count})" for name, count in zip(DISTANCES, counts, strict=True)]
        print(f"| states of {VALIDATION} crystals | {' | '.join(heads)} | learned from | CPU seconds |")
        print("|---" * (len(DISTANCES) + 3) + "|", flush=True)

    def row(self, name: str, make: Callable[[], tuple[Tensor, float | None]]) -> None:
        """`make`: the errors at all states, and that at the states learned from."""
        if name not in self.kept:
            begun = time.process_time()
            errors, own = make()
            errors = errors.clamp_max(LARGEST_ERROR)
            ways = self.ways[: len(errors)]
            means = [float(errors[(ways >= low) & (ways < high)].mean()) for low, high in DISTANCES.values()]
            self.kept[name] = [*means, own, time.process_time() - begun]
            self.file.write_text(json.dumps(self.kept, indent=1))
        *means, own, seconds = self.kept[name]
        cells = [f"{mean:.3f}" for mean in means]
        print(f"| {name} | {' | '.join(cells)} | {'' if own is None else f'{own:.3f}'} | {seconds:.0f} |", flush=True)


def mean_of(step: Step, examples: Examples) -> float:
    return float(step(examples).clamp_max(LARGEST_ERROR).mean())


def few_of(examples: Examples) -> Examples:
    return examples.select(torch.linspace(0, examples.number - 1, min(300, examples.number)).long())


def baselines(table: Table, test: Examples, rest: Examples, engine: Potential, folder: Path) -> None:
    factor = best_factor(of_springs, rest)
    table.row(f"springs times {factor}", lambda: (of_springs(factor)(test), mean_of(of_springs(factor), few_of(rest))))
    shipped = network_of_policy(POLICY)[0]
    factor = best_factor(lambda factor: of_network(shipped, factor), rest)
    for one in sorted({1.0, factor}):
        step = of_network(shipped, one)
        name = POLICY if one == 1 else f"{POLICY}, stiffness times {one}"
        table.row(name, lambda step=step: (step(test), mean_of(step, few_of(rest))))
    table.row(f"{POLICY}, first {HESSIANS} states", lambda: (of_network(shipped)(test)[:HESSIANS], None))
    table.row(
        f"Hessian of SevenNet, first {HESSIANS} states",
        lambda: (of_hessian(test, engine, folder / "hessian.txt"), None),
    )


def learn(
    table: Table,
    name: str,
    test: Examples,
    parts: Sequence[Examples],
    given: argparse.Namespace,
    **changes: object,
) -> None:
    """Networks taught by two thirds of the first of these sets and one of the second, or by the first alone."""
    shares = [1.0] if len(parts) == 1 else [0.67, 0.33]

    def make(seed: int) -> tuple[Tensor, float]:
        step = of_network(taught(parts, shares, seed, given.updates, **changes))
        return step(test), mean_of(step, few_of(parts[0]))

    for seed in range(given.seeds):
        table.row(f"{name}, {given.updates} updates, seed {seed}", lambda seed=seed: make(seed))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--axis", nargs="*", default=[], choices=("width", "rows"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.folder.mkdir(parents=True, exist_ok=True)
    engine = potential(ENGINE)
    test_runs, rest_runs = collect(given.folder, engine)
    each = [found for one in rest_runs if (found := examples_of(one)) is not None]
    test = Examples.concatenate([found for one in test_runs if (found := examples_of(one)) is not None])
    rest = Examples.concatenate(each)
    print(f"{len(test_runs)} and {len(rest_runs)} crystals, {test.number} and {rest.number} states", flush=True)
    table = Table(given.folder / "table.json", test)
    baselines(table, test, rest, engine, given.folder)
    for number in NUMBERS:
        some = Examples.concatenate(each[:number])
        learn(table, f"{min(number, len(each))} crystals", test, [some], given)
    if "rows" in given.axis:
        (given.folder / "rows").mkdir(exist_ok=True)
        rows = [rows_of(one, engine, given.folder / "rows" / f"{one.key}.npz") for one in rest_runs]
        near = Examples.concatenate([one for one in rows if one is not None])
        learn(table, f"{len(each)} crystals and {near.number} rows", test, [rest, near], given)
    if "width" in given.axis:
        learn(table, f"{len(each)} crystals, 96 channels", test, [rest], given, channels=96, n_hidden=96)


if __name__ == "__main__":
    main()
