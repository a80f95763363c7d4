"""How much should the secants of the last steps correct a learned stiffness? For choices, never for results.

    python benchmarks/relaxation/secants.py universal        # CHGNet, four minutes
    python benchmarks/relaxation/secants.py metals           # EMT and EAM, one minute

The policy relaxes fresh starts of the kinds it is taught to a small force (seed 8280). At every base on the way its
stiffness B and the secants so far are known, and afterwards the way to the end. Printed is the mean relative error of
the step in the energy of B, √(e·Be / t·Bt), at the first, second, third and later bases, for the stiffness alone, for a
mean of its step and that of L-BFGS on top of it, and for secants that are themselves means of what was met and what B
says (`secants.believed`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import numpy as np
import own_kinds
import torch
from ase import Atoms

from relaxion.batch import BatchRelaxer, BatchSettings
from relaxion.model.stiffness_network import StiffnessNetwork
from relaxion.optimizer.batch_relaxation import Relaxed
from relaxion.optimizer.choice import new_stepper
from relaxion.optimizer.hessian.base import Base, Hessian, Secant, believed, corrected, damped
from relaxion.optimizer.hessian.learned import LearnedHessians
from relaxion.optimizer.point import Array, Point, dot, structures_of
from relaxion.optimizer.safeguard import StepRule
from relaxion.potentials import potential
from relaxion.potentials.base import Potential
from relaxion.train.supervised.sources import MetalsSettings
from relaxion.train.tasks.settings import find, settings_from_recipe
from relaxion.train.tasks.stiffness import StiffnessRunSettings

SEED, KEPT = 8280, 8
SMALLEST_FORCE, FARTHEST, LARGEST_ERROR = 0.03, 1.0, 3.0  # eV/Å, Å: as in examples
PLACES = {"first": (0, 0), "second": (1, 1), "third": (2, 2), "to the 6th": (3, 5), "15th": (6, 14), "later": (15, 999)}

Correction = Callable[[Array, list[Secant], Hessian], Array]


def alone(forces: Array, _: list[Secant], stiffness: Hessian) -> Array:
    return stiffness.solve(forces)


def mean_of_steps(weight: float, number: int) -> Correction:
    """The rule of before: so much of the way from the step of the stiffness model to that of L-BFGS on top of it."""

    def step(forces: Array, secants: list[Secant], stiffness: Hessian) -> Array:
        plain, newest = stiffness.solve(forces), damped(secants[-number:], stiffness.apply)
        return plain + weight * (corrected(forces, newest, stiffness.solve) - plain)

    return step


def mean_of_secants(weight: float, length: float) -> Correction:
    """The rule of now."""
    return lambda forces, secants, stiffness: corrected(
        forces, believed(secants[-KEPT:], stiffness.apply, weight, length), stiffness.solve
    )


CORRECTIONS: dict[str, Correction] = {
    "stiffness alone": alone,
    "0.6 of the newest secant's step": mean_of_steps(0.6, 1),
    "0.5 of the step of two": mean_of_steps(0.5, 2),
    "the step of five": mean_of_steps(1.0, 5),
    "secants to 0.9": mean_of_secants(0.9, 1e9),
    **{f"secants to 0.9 within {length} Å": mean_of_secants(0.9, length) for length in (0.5, 0.3, 0.2, 0.1, 0.05)},
}


def groups(policy: str, number: int) -> Iterator[tuple[Potential, list[tuple[Atoms, bool]]]]:
    """Starts of every kind, by potential."""
    if policy != "metals":
        engine = potential(own_kinds.ENGINE)
        yield engine, own_kinds.starts(own_kinds.ENGINE, engine, number, SEED)
        return
    settings = settings_from_recipe(find("metals"), None, {})
    assert isinstance(settings, StiffnessRunSettings)
    assert isinstance(settings.fit, MetalsSettings)
    for place, source in enumerate(settings.fit.sources()):
        made = source.starts.sample(torch.Generator().manual_seed(SEED + place), 4 * number)
        yield source.potential, list(zip(made.to_ase(), made.cell_free.tolist(), strict=True))


def relaxed(
    network: StiffnessNetwork, rule: StepRule | None, engine: Potential, begun: list[tuple[Atoms, bool]]
) -> Iterator[Relaxed]:
    settings = BatchSettings(fmax=own_kinds.END, max_force_calls=own_kinds.MOST_CALLS, record=True)
    batch = BatchRelaxer(
        engine, settings, lambda _: ("", new_stepper(policy_model=LearnedHessians(network), rule=rule))
    )
    for atoms, cell in begun:
        batch.add(atoms, cell=cell)
    while batch.n_running or batch.has_finished:
        yield from (one for one in batch.advance() if one.converged)


def errors(one: Relaxed, network: StiffnessNetwork) -> Iterator[tuple[int, list[float]]]:
    """At each base of a relaxation: which one it is, and the error of every correction."""
    visits = [visit for visit in one.visited if visit.point.finite]
    bases = [visit.point for visit in visits if visit.accepted]
    if len(bases) < 2:
        return
    end, metrics, secants, place = bases.pop(), hessians_at_bases(bases, network), list[Secant](), 0
    base: Point | None = None
    for visit in visits:
        if base is not None:
            secant = Secant(visit.point.coordinates - base.coordinates, base.forces - visit.point.forces)
            secants += [secant] if secant.curvature > 1e-5 * dot(secant.step, secant.step) else []
        if not visit.accepted or place == len(bases):
            continue
        base, way = visit.point, end.coordinates - visit.point.coordinates
        assert base.geometry is not None
        n_atoms, stiffness = base.geometry.n_atoms, metrics[place]
        if base.geometry.free[:n_atoms].all():
            way[:n_atoms] -= way[:n_atoms].mean(axis=0)
        if base.largest_force > SMALLEST_FORCE and np.abs(way[:n_atoms]).max() < FARTHEST:
            size = dot(way, stiffness.apply(way))
            missed = [correct(base.forces, secants, stiffness) - way for correct in CORRECTIONS.values()]
            yield place, [min(np.sqrt(abs(dot(e, stiffness.apply(e)) / size)), LARGEST_ERROR) for e in missed]
        place += 1


def hessians_at_bases(bases: list[Point], network: StiffnessNetwork) -> list[Hessian]:
    geometries = [base.geometry for base in bases if base.geometry is not None]
    return LearnedHessians(network).at([Base(base) for base in bases], structures_of(geometries))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("policy", help="name or file; metals has starts of its own, all others those of universal")
    parser.add_argument("--number", type=int, default=12, help="starts of each kind; of metals four times as many")
    given = parser.parse_args()
    torch.set_num_threads(1)
    network, rule = own_kinds.network_of_policy(given.policy)
    found: list[tuple[int, list[float]]] = []
    for engine, begun in groups(given.policy, given.number):
        for one in relaxed(network, rule, engine, begun):
            found += errors(one, network)
    places, table = np.array([place for place, _ in found]), np.array([row for _, row in found])
    chosen = [(places >= first) & (places <= last) for first, last in PLACES.values()]
    counts = (f"{name} ({int(which.sum())})" for name, which in zip(PLACES, chosen, strict=True))
    print(f"| {given.policy} | {' | '.join(counts)} |\n{'|---' * (1 + len(PLACES))}|")
    for name, column in zip(CORRECTIONS, table.T, strict=True):
        print(f"| {name} | {' | '.join(f'{column[which].mean():.3f}' for which in chosen)} |")


if __name__ == "__main__":
    main()
