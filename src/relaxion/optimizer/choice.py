"""From the word a user gives (`policy=`) to the optimizer that relaxes: a policy under guard, or the classical core."""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from ase import Atoms
from ase.data import atomic_numbers as numbers_of

from relaxion.errors import PolicyError, SettingsError
from relaxion.model.atom_policies import StiffnessPolicy
from relaxion.model.card import BODIES, ModelCard
from relaxion.model.policy_file import PolicyFile, policy_of, uncovered
from relaxion.model.roles import Policy
from relaxion.optimizer.classical import ClassicalSettings
from relaxion.optimizer.hessian.base import PolicyModel
from relaxion.optimizer.hessian.internal_topology import has_surface, in_vacuum, molecular_share
from relaxion.optimizer.hessian.learned import TRUST, DirectMoves, LearnedHessians
from relaxion.optimizer.safeguard import GATE, StepRule, rule_of
from relaxion.optimizer.step import Stepper
from relaxion.policies import find_file, own_files, shipped_names
from relaxion.potentials.counting import details_of, fingerprint
from relaxion.structures.structures import DeviceLike, device_of

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
CORE = "classical"  # what relaxes where no policy does
WORDS = ("auto", "none")  # that `policy=` understands beside names and paths
INSIST = "`allow_unseen=True` uses the policy all the same"


@dataclass(frozen=True, eq=False)
class Loaded:
    """A bundle with its networks made, shared by all relaxers of a process: nothing in it ever changes."""

    bundle: PolicyFile
    policy: Policy
    rule: StepRule | None
    weights_sha256: str

    @cached_property
    def elements(self) -> list[int]:
        """Atomic numbers it may speak about."""
        card = self.bundle.card
        return [numbers_of[symbol] for symbol in (*card.elements, *card.adsorbates, *card.unseen)]

    @cached_property
    def covered(self) -> PolicyModel:
        """The policy, for the elements it knows."""
        return self._source(self.elements)

    @cached_property
    def insisted(self) -> PolicyModel:
        """The policy, for all elements."""
        return self._source(None)

    def _source(self, elements: Collection[int] | None) -> PolicyModel:
        if isinstance(self.policy, StiffnessPolicy):
            return LearnedHessians(self.policy.network, elements)
        trust = self.bundle.card.training_settings.get("trust_radius_angstrom", TRUST)
        return DirectMoves(self.policy, elements, float(trust))


@dataclass(frozen=True, eq=False)
class Decision:
    """Which policy relaxes these elements; None: the classical core, because it was asked for or for want of one."""

    loaded: Loaded | None
    note: str = ""  # why the core, where somebody may have expected a policy
    loud: bool = True  # the note is a warning; "auto" promised no policy, so there it is information
    sees_molecules: bool = False  # internal coordinates of molecules on a surface are part of the policy's Hessian

    @property
    def name(self) -> str:
        return CORE if self.loaded is None else self.loaded.bundle.name

    @property
    def key(self) -> str:
        """The same for structures that are relaxed in the same way."""
        return f"{self.name} joined with internal coordinates" if self.sees_molecules else self.name


def new_stepper(
    settings: ClassicalSettings | None = None,
    *,
    policy_model: PolicyModel | None = None,
    rule: StepRule | None = None,
    sees_molecules: bool = False,
) -> Stepper:
    """The optimizer of one structure: guarded steps of the policy behind `policy_model`, or the classical core.

    `sees_molecules`: internal coordinates of molecules become part of the policy's Hessian.
    """
    settings = settings or ClassicalSettings()
    internal = settings.internal and (sees_molecules or policy_model is None)
    return Stepper(replace(settings, internal=internal), policy_model, rule)


@dataclass(frozen=True)
class Chosen:
    """Who relaxes, by name and weights, and its stepper."""

    name: str
    stepper: Stepper
    weights_sha256: str = ""  # the core has none


