"""What the task `stiffness` learns from: metals, kinds of starts from a recipe, or own files."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from ase import Atoms
from ase.symbols import Symbols
from pydantic import Field, model_validator
from torch import Generator

from relaxion.errors import MissingStressError, RelaxionWarning, RunError
from relaxion.model.stiffness_network import StiffnessNetwork
from relaxion.optimizer.safeguard import StepRule
from relaxion.potentials import potential
from relaxion.potentials.base import Potential
from relaxion.potentials.registry import make_potential
from relaxion.settings import nearest
from relaxion.structures import Structures
from relaxion.train.data.alloys import EAM_METALS, EMT_METALS
from relaxion.train.data.dataset import ELEMENTS as HELD_APART
from relaxion.train.data.kinds import CollectSettings, KindSettings, file_structures, make_start
from relaxion.train.data.perturbations import Sizing, bring_to_volume, perturbation
from relaxion.train.data.slabs import ADSORBATES
from relaxion.train.data.starts import KINDS, MetalStarts, PerturbedStarts, structure_source
from relaxion.train.judge.assessment import AssessedStarts, Assessor
from relaxion.train.recipes import find, read_toml
from relaxion.train.supervised.dataset import ExampleDataset, LiveExamples, LiveSettings, LiveSource
from relaxion.train.supervised.fit import is_validation

VALIDATION_SEED = 8500  # of validation starts: neither trained on nor those of any benchmark
SMALLEST_N_ATOMS = 2  # of metals; the next four too
LARGEST_DEFECT_N_ATOMS = 40  # of a crystal with a defect or a boundary
LARGEST_PARTICLE_N_ATOMS = 60
LARGEST_RATTLE = 0.3  # Å: the widest Gaussian by which atoms are displaced
FREE_CELL_SHARE = 0.4  # of the crystals, those that are strained and relax with their cell
N_STARTS = 2**40  # of a kind to draw from: none comes twice
N_SAMPLED = 200  # starts of each kind that elements and sizes on the card come from
MOST_MADE = 100  # structures, where they are not of a file
FILE_VALIDATION_ONE_IN = 5  # one structure of the user in so many is assessed, and not trained on


class TrainingData:
    """What a run of the task `stiffness` learns from, what it is assessed on, and what its card says about both."""

    structures: ClassVar[str]  # in words, for the result
    fails_on: tuple[str, ...]  # sentences of the card
    engines: str  # in words: the potentials

    def __init__(self, per_kind: int, rule: StepRule | None) -> None:
        """`per_kind`: assessed starts of each kind; `rule`: the step rule of the policy file, where it has its own."""
        self.per_kind = per_kind
        self.rule = rule

    def dataset(self, network: StiffnessNetwork, generator: Generator, /) -> ExampleDataset:
        """Examples for the network."""
        raise NotImplementedError

    def starts(self) -> list[AssessedStarts]:
        """To be assessed, never trained on; the same every time, `per_kind` of each kind."""
        raise NotImplementedError

    @cached_property
    def assessor(self) -> Assessor:
        return Assessor(self.starts)

    def compare(self, folder: Path) -> None:
        """The classical optimizer, BFGS and FIRE on the assessed starts."""
        self.assessor.compare(folder)

    def card(self) -> dict[str, Any]:
        """What is trained on."""
        raise NotImplementedError


def _range(numbers: Iterable[int], sizes: Sequence[int]) -> dict[str, Any]:
    """Elements (from atomic numbers) and sizes of what is trained on, as a card has them."""
    return {
        "elements": tuple(Symbols(sorted(set(numbers)))),
        "smallest_n_atoms": min(sizes),
        "largest_n_atoms": max(sizes),
    }


class MetalsSettings(LiveSettings):
    """Kinds of structures, and how much of each."""

    emt_share: float = Field(default=0.5, ge=0, le=1)
    """Of the structures, those judged by EMT (7 metals); the rest by the analytic EAM (16 metals)."""

    largest_n_atoms: int = Field(default=16, ge=2)
    """Atoms of the largest structure."""

    metal_starts: str = "alloy:0.5+vacancy:0.1+slab:0.35+cluster:0.1+packing:0.1"
    """Kinds of starts and how much of each, joined by `+`: alloy (random, on lattices), vacancy, slab (many with atoms
    on top, many with a fixed layer), cluster and packing (random, far from any minimum), surface (slabs of any
    low-index facet), step, defect (an interstitial, exchanged or foreign atom), boundary (twins and tilt
    boundaries), particle (larger clusters)."""

    largest_slab_n_atoms: int = Field(default=27, ge=4)
    """Atoms of the largest slab, atoms on top not counted; the smallest has at least 4."""

    @model_validator(mode="after")
    def _something_to_learn(self) -> Self:
        if not self.shares:
            raise ValueError("metal_starts names no kind with a share above 0")
        return self

    @property
    def shares(self) -> dict[str, float]:
        """By the names of `train.data.starts.KINDS`, those that occur, in that order."""
        given = {}
        for part in self.metal_starts.split("+"):
            name, _, share = part.strip().partition(":")
            if name not in KINDS:
                raise ValueError(f"metal_starts has no kind '{name}': {nearest(name, KINDS)}")
            given[name] = float(share or 1)
        return {name: given[name] for name in KINDS if given.get(name, 0) > 0}

    @property
    def largest_of_any_kind(self) -> int:
        """Atoms; what sits on slabs not counted."""
        own = dict.fromkeys(("slab", "surface", "step"), self.largest_slab_n_atoms)
        own |= {"defect": LARGEST_DEFECT_N_ATOMS, "boundary": LARGEST_DEFECT_N_ATOMS}
        own["particle"] = LARGEST_PARTICLE_N_ATOMS
        return max(own.get(kind, self.largest_n_atoms) for kind in self.shares)

    def sources(self) -> list[LiveSource]:
        """Each kind of start with EMT and with EAM, each of these with its metals."""
        found = []
        for name, elements, share in (("emt", EMT_METALS, self.emt_share), ("eam", EAM_METALS, 1 - self.emt_share)):
            if share == 0:
                continue
            for kind, weight in self.shares.items():
                starts = metal_starts(
                    elements,
                    kind,
                    sizes=(SMALLEST_N_ATOMS, self.largest_n_atoms),
                    rattle_angstrom=(0.03, LARGEST_RATTLE),
                    free_share=FREE_CELL_SHARE,
                    largest_slab=self.largest_slab_n_atoms,
                )
                found.append(LiveSource(potential(name), starts, share * weight))
        return found


def metal_starts(elements: tuple[str, ...], kind: str, **options: Any) -> MetalStarts:
    """Starts of one kind; only EMT has the elements that sit on slabs."""
    return MetalStarts(
        elements=elements,
        shares={kind: 1.0},
        adsorbates=ADSORBATES if elements == EMT_METALS else (),
        largest_defect=LARGEST_DEFECT_N_ATOMS,
        largest_particle=LARGEST_PARTICLE_N_ATOMS,
        **options,
    )


class MetalsData(TrainingData):
    """Metals with EMT and EAM: how `metals` is made. Every round is of new structures: none need be held out."""

    engines = "emt and eam"
    structures = "metals"

    def __init__(self, settings: MetalsSettings, per_kind: int, rule: StepRule | None) -> None:
        super().__init__(per_kind, rule)
        self.settings = settings
        where = "on slabs and in defects" if "defect" in settings.shares else "on slabs"
        self.fails_on = (
            "The results are on validation starts: never trained on, but the step rule was chosen on such starts.",
            f"Bonding other than metallic was never seen; H, C, N and O only with EMT, {where}.",
        )

    def dataset(self, network: StiffnessNetwork, generator: Generator, /) -> LiveExamples:
        return LiveExamples(network, self.settings.sources(), self.settings, generator)

    def starts(self) -> list[AssessedStarts]:
        """The same starts of each kind trained on every time, on EMT, and as many alloys on the EAM."""
        emt = potential("emt")
        places = list(KINDS)
        found = [
            AssessedStarts(kind, emt, self._sample(EMT_METALS, kind, 0.0, places.index(kind)))
            for kind in self.settings.shares
        ]
        found.append(AssessedStarts("free_cell", emt, self._sample(EMT_METALS, "alloy", 1.0, 10)))
        return [*found, AssessedStarts("eam", potential("eam"), self._sample(EAM_METALS, "alloy", 0.4, 11))]

    def _sample(self, elements: tuple[str, ...], kind: str, free: float, place: int) -> Structures:
        starts = metal_starts(elements, kind, sizes=(4, 20), free_share=free)
        return starts.sample(torch.Generator().manual_seed(VALIDATION_SEED + place), self.per_kind)

    def card(self) -> dict[str, Any]:
        return {
            "elements": tuple(sorted({*EMT_METALS, *EAM_METALS})),
            "adsorbates": ADSORBATES,
            "smallest_n_atoms": SMALLEST_N_ATOMS,
            "largest_n_atoms": self.settings.largest_of_any_kind,
            "potential": "emt (Al Cu Ag Au Ni Pd Pt) and eam (16 metals)",
            "starts": (
                *(f"{kind} {share:g}" for kind, share in self.settings.shares.items()),
                f"displaced by Gaussians of up to {LARGEST_RATTLE:g} Å",
                f"{FREE_CELL_SHARE:.0%} of the crystals strained by up to 4 %, with a free cell",
            ),
            "cells": "both",
        }


class KindSourceSettings(LiveSettings):
    """Which kinds."""

    kinds_of: str = "universal-data"
    """The recipe whose kinds of starts are made; how much of each is its `share`."""


@dataclass(frozen=True)
class KindStarts:
    """Starts of one kind, none like another, brought to the volume that their engine gives them."""

    collection: CollectSettings
    kind: str
    potential: Potential

    def sample(self, generator: Generator, n_structures: int) -> Structures:
        """A start whose volume cannot be found keeps the one that it was made with."""
        numbers = torch.randint(N_STARTS, (n_structures,), generator=generator).tolist()
        starts = [make_start(self.collection, self.kind, number) for number in numbers]
        most = self.collection.kinds[self.kind].sizing_force_calls
        sizings = [None if start.crystal is None else Sizing(start.crystal, most) for start in starts]
        bring_to_volume(self.potential, [sizing for sizing in sizings if sizing is not None])
        scales = [1.0 if sizing is None or sizing.failed else sizing.scale for sizing in sizings]
        return Structures.concatenate([start.structure(scale) for start, scale in zip(starts, scales, strict=True)])


class KindData(TrainingData):
    """Fresh starts of the kinds of a recipe, relaxed with any engine: how `universal` is made.

    Elements and prototypes that are held out never occur. Nothing is stored but the newest examples.
    """

    structures = "universal"
    fails_on = (
        "Potentials other than those named were not trained on; see docs/results/relaxing.md for others.",
        "From single starts it needs more calls than the classical optimizer, often where it ends in a lower minimum.",
    )

    def __init__(self, settings: KindSourceSettings, per_kind: int, rule: StepRule | None) -> None:
        super().__init__(per_kind, rule)
        self.settings = settings
        self.collection = CollectSettings.of(read_toml(find(settings.kinds_of)), {})
        self.wanted = {name: kind for name, kind in self.collection.kinds.items() if kind.share > 0}
        self.kinds = {name: kind for name, kind in self.wanted.items() if self._at_hand(kind)}
        if not self.kinds:
            raise RunError(f"none of the kinds of {settings.kinds_of} has a share and its engine or files at hand")
        self.engines = " and ".join(sorted({kind.engine for kind in self.kinds.values()}))

    def _at_hand(self, kind: KindSettings) -> bool:
        return kind.make != "file" or bool(file_structures(kind, self.collection.side))

    @cached_property
    def potentials(self) -> dict[str, Potential]:
        return {engine: potential(engine) for engine in {kind.engine for kind in self.kinds.values()}}

    def starts_of(self, name: str) -> KindStarts:
        return KindStarts(self.collection, name, self.potentials[self.kinds[name].engine])

    def dataset(self, network: StiffnessNetwork, generator: Generator, /) -> LiveExamples:
        self._warn_of_missing_files()
        found = [(self.starts_of(name), kind.share) for name, kind in self.kinds.items()]
        sources = [LiveSource(starts.potential, starts, share) for starts, share in found]
        return LiveExamples(network, sources, self.settings, generator, self.rule)

    def _warn_of_missing_files(self) -> None:
        missing = {name: kind.share for name, kind in self.wanted.items() if name not in self.kinds}
        if not missing:
            return
        share = sum(missing.values()) / sum(kind.share for kind in self.wanted.values())
        warnings.warn(
            f"the files of {', '.join(missing)} are not here, {share:.0%} of the starts of {self.settings.kinds_of}: "
            "the policy will differ; put them where the recipe says",
            RelaxionWarning,
            stacklevel=2,
        )

    def starts(self) -> list[AssessedStarts]:
        found = []
        for place, name in enumerate(self.kinds):
            own = self.starts_of(name)
            generator = torch.Generator().manual_seed(VALIDATION_SEED + place)
            found.append(AssessedStarts(name, own.potential, own.sample(generator, self.per_kind)))
        return found

    def card(self) -> dict[str, Any]:
        made = [make_start(self.collection, name, number).atoms for name in self.kinds for number in range(N_SAMPLED)]
        found = _range((int(number) for atoms in made for number in atoms.numbers), [len(atoms) for atoms in made])
        return found | {
            "unseen": tuple(sorted(HELD_APART - set(found["elements"]))),  # measured in docs/results/relaxing.md
            "potential": self.engines,
            "starts": tuple(f"{name} {kind.share:g} ({kind.engine})" for name, kind in self.kinds.items()),
            "cells": "both",
            "periodic": True,
        }


class FileSourceSettings(LiveSettings):
    """Which structures and which calculator."""

    calculator: str = ""
    """By the name that `potential` takes."""

    structures: str = ""
    """A file that ASE reads, or any source of structures of the task relax."""

    perturbation: str = "rattle:0.08"
    """Of every start, so that few structures give many."""

    free_cell: bool = False
    """Relax the cells too."""


class FileData(TrainingData):
    """The user's own structures and calculator: any policy goes on learning with fresh force calls."""

    structures = "own structures"
    fails_on = ("Structures other than those of its files, and other calculators, were never tried.",)

    def __init__(self, settings: FileSourceSettings, per_kind: int, rule: StepRule | None) -> None:
        super().__init__(per_kind, rule)
        if not settings.structures or not settings.calculator:
            raise RunError(
                "fine-tuning needs structures and a calculator: the settings structures (as my.xyz) and calculator "
                "(as my_module:make)"
            )
        self.settings = settings
        self.engines = settings.calculator
        if settings.free_cell and not self.potential.has_stress:
            raise MissingStressError(f"{self.potential.name} gives no stress; leave out free_cell")

    @cached_property
    def potential(self) -> Potential:
        return make_potential(self.settings.calculator)

    @cached_property
    def _sides(self) -> tuple[list[Atoms], list[Atoms]]:
        """Trained on, and assessed: by the structure's place. A single structure is on both, perturbed differently."""
        text = self.settings.structures
        named = text.partition(":")[0] in ("file", "b2", "alloys", "packings")
        source = structure_source(text if named else f"file:{text}")
        images = source(MOST_MADE, torch.Generator().manual_seed(0), self.potential)
        training: list[Atoms] = []
        validation: list[Atoms] = []
        for place, atoms in enumerate(images):
            held_out = is_validation(str(place), FILE_VALIDATION_ONE_IN, digits=8)
            (validation if held_out else training).append(atoms)
        return (training, validation) if training and validation else (images, images)

    def _starts_of(self, images: list[Atoms]) -> PerturbedStarts:
        pool = Structures.from_ase(images, cell_free=[self.settings.free_cell and bool(a.pbc.all()) for a in images])
        return PerturbedStarts(pool, [perturbation(self.settings.perturbation)])

    def dataset(self, network: StiffnessNetwork, generator: Generator, /) -> LiveExamples:
        source = LiveSource(self.potential, self._starts_of(self._sides[0]))
        return LiveExamples(network, [source], self.settings, generator)

    def starts(self) -> list[AssessedStarts]:
        drawn = self._starts_of(self._sides[1]).sample(torch.Generator().manual_seed(VALIDATION_SEED), self.per_kind)
        return [AssessedStarts("own", self.potential, drawn)]

    def card(self) -> dict[str, Any]:
        images = self._sides[0]
        periodic = {bool(atoms.pbc.any()) for atoms in images}
        numbers = (int(number) for atoms in images for number in atoms.numbers)
        return _range(numbers, [len(atoms) for atoms in images]) | {
            "potential": self.engines,
            "starts": (f"{len(images)} structures of {self.settings.structures}", self.settings.perturbation),
            "cells": "free" if self.settings.free_cell else "fixed",
            "periodic": periodic.pop() if len(periodic) == 1 else None,
        }


FitSource = MetalsSettings | KindSourceSettings | FileSourceSettings
SOURCES: dict[str, tuple[type[FitSource], Any]] = {  # by the setting `examples`
    "live": (MetalsSettings, MetalsData),
    "kinds": (KindSourceSettings, KindData),
    "files": (FileSourceSettings, FileData),
}
