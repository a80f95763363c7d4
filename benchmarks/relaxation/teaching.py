"""How well does a network know the stiffness, near a minimum and far from it, and what teaches it sooner?

    python benchmarks/relaxation/teaching.py metals [FILE ...]                  # 20 minutes; for choices, not results
    python benchmarks/relaxation/teaching.py universal --gatherings 4 --updates 0                  # CHGNet, 5 minutes
    python benchmarks/relaxation/teaching.py universal --engine SevenNet --gatherings 8 --updates 0 --further 200

The shipped policy relaxes fresh starts of the kinds it is taught (seed 77), gathering by gathering as in its training.
The first fifth of the gatherings is kept for the test, and from the rest new networks learn from nothing: with Adam or
Muon, with springs that only pull or with pairs that may soften (`softens`). Where nothing is taught, all are the test.
With `--further` the shipped policy also learns from the rest, at low rates, and its steps are shortened by one factor.

Printed is the mean relative error of the step at states of the test, those of structures with fixed cells and few
atoms (`train/supervised/fit.py`), by how far the farthest atom is from the end, and the processor time of the
teaching; beside them that of finished policies, and of the Hessian of the potential at each state, made by differences,
eigenvalues taken by their size and none below 0.3 eV/Å².
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from itertools import product

import numpy as np
import torch
from own_kinds import network_of_policy
from torch import Tensor

from relaxion.model.stiffness import Unknowns, strain_vectors
from relaxion.model.stiffness_network import SolveInputs, StiffnessNetwork, StiffnessSettings, pulls_of
from relaxion.potentials.base import Potential
from relaxion.structures import Structures
from relaxion.train.supervised.dataset import LiveExamples
from relaxion.train.supervised.fit import ExampleDataset, Examples, Fit, relative_errors
from relaxion.train.tasks.settings import find, settings_from_recipe
from relaxion.train.tasks.stiffness import StiffnessRunSettings

SEED, AT_ONCE = 77, 200
SHIFT, FLOOR, LARGEST_ERROR = 0.01, 0.3, 3.0  # Å, eV/Å²
DISTANCES = {"all": (0.0, 9.0), "below 0.1 Å": (0.0, 0.1), "0.1 to 0.3 Å": (0.1, 0.3), "beyond": (0.3, 9.0)}

FACTORS = (0.8, 1.2, 1.4, 1.6)  # of a whole stiffness
FURTHER = {"fit_learning_rate": 5e-4}

Errors = Callable[[int, Examples], np.ndarray]  # of a source's lessons


def settings_of(recipe: str, changes: Mapping[str, object]) -> StiffnessRunSettings:
    settings = settings_from_recipe(find(recipe), None, {"seed": SEED, **changes})
    assert isinstance(settings, StiffnessRunSettings)
    return settings


def gathered(policy: str, number: int, engine: str | None) -> LiveExamples:
    """Examples of all gatherings, none forgotten; `engine`: of the kinds that it relaxes, alone."""
    trainer = settings_of(policy, {"example_rounds_kept": number}).trainer()
    trainer.policy.network = network_of_policy(policy)[0]
    examples = trainer.fit.dataset
    assert isinstance(examples, LiveExamples)
    if engine is not None:
        examples.sources = [source for source in examples.sources if source.potential.name == engine]
        examples.shares = [1 / len(examples.sources)] * len(examples.sources)
    for _ in range(number):
        examples.relax()
    return examples


def tested(lessons: Examples, most_atoms: int, most: int) -> Examples:
    """So many of those that the Hessian can be made of, drawn by chance."""
    structures = lessons.state.structures
    good = (~structures.cell_free & (structures.counts <= most_atoms)).nonzero().flatten()
    return lessons.select(good[torch.randperm(len(good), generator=torch.Generator().manual_seed(SEED))[:most]])


def of_network(network: StiffnessNetwork, factor: float = 1.0) -> Errors:
    """With a stiffness so many times as large: what a step misses if forces are smaller by that."""

    def errors(_: int, lessons: Examples) -> np.ndarray:
        shares = torch.full((lessons.number,), 1 - 1 / factor, dtype=torch.float64)
        rest = pulls_of(lessons.state).scaled(shares, lessons.state.structures)
        lessons = replace(lessons, left_over=rest)
        parts = torch.arange(lessons.number).split(AT_ONCE)
        with torch.no_grad():
            return torch.cat([relative_errors(network, lessons.select(part)) for part in parts]).numpy()

    return errors


def of_hessian(potentials: list[Potential]) -> Errors:
    """By differences; what may not move has none."""

    def errors(place: int, lessons: Examples) -> np.ndarray:
        each = (lessons.select(torch.tensor([number])) for number in range(lessons.number))
        return np.array([missed(one, newton(one, potentials[place])) for one in each])

    return errors


def newton(lesson: Examples, engine: Potential) -> Tensor:
    """The step of the Hessian made positive, (n_atoms, 3) Å."""
    structure, number = lesson.state.structures, 3 * lesson.state.structures.n_atoms
    positions = structure.positions.double()
    shifts = SHIFT * torch.eye(number, dtype=torch.float64).view(number, -1, 3)
    shifted = [replace(structure, positions=positions + sign * shift) for shift in shifts for sign in (1, -1)]
    forces = engine(Structures.concatenate(shifted)).forces.double().view(number, 2, number)
    moving = structure.movable.repeat_interleave(3)
    hessian = -((forces[:, 0] - forces[:, 1]) / (2 * SHIFT))[moving][:, moving]
    values, vectors = torch.linalg.eigh((hessian + hessian.T) / 2)
    step = torch.zeros(number, dtype=torch.float64)
    pulls = pulls_of(lesson.state).atoms
    pulls = (pulls if lesson.left_over is None else pulls - lesson.left_over.atoms).flatten()[moving]
    step[moving] = vectors @ ((vectors.T @ pulls) / values.abs().clamp_min(FLOOR))
    return step.view(-1, 3)


def missed(lesson: Examples, step: Tensor) -> float:
    """The relative error of a step, as the fit has it."""
    structure, shape = lesson.state.structures, StiffnessSettings()
    springs = SolveInputs.of(lesson.state, shape, torch.float32).prior().to(torch.float64)
    goal = Unknowns(lesson.goal.displacements.double(), strain_vectors(lesson.goal.strains).double())
    wrong = Unknowns(step, torch.zeros_like(goal.cells)) - goal
    return float(torch.sqrt(wrong.dot(springs.apply(wrong), structure) / goal.dot(springs.apply(goal), structure)))


def taught(
    examples: LiveExamples,
    pools: dict[int, Examples],
    settings: StiffnessRunSettings,
    seed: int,
    network: StiffnessNetwork | None = None,
) -> StiffnessNetwork:
    """A new network, or this one, by lessons drawn as in training."""
    generator = torch.Generator().manual_seed(seed)
    network = StiffnessNetwork(settings.stiffness, generator) if network is None else deepcopy(network).requires_grad_()
    fit = Fit(network, ExampleDataset(), settings.fit)
    while not fit.done:
        drawn = []
        for place, pool in pools.items():
            number = examples._number(place, "examples_per_update")
            drawn.append(pool.select(torch.randint(pool.number, (number,), generator=generator)))
        fit.learn_from(Examples.concatenate(drawn))
    return network


def show(name: str, learned: list[Errors], tests: dict[int, Examples], seconds: float | None = None) -> None:
    """The mean over those that learned alike, and the lowest and highest of all states."""
    ways = np.concatenate([t.goal.largest_displacements(t.state.structures).numpy() for t in tests.values()])
    rows = []
    for errors in learned:
        own = np.concatenate([errors(place, lessons).clip(max=LARGEST_ERROR) for place, lessons in tests.items()])
        rows.append([own[(ways >= low) & (ways < high)].mean() for low, high in DISTANCES.values()])
    cells = [f"{mean:.3f}" for mean in np.mean(rows, axis=0)]
    if len(rows) > 1:
        cells[0] += f" ({min(row[0] for row in rows):.3f}–{max(row[0] for row in rows):.3f})"
    print(f"| {name} | {' | '.join(cells)} | {'' if seconds is None else f'{seconds:.0f}'} |", flush=True)


def show_further(
    policy: str,
    examples: LiveExamples,
    rest: dict[int, Examples],
    tests: dict[int, Examples],
    updates: int,
    seeds: int,
) -> None:
    """The shipped network with one factor for all, and taught by the lessons at hand."""
    for factor in FACTORS:
        show(f"{policy}, stiffness times {factor}", [of_network(network_of_policy(policy)[0], factor)], tests)
    settings, begin = settings_of(policy, FURTHER | {"fit_updates": updates}), time.process_time()
    networks = [taught(examples, rest, settings, seed, network_of_policy(policy)[0]) for seed in range(seeds)]
    seconds = (time.process_time() - begin) / seeds
    show(f"{policy}, {updates} updates further", [of_network(network) for network in networks], tests, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("policy", choices=("metals", "universal"), help="whose relaxations, potentials and recipe")
    parser.add_argument("others", nargs="*", help="names or files of other finished policies")
    parser.add_argument("--gatherings", type=int, default=40)
    parser.add_argument("--engine", help="only kinds that this potential relaxes, each as often: SevenNet")
    parser.add_argument("--updates", type=int, default=300, help="of each new network; 0: none is taught")
    parser.add_argument("--further", type=int, default=0, help="updates of the shipped policy")
    parser.add_argument("--seeds", type=int, default=3, help="new networks of each sort")
    parser.add_argument("--most-atoms", type=int, default=12, help="of structures in the test")
    parser.add_argument("--most-states", type=int, default=40, help="of each kind in the test")
    given = parser.parse_args()
    torch.set_num_threads(1)
    examples = gathered(given.policy, given.gatherings, given.engine)
    first = -(-given.gatherings // 5) if given.updates or given.further else given.gatherings
    test, rest = (
        {place: Examples.concatenate(own) for place in range(len(examples.sources)) if (own := of_source(those, place))}
        for those in (examples.rounds[:first], examples.rounds[first:])
    )
    tests = {place: tested(lessons, given.most_atoms, given.most_states) for place, lessons in test.items()}
    tests = {place: lessons for place, lessons in tests.items() if lessons.number}
    print(f"| {sum(one.number for one in tests.values())} states | {' | '.join(DISTANCES)} | CPU seconds |")
    print("|---" * (2 + len(DISTANCES)) + "|")
    for name in (given.policy, *given.others):
        show(name, [of_network(network_of_policy(name)[0])], tests)
    if given.further:
        show_further(given.policy, examples, rest, tests, given.further, given.seeds)
    show("Hessian of the potential", [of_hessian([source.potential for source in examples.sources])], tests)
    for optimizer, softens in product(("adam", "muon"), (False, True)) if given.updates else ():
        changes = {"fit_optimizer": optimizer, "softens": softens, "fit_updates": given.updates}
        settings, begin = settings_of(given.policy, changes), time.process_time()
        networks = [taught(examples, rest, settings, seed) for seed in range(given.seeds)]
        seconds = (time.process_time() - begin) / given.seeds
        name = f"{optimizer.capitalize()}, {'pairs that soften' if softens else 'springs'}, {given.updates} updates"
        show(name, [of_network(network) for network in networks], tests, seconds)


def of_source(kept: list[dict[int, Examples]], place: int) -> list[Examples]:
    return [own[place] for own in kept if place in own]


if __name__ == "__main__":
    main()