def chosen(
    policy: str | Path | None,
    atoms: Atoms | None,
    settings: ClassicalSettings,
    *,
    allow_unseen: bool = False,
    device: DeviceLike = None,
) -> Chosen:
    """The stepper for `policy`: "auto", None (or "none") for the core, the name of a policy, or a bundle's path.

    `atoms`: with their calculator; None: what relaxes is no structure.
    """
    calculator = None if atoms is None else atoms.calc
    chooser = Chooser(policy, allow_unseen=allow_unseen, calculator=calculator, device=device)
    decision = chooser.decide([], periodic=False) if atoms is None else chooser.decide_for(atoms)
    if decision.note:
        logger.log(logging.WARNING if decision.loud else logging.INFO, decision.note)
    return stepper_of(decision, settings, allow_unseen=allow_unseen)


def stepper_of(
    decision: Decision,
    settings: ClassicalSettings,
    *,
    allow_unseen: bool = False,
) -> Chosen:
    """A new stepper of whom the decision names; one decision may serve many structures of the same elements."""
    loaded = decision.loaded
    if loaded is None:
        return Chosen(CORE, new_stepper(settings))
    source = loaded.insisted if allow_unseen else loaded.covered
    stepper = new_stepper(settings, policy_model=source, rule=loaded.rule, sees_molecules=decision.sees_molecules)
    return Chosen(loaded.bundle.name, stepper, loaded.weights_sha256)


class Chooser:
    """Decides for many structures; policies are looked up and read once, when it is made."""

    def __init__(
        self,
        policy: str | Path | None,
        *,
        allow_unseen: bool = False,
        calculator: object = None,
        device: DeviceLike = None,
    ) -> None:
        """PolicyError or SettingsError where `policy` is nothing that could relax, or the device is not there.

        `calculator`: "auto" looks among policies that learned from relaxations with it first.
        """
        where = device_of(device)
        self.allow_unseen = allow_unseen
        self._potential = str(details_of(calculator)["name"]).lower()
        self._broken = ""
        self._candidates = list[Loaded]()
        self._automatic = policy == "auto"
        self._learned = list[Loaded]()
        if self._automatic:
            self._candidates, self._broken = _shipped(where)
            self._learned = learned_for(calculator, where)
        elif policy is not None and policy != "none":
            if not isinstance(policy, str | Path):
                raise SettingsError(f"policy is a name, a path, 'auto' or None, got {policy!r}")
            self._candidates = [load(policy, where)]

    def decide_for(self, atoms: Atoms) -> Decision:
        """Who shall relax these atoms."""
        periodic = bool(atoms.pbc.any())
        share = molecular_share(atoms)
        alone = share == 1 and in_vacuum(atoms)
        adsorbed = 0 < share < 1 and has_surface(atoms)
        return self.decide(atoms.numbers.tolist(), periodic=periodic, alone=alone, adsorbed=adsorbed)

    def decide(
        self, atomic_numbers: Collection[int], *, periodic: bool, alone: bool = False, adsorbed: bool = False
    ) -> Decision:
        """Who shall relax these atoms: the one that was trained on all their elements, or, if insisted on, on most.

        `alone`: they are molecules, and not a crystal; `adsorbed`: some are molecules on a surface.
        """
        for loaded in self._learned:
            source = loaded.bundle.card.learned_from
            card = loaded.bundle.card
            known = {numbers_of[symbol] for symbol in source.elements} if source is not None else set()
            fits = known.issuperset(atomic_numbers) and card.periodic in (None, periodic)
            if fits and not (alone and leaves_molecules(card)):
                return Decision(loaded, sees_molecules=adsorbed and not card.adsorbates)
        if not self._candidates:
            return Decision(None, self._broken)
        if 0 in atomic_numbers:
            why = "no policy applies to dummy atoms (X), so the classical optimizer is used"
            return Decision(None, why, loud=not self._automatic)
        for_such = [loaded for loaded in self._candidates if loaded.bundle.card.periodic in (None, periodic)]
        if not for_such and not self.allow_unseen:
            name = self._candidates[0].bundle.name
            why = f"policy {name} is for structures that are {BODIES[not periodic]}, so the classical optimizer is used"
            return Decision(None, why, loud=not self._automatic)
        candidates = for_such or self._candidates

        def missing_in(loaded: Loaded) -> tuple[str, ...]:
            """Molecules that a policy met with one potential, as adsorbates, are not those of others."""
            known = self._potential in loaded.bundle.card.potential.lower().split()
            return uncovered(loaded.bundle, atomic_numbers, adsorbates=known or not (self._automatic and adsorbed))

        nearest = min(candidates, key=lambda loaded: len(missing_in(loaded)))
        missing = ", ".join(missing_in(nearest))
        card = nearest.bundle.card
        leaves = self._automatic and alone and leaves_molecules(card)
        if leaves and (card.adsorbates or not missing):  # else the elements that are missing are the better reason
            why = "no shipped policy covers molecules, so the classical optimizer is used"
            return Decision(None, why, loud=False)
        if not missing or self.allow_unseen:
            return Decision(nearest, sees_molecules=self._automatic and adsorbed and not card.adsorbates)
        if self._automatic and (other := self._for_other_bodies(atomic_numbers, periodic)) is not None:
            why = f"the policy {other.bundle.name} is for structures that are {BODIES[not periodic]}"
            return Decision(None, f"{why}, so the classical optimizer is used", loud=False)
        name = nearest.bundle.name
        if self._automatic:
            why = f"no shipped policy covers all elements ({name} lacks {missing}), so the classical optimizer is used"
            if not periodic:  # molecules: policies of other elements double the force calls
                return Decision(None, why, loud=False)
        else:
            why = f"the policy {name} was not trained on {missing}, so the classical optimizer is used"
        return Decision(None, f"{why}; {INSIST}", loud=not self._automatic)

    def _for_other_bodies(self, atomic_numbers: Collection[int], periodic: bool) -> Loaded | None:
        """One that covers all elements, but of structures that do (or do not) repeat where these do not (or do)."""
        others = (loaded for loaded in self._candidates if loaded.bundle.card.periodic is (not periodic))
        return next((loaded for loaded in others if not uncovered(loaded.bundle, atomic_numbers)), None)


