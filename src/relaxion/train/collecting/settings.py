"""What `relaxion collect` makes: kinds of starts, how many, relaxed by which potential and how far."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from relaxion.errors import SettingsError
from relaxion.settings import Settings, nearest
from relaxion.train.data.dataset import FIRST_MEASURING_SEED, Side

MAKERS = ("prototype", "element", "perovskite", "packing", "surface", "molecule", "metal", "file")


REVISIONS = {"element": " 2"}
"""Raised when a maker makes other structures than it used to: a key then still means one start."""


class KindSettings(Settings):
    """One kind of starts."""

    make: str
    """Who makes the structures: prototype, element, perovskite, packing, surface, molecule, metal or file."""

    engine: str
    """The potential that relaxes them: chgnet, gfn2, emt, ..."""

    number: int = Field(default=0, ge=0)
    """How many starts. More may be asked of an existing database; what is there stays."""

    share: float = Field(default=1.0, ge=0)
    """Weight of this kind among the others where examples are made of it (`relaxion train universal`)."""

    smallest_n_atoms: int = Field(default=2, ge=1)
    """Atoms of the smallest structure."""

    largest_n_atoms: int = Field(default=16, ge=2)
    """Atoms of the largest one."""

    smallest_rattle_angstrom: float = Field(default=0.03, ge=0)
    """Narrowest Gaussian by which each coordinate is displaced."""

    largest_rattle_angstrom: float = Field(default=0.25, ge=0)
    """Widest one."""

    free_cell_share: float = Field(default=0.0, ge=0, le=1)
    """Of the structures periodic along three axes, those that are strained and relax with their cell."""

    largest_strain: float = Field(default=0.04, ge=0, lt=0.3)
    """Of the strained ones, largest element of the symmetric strain."""

    tolerance_ev_per_angstrom: float = Field(default=2e-3, gt=0)
    """A relaxation is finished here. Well below what users ask for: its end is the label of all states before it."""

    max_force_calls: int = Field(default=40, ge=2)
    """Then it is stored as it is."""

    largest_force_ev_per_angstrom: float = Field(default=50.0, gt=0)
    """Starts with a larger force are skipped: no potential knows what happens there."""

    sizing_force_calls: int = Field(default=0, ge=0)
    """Force calls spent on the perfect crystal before it is displaced (or cut, or packed), its volume following the
    pressure: radii alone guess volumes to 15 %. Molecules have none, files are at their volume already."""

    element: str | None = None
    """With make = "element": only this one."""

    files: tuple[str, ...] = ()
    """With make = "file": structure files; those that are not there are left out."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.make not in MAKERS:
            raise ValueError(f"unknown maker '{self.make}': {nearest(self.make, MAKERS)}")
        if self.smallest_n_atoms > self.largest_n_atoms:
            raise ValueError(
                f"smallest_n_atoms {self.smallest_n_atoms} is above largest_n_atoms {self.largest_n_atoms}"
            )
        if self.smallest_rattle_angstrom > self.largest_rattle_angstrom:
            raise ValueError("smallest_rattle_angstrom is above largest_rattle_angstrom")
        if (self.make == "file") != bool(self.files):
            raise ValueError("files go with make = 'file', and only with it")
        return self

    @property
    def sizes(self) -> tuple[int, int]:
        return self.smallest_n_atoms, self.largest_n_atoms

    @property
    def origin(self) -> str:
        """What decides about a start and its relaxation, as text: everything but how many there are, and for whom."""
        return json.dumps(self.model_dump(exclude={"number", "share"}), sort_keys=True) + REVISIONS.get(self.make, "")


class CollectSettings(Settings):
    """The whole of it."""

    seed: int = Field(default=6, ge=0, lt=FIRST_MEASURING_SEED)
    """Start, kind and number decide about a start; seeds from 9000 on are for benchmarks."""

    side: Side = "training"
    """Which side of what is held out (docs/policies.md)."""

    batch_n_structures: int = Field(default=24, ge=1)
    """Relaxations that a worker has under way at once; a finished one makes room for the next."""

    batch_n_atoms: int = Field(default=256, ge=1)
    """And the atoms of them all, unless a single one has more: memory and caches."""

    kinds: dict[str, KindSettings] = Field(min_length=1)
    """By name; the name is stored with each trajectory."""

    @classmethod
    def of(cls, table: Mapping[str, Any], given: Mapping[str, Any]) -> CollectSettings:
        """A recipe with overrides; `kind.number=10` reaches into one kind, `number=10` into all of them."""
        table, given = dict(table), dict(given)
        kinds = table.get("kinds")
        if not isinstance(kinds, dict) or not all(isinstance(kind, dict) for kind in kinds.values()):
            raise SettingsError("a recipe to collect has a section for each kind of starts, like [kinds.prototype]")
        kinds = {name: dict(kind) for name, kind in kinds.items()}
        for word in [word for word in given if word not in cls.model_fields]:
            _assign(kinds, word, given.pop(word))
        read = {name: KindSettings.read(kind) for name, kind in kinds.items()}
        return cls.read({**table, **given, "kinds": read})

    def key(self, kind: str, number: int) -> str:
        """Of one start: the same recipe, kind and number give the same one, on any machine."""
        text = f"{self.seed} {self.side} {kind} {number} {self.kinds[kind].origin}"
        return hashlib.sha256(text.encode()).hexdigest()[:24]


def _assign(kinds: dict[str, dict[str, Any]], word: str, value: Any) -> None:
    name, dot, field = word.partition(".")
    if dot:
        if name not in kinds:
            raise SettingsError(f"no kind '{name}' in this recipe: {nearest(name, kinds)}")
        kinds[name][field] = value
        return
    if word not in KindSettings.model_fields:
        known = [*CollectSettings.model_fields, *KindSettings.model_fields]
        raise SettingsError(f"unknown setting '{word}': {nearest(word, known)}")
    for kind in kinds.values():
        kind[word] = value
