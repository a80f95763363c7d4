"""What is known of the stiffness where the next steps begin, made for many structures at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from relaxion.optimizer.hessian.internal.constants import ValenceSettings
from relaxion.optimizer.hessian.internal.model import ValenceModel, valence_at
from relaxion.optimizer.hessian.internal.topology import Topology
from relaxion.optimizer.hessian.learned import Asked, Metric, MetricSource, Past, asked_of
from relaxion.optimizer.hessian.springs import Bonds, SpringMetric, SpringSettings, bonds_of, radii_scale, springs_at
from relaxion.optimizer.point import Geometry, Point, structures_of
from relaxion.structures import Structures
from relaxion.structures.state import Pairs

LARGEST_TOGETHER = 64  # atoms; larger structures keep a core busy by themselves
MOST_TOGETHER = 64  # structures of about the same size: matrices are padded to the largest


@dataclass(frozen=True, eq=False)
class LocalModel:
    """Bonds and stiffness at one base: of springs, and as a policy sees it."""

    bonds: Bonds | None = None  # None: not a plain structure, as the next
    springs: SpringMetric | None = None
    metric: Metric | None = None  # None: no policy, or it has no answer here
    no_metric: str = ""  # why it has none
    valence: ValenceModel | None = None  # None: nothing is a molecule, or nobody asked


@dataclass(frozen=True, eq=False)
class Base:
    """Where a step begins, and who will ask what there."""

    point: Point
    springs: SpringSettings
    source: MetricSource | None = None
    past: Past = field(default_factory=Past)
    place: int | None = None  # among the structures just evaluated, where it is one of them
    valence: ValenceSettings | None = None  # None: molecules are not looked for
    topology: Topology | None = None  # of the molecules, as known so far
    steps: int = 0  # that led there, as far as they are remembered


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


def models_at(bases: Sequence[Base], known: KnownPairs | None = None) -> list[LocalModel]:
    """The model at each base. They are quickest sorted by size."""
    result = [LocalModel()] * len(bases)
    drawn = [
        number for number, base in enumerate(bases) if base.point.geometry is not None and base.point.geometry.drawn
    ]
    for group in _groups(drawn, bases):
        for number, model in zip(group, _models([bases[number] for number in group], known), strict=True):
            result[number] = model
    return result


def _groups(numbers: Sequence[int], bases: Sequence[Base]) -> list[list[int]]:
    """Small structures by `MOST_TOGETHER` with the same springs, large ones by themselves."""
    groups: list[list[int]] = []
    for number in numbers:
        base, last = bases[number], bases[groups[-1][0]] if groups else None
        small = _geometry(base).n_atoms <= LARGEST_TOGETHER
        joins = last is not None and small and last.springs == base.springs and len(groups[-1]) < MOST_TOGETHER
        if last is not None and joins and _geometry(last).n_atoms <= LARGEST_TOGETHER:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


def _models(bases: Sequence[Base], known: KnownPairs | None) -> list[LocalModel]:
    geometries = [_geometry(base) for base in bases]
    structures = _structures(bases, known)
    bonds = bonds_of(geometries, structures)
    drawn, screening = _fitted(bases, bonds)
    springs = springs_at(geometries, bases[0].springs, drawn)
    metrics: list[Metric | str] = [""] * len(bases)
    by_source: dict[int, list[int]] = {}
    for number, base in enumerate(bases):
        if base.source is None or not base.point.finite:
            continue
        if base.source.covers(geometries[number]):
            by_source.setdefault(id(base.source), []).append(number)
        else:
            metrics[number] = "the policy was not trained on all of these elements"
    for numbers in by_source.values():
        chosen = [bases[number] for number in numbers]
        source = chosen[0].source
        assert source is not None
        asked = [Asked(bases[n].point, geometries[n], bases[n].past, springs[n]) for n in numbers]
        those = structures if len(numbers) == len(bases) else _structures(chosen, known)
        for number, metric in zip(numbers, asked_of(source, asked, those), strict=True):
            metrics[number] = metric
    return [
        LocalModel(
            bonds=screening[number],
            springs=springs[number],
            metric=None if isinstance(metric, str) else metric,
            no_metric=metric if isinstance(metric, str) else "",
            valence=_valence(bases[number], bonds[number]),
        )
        for number, metric in enumerate(metrics)
    ]


def _fitted(bases: Sequence[Base], bonds: Sequence[Bonds]) -> tuple[list[Bonds], list[Bonds]]:
    """With radii that fit each structure, for springs; and with the smaller radii, for the screen."""
    springs, screen = list(bonds), list(bonds)
    for number, base in enumerate(bases):
        geometry = _geometry(base)
        scale = radii_scale(geometry, bonds[number], base.steps)
        if scale != 1:
            springs[number] = bonds_of([geometry], scale=scale)[0]
        if scale < 1:
            screen[number] = springs[number]
    return springs, screen


def _valence(base: Base, bonds: Bonds) -> ValenceModel | None:
    if base.valence is None or not base.point.finite:
        return None
    return valence_at(_geometry(base), bonds, base.topology, base.springs, base.valence)


def _structures(bases: Sequence[Base], known: KnownPairs | None) -> Structures:
    structures = structures_of([_geometry(base) for base in bases])
    places = [base.place for base in bases if base.place is not None]
    if known is not None and len(places) == len(bases):
        known.keep_for(structures, places)
    return structures


def _geometry(base: Base) -> Geometry:
    assert base.point.geometry is not None  # asked before
    return base.point.geometry
