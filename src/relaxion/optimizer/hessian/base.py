"""The protocol at the heart of the optimizer: a model of the Hessian at one point.

Springs, a multiple of 1, internal coordinates, a learned stiffness and the move of a direct policy look alike from
outside. Secants correct any of them (`secants.py`), one trust region limits the steps of all of them
(`trust_region.py`), and the safeguard chooses which one makes the next step (`safeguard.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from relaxion.errors import StructureError
from relaxion.model.stiffness import SPRINGS
from relaxion.optimizer.hessian.internal import InternalHessian, JoinedHessian, internal_at
from relaxion.optimizer.hessian.internal_topology import Topology
from relaxion.optimizer.hessian.springs import Bonds, SpringHessian, bonds_of, radii_scale, springs_at
from relaxion.optimizer.point import Array, Geometry, Point, dot, longest, structures_of
from relaxion.structures import Structures
from relaxion.structures.state import Pairs

if TYPE_CHECKING:
    from relaxion.optimizer.hessian.internal import InternalSecants
    from relaxion.optimizer.hessian.internal_topology import Topology

Solve = Callable[[Array], Array]
ShiftedSolve = Callable[[Array, float], Array]
Measure = Callable[[Array], float]

SOFTEST_SHARE = 0.2  # Powell's damping: a secant softer than this share of the stiffness is stiffened
AGEING = 0.8  # weight of a secant relative to the next newer one


@dataclass(frozen=True)
class Secant:
    """What one step taught: the step, and by how much the forces dropped along it."""

    step: Array
    drop: Array  # forces before - forces after, eV/Å

    @property
    def curvature(self) -> float:
        return dot(self.step, self.drop)


class Secants:
    """What the steps of one relaxation met: Cartesian secants, and those in internal coordinates of molecules."""

    def __init__(self, most: int) -> None:
        """`most`: Cartesian secants that are kept."""
        self.most = most
        self.recent: list[Secant] = []
        self.internal: InternalSecants | None = None  # while internal coordinates make steps

    @property
    def topology(self) -> Topology | None:
        """The molecules in which the internal secants are seen."""
        return None if self.internal is None else self.internal.topology

    def learn(self, before: Point, after: Point) -> None:
        """Keep a secant of positive curvature; others would make the Hessian indefinite."""
        secant = Secant(after.coordinates - before.coordinates, before.forces - after.forces)
        if secant.curvature > 1e-5 * dot(secant.step, secant.step):
            self.recent = [*self.recent, secant][-self.most :]
        if self.internal is not None and self.internal.topology is not None and after.geometry is not None:
            self.internal.learn(before, after)

    def arrays(self) -> list[Array]:
        """Everything that has a row for each coordinate."""
        points = [] if self.internal is None else self.internal.points()
        own = [array for secant in self.recent for array in (secant.step, secant.drop)]
        return own + [array for point in points for array in (point.coordinates, point.forces)]


def corrected(forces: Array, secants: Sequence[Secant], solve: Solve) -> Array:
    """The two-loop recursion of L-BFGS (Nocedal 1980) with `solve` as the initial inverse stiffness."""
    right = forces
    weights = []
    for secant in reversed(secants):
        weight = dot(secant.step, right) / secant.curvature
        right = right - weight * secant.drop
        weights.append(weight)
    step = solve(right)
    for secant, weight in zip(secants, reversed(weights), strict=True):
        step = step + (weight - dot(secant.drop, step) / secant.curvature) * secant.step
    return step


def quasi_newton(forces: Array, secants: Sequence[Secant], solve: ShiftedSolve, shift: float = 0.0) -> Array:
    """The step of a Hessian that secants correct, everything stiffer by a shift (eV/Å²), the secants included."""
    if shift > 0:
        secants = [Secant(secant.step, secant.drop + shift * secant.step) for secant in secants]
    return corrected(forces, secants, lambda right: solve(right, shift))


def downhill(step: Array, forces: Array) -> bool:
    """Whether a step goes along the forces, and is one at all."""
    return bool(dot(step, forces) > 1e-3 * np.linalg.norm(step) * np.linalg.norm(forces))  # False if not a number


def damped(secants: Sequence[Secant], apply: Solve) -> list[Secant]:
    """None softer than a share of the stiffness they correct (Powell 1978): the correction stays positive."""
    stiffened = (_damped(secant, apply(secant.step)) for secant in secants)
    return [secant for secant in stiffened if secant is not None]


def _damped(secant: Secant, applied: Array) -> Secant | None:
    """`applied`: B·s; None where the stiffness B has none along the step."""
    own = dot(secant.step, applied)
    if own <= 0:
        return None
    if secant.curvature >= SOFTEST_SHARE * own:
        return secant
    weight = (1 - SOFTEST_SHARE) * own / (own - secant.curvature)
    return Secant(secant.step, weight * secant.drop + (1 - weight) * applied)


def believed(
    secants: Sequence[Secant], apply: Solve, weight: float, length: float, reach: Measure = longest
) -> list[Secant]:
    """Each as a mean of what was met and what the stiffness B says, y ← w·y + (1 - w)·B·s, and damped.

    B is predicted for the way ahead, a secant was measured on the way behind: the longer its step, and the older it is,
    the less it says of the stiffness here. w = `weight` · 0.8^age / (1 + (length of s / `length`)²), the newest having
    age 0; `reach` measures lengths, `Point.reach` as atoms feel them.
    """
    result = list[Secant]()
    for age, secant in enumerate(reversed(secants) if weight > 0 else ()):
        own = weight * AGEING**age / (1 + (reach(secant.step) / length) ** 2)
        applied = apply(secant.step)
        mean = _damped(Secant(secant.step, own * secant.drop + (1 - own) * applied), applied)
        result += [] if mean is None else [mean]
    return result[::-1]


def weighted_error(secants: list[Secant], answers: list[Array]) -> float:
    """How far answers miss the steps, newest counting most: mean of |s - γ·H·y| / |s|; 0 without secants.

    γ makes the curvature right, since springs know shapes only.
    """
    total = 0.0
    weights = 0.0
    weight = 1.0
    for secant, answer in zip(reversed(secants), reversed(answers), strict=True):
        scale = secant.curvature / dot(secant.drop, answer)
        total += weight * float(np.linalg.norm(secant.step - scale * answer) / np.linalg.norm(secant.step))
        weights += weight
        weight *= 0.6
    return total / weights if secants else 0.0


def missed(secants: list[Secant], apply: Solve) -> float:
    """By how much a stiffness misses the drops of the forces: mean of |y - B·s| / |y|; 0 without secants."""
    misses = [np.linalg.norm(secant.drop - apply(secant.step)) / np.linalg.norm(secant.drop) for secant in secants]
    return float(np.mean(misses)) if misses else 0.0


class Hessian(Protocol):
    """A symmetric positive definite matrix B at one geometry, in the coordinates of the points (`Point`)."""

    @property
    def has_curvature(self) -> bool:
        """Whether measured curvatures can be compared with it; a direct policy's move has none."""
        ...

    def apply(self, step: Array) -> Array:
        """B·u: the drop of the forces along a step.

        Args:
            step: (n_rows, 3) Å.
        """
        ...

    def solve(self, forces: Array, shift: float = 0.0) -> Array:
        """(B + shift·1)⁻¹·f: the step to where a quadratic model has no forces. NaN where it cannot be solved.

        Args:
            forces: (n_rows, 3) eV/Å.
            shift: additional stiffness of every coordinate, eV/Å².
        """
        ...