def leaves_molecules(card: ModelCard) -> bool:
    """Whether "auto" leaves molecules by themselves, in a periodic box or not, to the classical optimizer.

    Internal coordinates are better than policies that were not made for molecules, whatever those learned from them.
    On a surface they are part of the policy's Hessian (`JoinedHessian`).
    """
    return card.periodic is not False


def _shipped(device: torch.device) -> tuple[list[Loaded], str]:
    """Those that can be read, and a sentence about the others: nobody named them, so they are no reason to stop."""
    found = []
    broken = []
    for name in shipped_names():
        try:
            found.append(load(name, device))
        except PolicyError as error:
            broken.append(str(error))
    return found, "; ".join([*broken, "the classical optimizer is used"]) if broken else ""


def learned_for(calculator: object, device: torch.device = CPU) -> list[Loaded]:
    """The user's own policies that learned from relaxations with this calculator, the one that gained most first.

    What cannot be read is left out: nobody named it.
    """
    files = own_files() if calculator is not None else {}
    if not files:
        return []
    mark = fingerprint(details_of(calculator))
    found = []
    for name, file in files.items():
        with suppress(PolicyError, OSError):
            source = load(file, device).bundle.card.learned_from
            if source is not None and mark in source.calculators:
                found.append((source.calls_ratio or source.error_ratio, name, load(file, device)))
    return [loaded for *_, loaded in sorted(found, key=lambda one: one[:2])]


def load(name_or_path: str | Path, device: torch.device = CPU) -> Loaded:
    """The policy file with its networks; read again only when it has changed. A stiffness network is on the device."""
    file = find_file(name_or_path, WORDS)
    about = file.stat()
    return _load(file, about.st_mtime_ns, about.st_size, device)


@lru_cache(maxsize=64)
def _load(file: Path, _changed: int, _size: int, device: torch.device) -> Loaded:
    bundle = PolicyFile.read(file)
    gate = bundle.networks.get(GATE)
    rule = None if gate is None else rule_of(gate, bundle.name)
    policy = policy_of(bundle)
    if isinstance(policy, StiffnessPolicy):
        policy.network.to(device)
    return Loaded(bundle, policy, rule, bundle.weights_sha256)
