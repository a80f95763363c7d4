"""The Hessians where the next steps begin, made for many structures at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from relaxion.errors import StructureError
from relaxion.optimizer.hessian.base import Hessian
from relaxion.optimizer.hessian.internal.constants import ValenceSettings
from relaxion.optimizer.hessian.internal.model import ValenceModel, valence_at
from relaxion.optimizer.hessian.internal.topology import Topology
from relaxion.optimizer.hessian.springs import Bonds, SpringMetric, SpringSettings, bonds_of, radii_scale, springs_at
from relaxion.optimizer.point import Array, Geometry, Point, structures_of
from relaxion.structures import Structures
from relaxion.structures.graph import Pairs

LARGEST_TOGETHER = 64  # atoms; larger structures keep a core busy by themselves
MOST_TOGETHER = 64  # structures of about the same size: matrices are padded to the largest


@dataclass(frozen=True)
class Past:
    """How the relaxer came to a base: policies may see a short history."""

    calls: int = 1
    """Force calls since the start, or since FIRE helped out."""
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
    springs: SpringMetric | None = None  # drawn there

    @property
    def has_springs(self) -> bool:
        """Whether it is a plain structure, between whose atoms springs can be drawn."""
        return self.point.geometry is not None and self.point.geometry.drawn

    @property
    def geometry(self) -> Geometry:
        assert self.point.geometry is not None  # `has_springs`
        return self.point.geometry


class PolicyModel(Protocol):
    """A policy as a model of the Hessian; many relaxations may share one."""

    def covers(self, geometry: Geometry) -> bool:
        """Whether it was trained on all these elements."""
        ...

    def at(self, bases: Sequence[Base], structures: Structures) -> Sequence[Hessian]:
        """At each base; `structures` are those of the bases, in order."""
        ...


@dataclass(frozen=True, eq=False)
class Models:
    """The models that one relaxation uses, or many of the same kind."""

    springs: SpringSettings
    internal: ValenceSettings | None = None  # None: molecules are not looked for
    policy: PolicyModel | None = None


@dataclass(frozen=True, eq=False)
class Hessians:
    """Bonds and Hessians at one base. None: that model does not apply there."""

    bonds: Bonds | None = None
    springs: SpringMetric | None = None
    internal: ValenceModel | None = None  # None: nothing is a molecule, or nobody asked
    learned: Hessian | None = None
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
    for group in _groups(plain_structures, bases, models):
        some = [bases[number] for number in group]
        for number, found in zip(group, _of_group(some, [models[n] for n in group], known), strict=True):
            result[number] = found
    return result


def _groups(numbers: Sequence[int], bases: Sequence[Base], models: Sequence[Models]) -> list[list[int]]:
    """Small structures by `MOST_TOGETHER` with the same springs, large ones by themselves."""
    groups: list[list[int]] = []
    for number in numbers:
        small = bases[number].geometry.n_atoms <= LARGEST_TOGETHER
        last = groups[-1][0] if groups else None
        joins = (
            last is not None
            and small
            and bases[last].geometry.n_atoms <= LARGEST_TOGETHER
            and models[last].springs == models[number].springs
            and len(groups[-1]) < MOST_TOGETHER
        )
        if joins:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


def _of_group(bases: Sequence[Base], models: Sequence[Models], known: KnownPairs | None) -> list[Hessians]:
    structures = _structures(bases, known)
    bonds = bonds_of([base.geometry for base in bases], structures)
    fitted, screening = _fitted(bases, bonds)
    springs = springs_at([base.geometry for base in bases], models[0].springs, fitted)
    bases = [replace(base, springs=own) for base, own in zip(bases, springs, strict=True)]
    learned = _learned(bases, models, structures, known)
    result = list[Hessians]()
    for number, (base, own, answer) in enumerate(zip(bases, models, learned, strict=True)):
        internal = None
        if own.internal is not None and base.point.finite:
            internal = valence_at(base.geometry, bonds[number], base.topology, own.springs, own.internal)
        if isinstance(answer, str):
            result.append(Hessians(screening[number], base.springs, internal, None, answer))
        else:
            result.append(Hessians(screening[number], base.springs, internal, answer))
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
            return [f"the policy has no answer here ({type(error).__name__}: {str(error).splitlines()[0][:200]})"]
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