@dataclass(frozen=True, eq=False)
class Identity:
    """The same stiffness for every coordinate."""

    stiffness: float = 1.0  # eV/Å²
    has_curvature = True

    def apply(self, step: Array) -> Array:
        return self.stiffness * step

    def solve(self, forces: Array, shift: float = 0.0) -> Array:
        return forces / (self.stiffness + shift)


@dataclass(frozen=True, eq=False)
class Scaled:
    """Another Hessian divided by a factor, as measured curvature suggests."""

    hessian: Hessian
    softness: float
    has_curvature = True

    def apply(self, step: Array) -> Array:
        return self.hessian.apply(step) / self.softness

    def solve(self, forces: Array, shift: float = 0.0) -> Array:
        return self.softness * self.hessian.solve(forces, shift * self.softness)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A Hessian that may make the next step, and how."""

    method: str  # "policy", "internal", "springs" or "plain"
    hessian: Hessian
    secants: Sequence[Secant]  # that correct it
    radius: float  # Å, of the trust region for this step
    scale: float = 1.0  # of the step
    shift: float = 0.0  # eV/Å², of every coordinate
    curve: Callable[[Array], Array] | None = None  # carries a step out along internal coordinates
    reason: str = ""
    control: Mapping[str, float] = field(default_factory=dict)  # the step rule, for the history


LARGEST_TOGETHER = 64  # atoms; larger structures keep a core busy by themselves
MOST_TOGETHER = 64  # structures of about the same size: matrices are padded to the largest


@dataclass(frozen=True)
class Past:
    """How the relaxer came to a base: policies may see a short history."""

    calls: int = 1
    """Force calls since the start, or since FIRE took over."""
    coordinates: Array | None = None
    """Of the base before; None at the start."""
    forces: Array | None = None


@dataclass(frozen=True, eq=False)
class Base:
    """Where a step begins, and what is known there before any model is made."""

    point: Point
    past: Past = field(default_factory=Past)
    steps: int = 0  # that led there, as far as they are remembered
    topology: Topology | None = None  # of the molecules, as known so far
    place: int | None = None  # among the structures just evaluated, where it is one of them
    springs: SpringHessian | None = None  # drawn there

    @property
    def has_springs(self) -> bool:
        """Whether it is a plain structure, between whose atoms springs can be drawn."""
        return self.point.geometry is not None and self.point.geometry.drawn

    @property
    def geometry(self) -> Geometry:
        assert self.point.geometry is not None  # `has_springs`
        return self.point.geometry


POLICY = "policy"  # the method of a learned policy's steps


class PolicyModel(Protocol):
    """A policy, or a cheaper potential, as a model of the Hessian; many relaxations may share a policy."""

    @property
    def method(self) -> str:
        """Of its steps, as the history has it: "policy" or "model"."""
        ...

    def covers(self, geometry: Geometry) -> bool:
        """Whether it was trained on all these elements."""
        ...

    def at(self, bases: Sequence[Base], structures: Structures) -> Sequence[Hessian | str]:
        """At each base, or why it has no answer there; `structures` are those of the bases, in order."""
        ...


@dataclass(frozen=True, eq=False)
class Models:
    """The models that one relaxation uses, or many of the same kind."""

    policy: PolicyModel | None = None
    internal: bool = False  # molecules are looked for


@dataclass(frozen=True, eq=False)
class Hessians:
    """Bonds and Hessians at one base. None: that model does not apply there."""

    bonds: Bonds | None = None
    springs: SpringHessian | None = None
    internal: InternalHessian | None = None  # None: nothing is a molecule, or nobody asked
    learned: Hessian | None = None  # joined with internal coordinates where both apply
    not_learned: str = ""  # why a policy has none


@dataclass(frozen=True, eq=False)
class KnownPairs:
    """The pairs of structures just evaluated: springs and networks reach less far than most potentials."""

    structures: Structures
    cutoff: float  # Å
    pairs: Pairs

    @classmethod
    def of(cls, structures: Structures, cutoff: float) -> KnownPairs:
        """Searched now, and kept for whoever asks about the same structures."""
        pairs = Pairs.of(structures, cutoff)
        pairs.keep(structures, cutoff)
        return cls(structures, cutoff, pairs)

    def keep_for(self, structures: Structures, places: Sequence[int]) -> None:
        """`structures` are those at these places, of the ones evaluated."""
        whole = len(places) == len(self.structures)
        pairs = self.pairs if whole else self.pairs.of_structures(self.structures, torch.tensor(places))
        pairs.keep(structures, self.cutoff)


def hessians_at(bases: Sequence[Base], models: Sequence[Models], known: KnownPairs | None = None) -> list[Hessians]:
    """The Hessians at each base, by the models of its relaxation. Sorted by size they are quickest."""
    result = [Hessians()] * len(bases)
    plain_structures = [number for number, base in enumerate(bases) if base.has_springs]
    for group in _groups(plain_structures, bases):
        some = [bases[number] for number in group]
        for number, found in zip(group, _of_group(some, [models[n] for n in group], known), strict=True):
            result[number] = found
    return result


def _groups(numbers: Sequence[int], bases: Sequence[Base]) -> list[list[int]]:
    """Small structures by `MOST_TOGETHER`, large ones by themselves."""
    groups: list[list[int]] = []
    for number in numbers:
        last = groups[-1] if groups else []
        sizes = [bases[own].geometry.n_atoms for own in (*last[:1], number)]
        if last and max(sizes) <= LARGEST_TOGETHER and len(last) < MOST_TOGETHER:
            last.append(number)
        else:
            groups.append([number])
    return groups


def _of_group(bases: Sequence[Base], models: Sequence[Models], known: KnownPairs | None) -> list[Hessians]:
    structures = _structures(bases, known)
    bonds = bonds_of([base.geometry for base in bases], structures)
    fitted, screening = _fitted(bases, bonds)
    springs = springs_at([base.geometry for base in bases], SPRINGS, fitted)
    bases = [replace(base, springs=own) for base, own in zip(bases, springs, strict=True)]
    learned = _learned(bases, models, structures, known)
    result = list[Hessians]()
    for number, (base, own, answer) in enumerate(zip(bases, models, learned, strict=True)):
        internal = None
        if own.internal and base.point.finite:
            internal = internal_at(base.geometry, bonds[number], base.topology, SPRINGS)
        if isinstance(answer, str):
            result.append(Hessians(screening[number], base.springs, internal, None, answer))
            continue
        joined = answer if internal is None or not answer.has_curvature else JoinedHessian(answer, internal)
        result.append(Hessians(screening[number], base.springs, internal, joined))
    return result


def _learned(
    bases: Sequence[Base], models: Sequence[Models], structures: Structures, known: KnownPairs | None
) -> list[Hessian | str]:
    """Of each base what its policy answers, or why it does not; each policy is asked once."""
    result: list[Hessian | str] = [""] * len(bases)
    asked: dict[int, list[int]] = {}
    for number, (base, own) in enumerate(zip(bases, models, strict=True)):
        if own.policy is None or not base.point.finite:
            continue
        if own.policy.covers(base.geometry):
            asked.setdefault(id(own.policy), []).append(number)
        else:
            result[number] = "the policy was not trained on all of these elements"
    for numbers in asked.values():
        policy = models[numbers[0]].policy
        assert policy is not None
        some = [bases[number] for number in numbers]
        own = structures if len(numbers) == len(bases) else _structures(some, known)
        for number, answer in zip(numbers, asked_of(policy, some, own), strict=True):
            result[number] = answer
    return result


def asked_of(source: PolicyModel, bases: Sequence[Base], structures: Structures) -> list[Hessian | str]:
    """What the policy says at each point; a sentence where it has no answer: the classical optimizer steps there.

    A matrix that cannot be factorised, atoms too far apart for a neighbour search and too little memory on a device are
    reasons to go on without the policy. Every other error is a fault, and is raised.
    """
    try:
        return list(source.at(bases, structures))
    except (StructureError, torch.linalg.LinAlgError, torch.OutOfMemoryError) as error:  # pyright: ignore[reportPrivateImportUsage]
        if len(bases) == 1:
            return [f"the policy failed here ({type(error).__name__}: {str(error).splitlines()[0][:200]})"]
    return [asked_of(source, [one], structures_of([one.geometry]))[0] for one in bases]


def _fitted(bases: Sequence[Base], bonds: Sequence[Bonds]) -> tuple[list[Bonds], list[Bonds]]:
    """With radii that fit each structure, for springs; and with the smaller radii, for the minimum distance."""
    springs = list(bonds)
    screen = list(bonds)
    for number, base in enumerate(bases):
        scale = radii_scale(base.geometry, bonds[number], base.steps)
        if scale != 1:
            springs[number] = bonds_of([base.geometry], scale=scale)[0]
        if scale < 1:
            screen[number] = springs[number]
    return springs, screen


def _structures(bases: Sequence[Base], known: KnownPairs | None) -> Structures:
    structures = structures_of([base.geometry for base in bases])
    places = [base.place for base in bases if base.place is not None]
    if known is not None and len(places) == len(bases):
        known.keep_for(structures, places)
    return structures
