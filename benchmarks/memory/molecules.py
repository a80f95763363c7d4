"""What the classical core could learn about molecules from use: tried on relaxations of the row's generator.

    python benchmarks/memory/molecules.py --work WORK                          # resumable; results/molecules-tries.json
    python benchmarks/memory/molecules.py --work WORK --tries hessian --number 24

The first molecules (seed 4401) are relaxed with a memory, something is learned from it without a force call, and other
molecules (seed 4402) are relaxed with what was learned. The row of `row.py` has another seed and is not looked at.

step, symmetric  log-factors of the shipped types, fitted to ways and steps of the memory
finer            as `symmetric`, with further types by the elements around
table            as `finer`, fitted to Hessians of GFN2 at the ends (their calls are not counted): the best such a table
                 could be
natural          lengths of bonds and bends by type, as they were at the ends; the first two steps are drawn there
hessian          no learning: the Hessian of GFN2 at every base in place of the model, the best any stiffness could be
"""

from __future__ import annotations

import argparse
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import scipy.sparse
import torch
from ase import Atoms
from row import CAP, RESULTS, molecule

from relaxion import Relaxer
from relaxion.database import RelaxationDatabase, Trajectory
from relaxion.optimizer import classical as quasi_newton
from relaxion.optimizer.hessian import internal as model
from relaxion.optimizer.hessian import internal_coordinates as factors
from relaxion.optimizer.hessian.internal import InternalHessian, InternalSecants, internal_at, near_pairs
from relaxion.optimizer.hessian.internal_coordinates import MOLECULE_FLOOR, STRETCH, changes_of, shares
from relaxion.optimizer.hessian.internal_topology import Topology
from relaxion.optimizer.hessian.springs import SpringSettings, bonds_of
from relaxion.optimizer.point import Array, Geometry, Point, dot, longest
from relaxion.potentials.base import PotentialCalculator
from relaxion.potentials.counting import CountingCalculator
from relaxion.potentials.registry import make_potential
from relaxion.structures import Outcome
from relaxion.train.judge.statistics import resampled
from relaxion.train.supervised.fit import bases_of

LEARNED_FROM, TRIED = 4401, 4402  # seeds
LIMITS = (1.0, 0.25, 0.05)  # eV/Å, for the calls on the way; the last one ends a relaxation
WIDTH = 0.3  # of a log-factor around the shipped one
MOST_EXAMPLES = 6  # of one relaxation
SHORTEST, FARTHEST = 5e-3, 1.0  # Å, of ways and steps that teach
SOFTEST = 0.02  # eV/Å², likewise
FEWEST = 3  # coordinates of a type that make a natural value
NARROWEST = {"bond": 0.004, "bend": 0.02}  # Å, radians: no natural value is known better
DOUBT = 0.3  # share of the expected energy change by which steps of the model are wrong
DRAWN_STEPS = 2
SHIFT = 0.01  # Å, of the differences that make a Hessian

Labels = tuple[str, ...]
Natural = Mapping[str, tuple[float, float, int]]  # mean, variance and number by label


def starts(seed: int, number: int) -> Iterator[Atoms]:
    for index in range(number):
        atoms = molecule(np.random.default_rng([seed, 5, index]))
        atoms.info = {}
        yield atoms


def relaxed(seed: int, number: int, memory: Path | None = None) -> list[list[int]]:
    """Calls of each molecule to each limit; failures are charged the cap."""
    potential, result = make_potential("gfn2", None), list[list[int]]()
    for atoms in starts(seed, number):
        atoms.calc = CountingCalculator(potential, stress=False, limit=CAP)
        optimizer = Relaxer(atoms, logfile=None, policy=None, database=memory)
        optimizer.run(fmax=LIMITS[-1], steps=CAP)
        forces = [entry.fmax_ev_per_angstrom for entry in optimizer.history]
        result.append([next((k for k, f in enumerate(forces, start=1) if f < limit), CAP) for limit in LIMITS])
    return result


def remembered(work: Path, number: int) -> list[Trajectory]:
    """Relaxations to learn from, those of an earlier start of this script included."""
    folder = work / "memory"
    if not (work / "memory.json").exists():
        (work / "memory.json").write_text(json.dumps(relaxed(LEARNED_FROM, number, folder)))
    return [each for each in RelaxationDatabase.open(folder) if each.outcome == Outcome.CONVERGED]


# ---- stiffness ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Rows:
    """The model at one base as rows: B = Σ k rows·rowsᵀ + floor."""

    model: InternalHessian
    slopes: Array  # (n_rows, 3·n_atoms)
    constants: Array  # with the shipped factors
    labels: list[Labels]


