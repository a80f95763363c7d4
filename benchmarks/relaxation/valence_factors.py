"""Factors on the force constants of molecules, fitted by type to Hessians, and what they give on validation starts.

    python benchmarks/relaxation/valence_factors.py --hessians FOLDER --factors FILE.json

Lindh's force constants depend on periods and lengths only. Each type of coordinate (elements, neighbours, rings) gets a
factor of its own, fitted to finite-difference Hessians of GFN2-xTB at minima of training molecules. The fit makes B as
near to the Hessian as possible in the sense of normal distributions, tr(B⁻¹H) + ln det B, with a prior of width `PRIOR`
on each log-factor. `src/relaxion/optimizer/hessian/internal_factors.json` was made so. Training molecules are of the
training side and of seed 500; the trial is on seed 7000.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
from ase import Atoms
from flexible_molecules import flexible_molecule
from molecular_sets import find_set
from scipy.optimize import minimize

from relaxion import Relaxer
from relaxion.optimizer.hessian import internal_coordinates as factors
from relaxion.optimizer.hessian.internal import InternalHessian, between, internal_at, near_pairs
from relaxion.optimizer.hessian.internal_coordinates import labels_of, near_labels
from relaxion.optimizer.hessian.springs import Bonds, SpringSettings, bonds_of
from relaxion.optimizer.point import Array, Geometry
from relaxion.potentials.base import PotentialCalculator
from relaxion.potentials.counting import CountingCalculator
from relaxion.train.data.slabs import random_molecule

SEED = 500  # of the training molecules
SMALL, FLEXIBLE = 50, 18  # how many of them
PRIOR = 0.7  # standard deviation of a log-factor, before anything is seen
WIDEST = 2.0  # that of a factor on all bonds, bends, …
SOFTEST = 0.1  # eV/Å²; softer modes of the Hessian count as this, the floor of the model
SHIFT = 0.01  # Å, of finite differences
RELAXED = 0.01  # eV/Å


@dataclass(frozen=True)
class Example:
    """A minimum, its Hessian and the terms of the model there."""

    hessian: Array  # (3·n_atoms, 3·n_atoms) eV/Å², no mode softer than `SOFTEST`
    terms: Array  # (n_terms, 3·n_atoms, 3·n_atoms)
    rest: Array  # what has no factor
    labels: list[tuple[str, ...]]  # of each term


def molecules() -> Iterator[tuple[str, Atoms]]:
    """With names."""
    for number in range(SMALL):
        random = np.random.default_rng([SEED, number])
        yield f"small-{number:03d}", random_molecule(random, side="training", sizes=(3, 18))
    for number in range(FLEXIBLE):
        random = np.random.default_rng([SEED, 1, number])
        yield f"flexible-{number:03d}", flexible_molecule(random, number, sizes=(20, 28))


def hessian_of(atoms: Atoms) -> Array:
    """By forward and backward differences of the forces."""
    start, rows = atoms.positions.copy(), []
    for place in range(start.size):
        both = []
        for sign in (1, -1):
            atoms.positions = start + sign * SHIFT * np.eye(start.size)[place].reshape(-1, 3)
            both.append(atoms.get_forces().ravel())
        rows.append((both[1] - both[0]) / (2 * SHIFT))
    atoms.positions = start
    return (np.array(rows) + np.array(rows).T) / 2


def store_hessians(folder: Path) -> None:
    """What is there already stays."""
    folder.mkdir(parents=True, exist_ok=True)
    potential = find_set("flexible").make_potential()
    for name, atoms in molecules():
        path = folder / f"{name}.npz"
        if path.exists():
            continue
        atoms.calc = PotentialCalculator(potential)
        with mock.patch.object(factors, "LOGARITHMS", {}):
            Relaxer(atoms, logfile=None, policy=None).run(fmax=RELAXED, steps=100)
        np.savez(path, numbers=atoms.numbers, positions=atoms.positions, hessian=hessian_of(atoms))


def geometry_of(atoms: Atoms) -> Geometry:
    free = np.ones((len(atoms), 3), dtype=bool)
    return Geometry(atoms.positions.copy(), np.zeros((3, 3)), np.zeros(3, dtype=bool), atoms.numbers, free)


def model_at(geometry: Geometry) -> InternalHessian | None:
    """As it is without factors."""
    with mock.patch.object(factors, "LOGARITHMS", {}):
        return internal_at(geometry, bonds_of([geometry])[0], None, SpringSettings())


def example_of(path: Path) -> Example | None:
    stored = np.load(path)
    geometry = geometry_of(Atoms(stored["numbers"], stored["positions"]))
    model = model_at(geometry)
    if model is None:
        return None
    slopes, names = model.slopes.toarray(), labels_of(model.topology)
    kinds = sorted(set(names))
    chosen = [np.array([each == kind for each in names]) for kind in kinds]
    terms = [(slopes[rows].T * model.constants[rows]) @ slopes[rows] for rows in chosen]
    for kind, pairs in _near(model, geometry).items():
        kinds.append((kind,))
        terms.append(pairs)
    values, vectors = np.linalg.eigh(stored["hessian"])
    hessian = (vectors * np.maximum(np.abs(values), SOFTEST)) @ vectors.T
    return Example(hessian, np.array(terms), SOFTEST * np.eye(len(hessian)), kinds)


def _near(model: InternalHessian, geometry: Geometry) -> dict[str, Array]:
    """The springs between pairs that are not bonded, by kind."""
    near = near_pairs(geometry, model.topology)
    kinds = near_labels(geometry, near)
    parts = {}
    for kind in sorted(set(kinds.tolist())):
        some = Bonds(*(getattr(near, name)[kinds == kind] for name in Bonds.__annotations__))
        with mock.patch.object(factors, "LOGARITHMS", {}):
            parts[kind] = between(model.topology, geometry, SpringSettings(), some).toarray()
    return parts


def loss_of(logs: Array, examples: list[Example], names: list[str]) -> tuple[float, Array]:
    """tr(B⁻¹H) + ln det B of all examples with the prior, and its gradient by the log-factors."""
    widths = np.array([WIDEST if " " not in name else PRIOR for name in names])
    total, slopes = float((logs**2 / (2 * widths**2)).sum()), logs / widths**2
    for example in examples:
        which = np.array([[float(name in labels) for name in names] for labels in example.labels])
        weights = np.exp(which @ logs)
        inverse = np.linalg.inv(np.tensordot(weights, example.terms, axes=1) + example.rest)
        total += float((inverse * example.hessian).sum() - np.linalg.slogdet(inverse)[1]) / 2
        felt = inverse - inverse @ example.hessian @ inverse
        slopes = slopes + which.T @ (weights * np.tensordot(example.terms, felt, axes=2)) / 2
    return total, slopes


def fitted(examples: list[Example]) -> dict[str, float]:
    """Log-factors by label."""
    names = sorted({name for example in examples for labels in example.labels for name in labels})
    start = np.zeros(len(names))
    found = minimize(loss_of, start, args=(examples, names), jac=True, method="L-BFGS-B", options={"maxiter": 300})
    dimensions = sum(len(example.hessian) for example in examples)
    perfect = sum(len(each.hessian) + np.linalg.slogdet(each.hessian)[1] for each in examples) / 2
    losses = [loss / dimensions for loss in (loss_of(start, examples, names)[0], found.fun, perfect)]
    print("loss per coordinate: {:.4f} by rule, {:.4f} with factors, {:.4f} with the Hessians".format(*losses))
    return {name: round(value, 3) for name, value in zip(names, found.x.tolist(), strict=True)}


def tried(name: str, number: int, seed: int, logarithms: dict[str, float]) -> list[list[int]]:
    """Calls to 0.05 and 0.01 eV/Å of the first starts, with these factors."""
    with mock.patch.object(factors, "LOGARITHMS", logarithms):
        return [_calls(start, name) for start in find_set(name).starts(number, seed)]


def _calls(start: Atoms, name: str) -> list[int]:
    forces = list[float]()
    start.calc = counter = CountingCalculator(find_set(name).make_potential(), stress=False, limit=400)
    counter.on_answer = lambda point: forces.append(float(np.linalg.norm(point.answer["forces"], axis=1).max()))
    Relaxer(start, logfile=None, policy=None).run(fmax=0.01, steps=400)
    return [next((k for k, force in enumerate(forces, start=1) if force < limit), 400) for limit in (0.05, 0.01)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hessians", type=Path, required=True, help="folder, filled where it is not")
    parser.add_argument("--factors", type=Path, required=True, help="written where it is not there")
    parser.add_argument("--seed", type=int, default=7000)
    parser.add_argument("--sets", default="molecules:25,flexible:24", help="tried with and without the factors")
    given = parser.parse_args()
    logging.disable(logging.INFO)
    if not given.factors.exists():
        store_hessians(given.hessians)
        examples = [example_of(path) for path in sorted(given.hessians.glob("*.npz"))]
        logarithms = fitted([example for example in examples if example is not None])
        given.factors.write_text(json.dumps(logarithms, indent=1) + "\n")
    found = json.loads(given.factors.read_text())
    for each in filter(None, given.sets.split(",")):
        name, number = each.split(":")
        before, after = (np.array(tried(name, int(number), given.seed, by)) for by in ({}, found))
        print(f"{name}: {before.mean(axis=0)} calls by rule, {after.mean(axis=0)} with factors", flush=True)


if __name__ == "__main__":
    main()