@dataclass(frozen=True, eq=False)
class Example:
    """The model somewhere, and what it should have been like: a step and the drop of the forces, or a Hessian."""

    rows: Rows
    truth: tuple[Array, ...]


def points_of(trajectory: Trajectory) -> list[Point]:
    numbers, energies = trajectory.numbers.numpy(), trajectory.energies.tolist()
    free = np.ones((len(numbers), 3), dtype=bool)
    return [
        Point(x, f, e, Geometry(x, np.zeros((3, 3)), np.zeros(3, dtype=bool), numbers, free))
        for x, f, e in zip(trajectory.positions.numpy(), trajectory.forces.numpy(), energies, strict=True)
    ]


def model_at(geometry: Geometry, known: Topology | None = None) -> InternalHessian | None:
    return internal_at(geometry, bonds_of([geometry])[0], known, SpringSettings())


def rows_at(point: Point, known: Topology | None) -> Rows | None:
    geometry = point.geometry
    assert geometry is not None
    found = model_at(geometry, known)
    if found is None:
        return None
    near = near_pairs(geometry, found.topology)
    changes = changes_of(near.first, near.second, near.vectors, geometry).toarray().reshape(len(near.first), 3, -1)
    along = np.einsum("pi,pix->px", near.vectors / near.lengths[:, None], changes)
    stretches = np.minimum(shares(geometry, near.first, near.second, near.lengths), 1.0)
    stretches *= STRETCH * factors.near_factors(geometry, near)
    labels = [*factors.labels_of(found.topology), *((name,) for name in factors.near_labels(geometry, near).tolist())]
    slopes = np.concatenate([found.slopes.toarray(), along])
    return Rows(found, slopes, np.concatenate([found.constants, stretches]), labels)


def secants_of(trajectory: Trajectory, random: np.random.Generator) -> list[Example]:
    """From bases to the end and to the next base, some of them."""
    points, known, found = points_of(trajectory), None, list[Example]()
    bases = bases_of(trajectory).tolist()
    for here, after in pairwise(bases):
        rows = rows_at(points[here], known)
        if rows is None:
            continue
        known = rows.model.topology
        for later in {after, bases[-1]}:
            memory = InternalSecants()
            memory.learn(points[here], points[later])
            step, drop = memory.secants(rows.model)[0]
            if SHORTEST < longest(step) < FARTHEST and dot(step, drop) > SOFTEST * dot(step, step):
                found.append(Example(rows, (step.ravel(), drop.ravel())))
    chosen = random.permutation(len(found))[:MOST_EXAMPLES]
    return [found[place] for place in sorted(chosen)]


def hessians_of(trajectory: Trajectory, _random: np.random.Generator) -> list[Example]:
    """Of the end."""
    point = points_of(trajectory)[-1]
    rows = rows_at(point, None)
    return [] if rows is None else [Example(rows, (hessian_of(rows.model.geometry),))]


def step_error(stiffness: torch.Tensor, shipped: torch.Tensor, step: torch.Tensor, drop: torch.Tensor) -> torch.Tensor:
    """As `relaxion learn` has it."""
    missed = torch.cholesky_solve(drop[:, None], torch.linalg.cholesky(stiffness))[:, 0] - step
    return torch.sqrt(missed @ shipped @ missed / (step @ shipped @ step) + 1e-10).clamp_max(3.0)


def symmetric_error(
    stiffness: torch.Tensor, _shipped: torch.Tensor, step: torch.Tensor, drop: torch.Tensor
) -> torch.Tensor:
    """|B^½·s - B^-½·y|² / s·y: steps and forces count alike, too soft and too stiff alike."""
    solved = torch.cholesky_solve(drop[:, None], torch.linalg.cholesky(stiffness))[:, 0]
    return torch.log1p((step @ stiffness @ step + drop @ solved) / (step @ drop) - 2)


def divergence(stiffness: torch.Tensor, _shipped: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """tr(B⁻¹H) + ln det B, halved: how the shipped factors were fitted."""
    factor = torch.linalg.cholesky(stiffness)
    return torch.cholesky_solve(hessian, factor).trace() / 2 + factor.diagonal().log().sum()


def fitted(examples: Sequence[Example], error: Callable[..., torch.Tensor]) -> dict[str, float]:
    """Log-factors by label, the shipped ones included."""
    names = sorted({label for each in examples for labels in each.rows.labels for label in labels})
    place = {name: number for number, name in enumerate(names)}
    parts = [_tensors(each, place) for each in examples]
    changes, nothing = torch.zeros(len(names), dtype=torch.float64, requires_grad=True), torch.zeros(1)
    optimizer = torch.optim.LBFGS([changes], max_iter=25, line_search_fn="strong_wolfe", history_size=15)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        total = changes.square().sum() / (2 * WIDTH**2)
        for slopes, constants, which, shipped, *truth in parts:
            grown = constants * torch.exp(torch.cat([changes, nothing])[which].sum(dim=1))
            total = total + error(_stiffness(slopes, grown), shipped, *truth)
        total.backward()
        return total

    optimizer.step(loss)
    found = dict(zip(names, changes.tolist(), strict=True))
    return {name: factors.LOGARITHMS.get(name, 0.0) + found.get(name, 0.0) for name in {*found, *factors.LOGARITHMS}}


def _tensors(example: Example, place: Mapping[str, int]) -> tuple[torch.Tensor, ...]:
    slopes, constants = torch.from_numpy(example.rows.slopes), torch.from_numpy(example.rows.constants)
    columns = zip_longest(*([place[label] for label in labels] for labels in example.rows.labels), fillvalue=len(place))
    which = torch.tensor(list(columns)).T  # (n_rows, n_labels); the last number is nobody's
    shipped = _stiffness(slopes, constants)
    return slopes, constants, which, shipped, *map(torch.from_numpy, example.truth)


def _stiffness(slopes: torch.Tensor, constants: torch.Tensor) -> torch.Tensor:
    floor = MOLECULE_FLOOR * torch.eye(slopes.shape[1], dtype=torch.float64)
    return slopes.mT @ (constants[:, None] * slopes) + floor


def surroundings(topology: Topology) -> list[str]:
    """Of each atom: element and those of its neighbours."""
    symbols = Atoms(numbers=topology.made_at.numbers).get_chemical_symbols()
    around = defaultdict[int, list[str]](list)
    number = 2 * topology.n_bonds
    for one, other in zip(topology.links.first[:number], topology.links.second[:number], strict=True):
        around[int(one)].append(symbols[int(other)])
    return [f"{symbol}({''.join(sorted(around[atom]))})" for atom, symbol in enumerate(symbols)]


def finer_labels(topology: Topology, plain: Callable[[Topology], list[Labels]] = factors.labels_of) -> list[Labels]:
    """With one more label of each bond and bend: the elements around its atoms."""
    first, second, names = topology.links.first, topology.links.second, surroundings(topology)
    more = [f"bond {'-'.join(sorted((names[first[k]], names[second[k]])))}" for k in range(topology.n_bonds)]
    for one, other in topology.bends:
        ends = sorted(names[second[k]].split("(")[0] for k in (one, other))
        more.append(f"bend {names[first[one]]} {'-'.join(ends)}")
    known = plain(topology)
    return [(*labels, more[k]) if k < len(more) else labels for k, labels in enumerate(known)]


def with_factors(table: Mapping[str, float], *, finer: bool = False) -> AbstractContextManager[Any]:
    stack = ExitStack()
    stack.enter_context(mock.patch.object(factors, "LOGARITHMS", table))
    if finer:
        stack.enter_context(mock.patch.object(factors, "labels_of", finer_labels))
    return stack


def by_fit(
    error: Callable[..., torch.Tensor], truths: Callable[..., list[Example]] = secants_of, *, finer: bool = False
) -> Callable[..., AbstractContextManager[Any]]:
    def learned(trajectories: Sequence[Trajectory]) -> AbstractContextManager[Any]:
        random = np.random.default_rng(0)
        with with_factors(factors.LOGARITHMS, finer=finer):
            examples = [each for one in trajectories for each in truths(one, random)]
        return with_factors(fitted(examples, error), finer=finer)

    return learned


# ---- natural values -------------------------------------------------------------------------------------------------


def natural_values(trajectories: Sequence[Trajectory]) -> Natural:
    """Of bonds and bends at the ends, by label."""
    values = defaultdict[str, list[float]](list)
    for trajectory in trajectories:
        geometry = points_of(trajectory)[-1].geometry
        found = None if geometry is None else model_at(geometry)
        for labels, value in zip(finer_labels(found.topology), found.values.q, strict=True) if found else ():
            for label in labels[1:] if labels[0] in NARROWEST else ():
                values[label].append(float(value))
    enough = {label: np.array(those) for label, those in values.items() if len(those) >= FEWEST}
    return {label: (float(those.mean()), float(those.var(ddof=1)), len(those)) for label, those in enough.items()}


def goals_of(found: InternalHessian, natural: Natural) -> tuple[Array, Array]:
    """The natural value of each coordinate by its most special label, and how sure it is (1/variance; 0: unknown)."""
    goals, weights = np.zeros(len(found.values.q)), np.zeros(len(found.values.q))
    for row, labels in enumerate(finer_labels(found.topology)):
        variance = None
        for label in labels[1:] if labels[0] in NARROWEST else ():
            if label in natural:  # from the general to the special: variances of few are drawn to those of more
                goals[row], own, number = natural[label]
                variance = own if variance is None else (number * own + FEWEST * variance) / (number + FEWEST)
        if variance is not None:
            weights[row] = 1 / (variance + NARROWEST[labels[0]] ** 2)
    return goals, weights


def by_natural_values(trajectories: Sequence[Trajectory]) -> AbstractContextManager[Any]:
    """The first steps are drawn to natural values, as strongly as the model's own answer is in doubt."""
    natural, within = natural_values(trajectories), quasi_newton.within

    def drawn(trust: float, forces: Array, secants: list[Any], found: InternalHessian) -> tuple[Array, float]:
        step, floor = within(trust, forces, secants, found)
        if len(secants) >= DRAWN_STEPS:
            return step, floor
        goals, weights = goals_of(found, natural)
        weights *= DOUBT * dot(forces, step) / step.size
        missing = np.where(weights > 0, goals - found.values.q - found.slopes @ step.ravel(), 0.0)
        pull = found.slopes.T @ (scipy.sparse.diags_array(weights) @ found.slopes)
        stiffness = (found.matrix + pull).toarray() + floor * np.eye(step.size)
        better = step + np.linalg.solve(stiffness, found.slopes.T @ (weights * missing)).reshape(step.shape)
        if dot(better, forces) <= 0:
            return step, floor
        return better * min(1.0, trust / longest(better)), floor

    return mock.patch.object(quasi_newton, "within", drawn)


# ---- the best there could be ----------------------------------------------------------------------------------------


def by_hessian(_trajectories: Sequence[Trajectory]) -> AbstractContextManager[Any]:
    """The Hessian at every base, without secants; its calls are not counted."""
    plain = InternalHessian.__init__

    def exact(self: InternalHessian, topology: Topology, geometry: Geometry, *rest: Any) -> None:
        plain(self, topology, geometry, *rest)
        self.matrix = scipy.sparse.csr_array(hessian_of(geometry))

    stack = ExitStack()
    stack.enter_context(mock.patch.object(model.InternalHessian, "__init__", exact))
    stack.enter_context(mock.patch.object(InternalSecants, "secants", return_value=[]))
    return stack


def hessian_of(geometry: Geometry) -> Array:
    """By GFN2, no mode softer than the floor of the model."""
    atoms = Atoms(geometry.numbers, geometry.positions)
    atoms.calc = PotentialCalculator(make_potential("gfn2", None))
    before, rows = atoms.get_forces().ravel(), list[Array]()
    for place in range(before.size):
        moved = geometry.positions.copy()
        moved.flat[place] += SHIFT
        atoms.positions = moved
        rows.append((before - atoms.get_forces().ravel()) / SHIFT)
    values, vectors = np.linalg.eigh((np.array(rows) + np.array(rows).T) / 2)
    return (vectors * np.maximum(np.abs(values), MOLECULE_FLOOR)) @ vectors.T


TRIES: dict[str, Callable[[Sequence[Trajectory]], AbstractContextManager[Any]]] = {
    "shipped": lambda _: nullcontext(),
    "step": by_fit(step_error),
    "symmetric": by_fit(symmetric_error),
    "finer": by_fit(symmetric_error, finer=True),
    "table": by_fit(divergence, hessians_of, finer=True),
    "natural": by_natural_values,
    "hessian": by_hessian,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--learned-from", type=int, default=160, help="relaxations in the memory")
    parser.add_argument("--number", type=int, default=200, help="molecules relaxed with what was learned")
    parser.add_argument("--tries", default="shipped,step,symmetric,finer,natural,table")
    given = parser.parse_args()
    logging.disable(logging.INFO)
    given.work.mkdir(parents=True, exist_ok=True)
    trajectories = remembered(given.work, given.learned_from)
    calls = dict[str, Any]()
    for name in dict.fromkeys(["shipped", *given.tries.split(",")]):
        file = given.work / f"{name}-{given.number}.json"
        if not file.exists():
            with TRIES[name](trajectories):
                file.write_text(json.dumps(relaxed(TRIED, given.number)))
        calls[name] = json.loads(file.read_text())
        told = np.array(calls[name], dtype=float)
        ratio = resampled(told[:, -1], np.array(calls["shipped"], dtype=float)[:, -1])
        print(f"{name}: calls to {LIMITS} eV/Å {told.mean(axis=0).round(2)}, of the shipped {ratio:.3f}", flush=True)
    RESULTS.mkdir(exist_ok=True)
    kept = RESULTS / "molecules-tries.json"
    known = json.loads(kept.read_text()) if kept.exists() else {}
    known[str(given.number)] = known.get(str(given.number), {}) | calls
    kept.write_text(json.dumps(known) + "\n")


if __name__ == "__main__":
    main()
