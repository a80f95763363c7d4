"""From the word a user gives (`policy=`) to the optimizer that relaxes: a policy under guard, or the classical core."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ase.data import atomic_numbers as numbers_of

from relaxion.bundle import PolicyBundle, uncovered
from relaxion.bundle.library import find_file, shipped_names
from relaxion.classical.chain import Classical
from relaxion.classical.direct import DirectMetrics
from relaxion.classical.guard import Gate, Guard, MetricSource
from relaxion.classical.knobs import GATE, gate_of
from relaxion.classical.learned_metric import TRUST, LearnedMetrics
from relaxion.classical.quasi_newton import QuasiNewtonSettings
from relaxion.errors import PolicyError, SettingsError
from relaxion.networks.bundled import policy_of
from relaxion.networks.metric_policies import MetricPolicy
from relaxion.networks.roles import Policy

logger = logging.getLogger(__name__)

CORE = "classical"  # what relaxes where no policy does
WORDS = ("auto", "none")  # that `policy=` understands beside names and paths
INSIST = "allow_unseen=True (--allow-unseen) insists"


@dataclass(frozen=True, eq=False)
class Loaded:
    """A bundle with its networks made, shared by all relaxers of a process: nothing in it ever changes."""

    bundle: PolicyBundle
    policy: Policy
    gate: Gate | None
    weights_sha256: str

    def metrics(self, elements: Collection[int] | None) -> MetricSource:
        """What proposes. Answers are kept for the base at hand, so every relaxer has its own."""
        if isinstance(self.policy, MetricPolicy):
            return LearnedMetrics(self.policy.network, elements)
        trust = self.bundle.card.training_settings.get("trust_radius_angstrom", TRUST)
        return DirectMetrics(self.policy, elements, float(trust))


@dataclass(frozen=True, eq=False)
class Decision:
    """Which policy relaxes these elements; None: the classical core, because it was asked for or for want of one."""

    loaded: Loaded | None
    note: str = ""  # why the core, where somebody may have expected a policy
    loud: bool = True  # the note is a warning; "auto" promised no policy, so there it is information

    @property
    def name(self) -> str:
        return CORE if self.loaded is None else self.loaded.bundle.name


@dataclass(frozen=True)
class Chosen:
    """Who relaxes, by name and weights, and its chain."""

    name: str
    chain: Classical
    weights_sha256: str = ""  # the core has none


def chosen(
    policy: str | Path | None,
    atomic_numbers: Collection[int],
    settings: QuasiNewtonSettings,
    *,
    fallback: bool = True,
    allow_unseen: bool = False,
) -> Chosen:
    """The chain for `policy`: "auto", None (or "none") for the core, the name of a policy, or a bundle's path."""
    decision = decide(policy, atomic_numbers, allow_unseen=allow_unseen)
    if decision.note:
        logger.log(logging.WARNING if decision.loud else logging.INFO, decision.note)
    return chain_of(decision, settings, fallback=fallback, allow_unseen=allow_unseen)


def chain_of(
    decision: Decision, settings: QuasiNewtonSettings, *, fallback: bool = True, allow_unseen: bool = False
) -> Chosen:
    """A new chain of whom the decision names; one decision may serve many structures of the same elements."""
    loaded = decision.loaded
    if loaded is None:
        return Chosen(CORE, Classical(settings, fallback=fallback))
    card = loaded.bundle.card
    elements = None if allow_unseen else [numbers_of[symbol] for symbol in (*card.elements, *card.adsorbates)]
    guard = Guard(settings, loaded.metrics(elements), loaded.gate)
    chain = Classical(settings, fallback=fallback, quasi_newton=guard)
    return Chosen(loaded.bundle.name, chain, loaded.weights_sha256)


def decide(policy: str | Path | None, atomic_numbers: Collection[int], *, allow_unseen: bool = False) -> Decision:
    """Who shall relax these elements; PolicyError or SettingsError where `policy` is nothing that could."""
    if policy is None or policy == "none":
        return Decision(None)
    if policy == "auto":
        return _automatic(atomic_numbers, allow_unseen=allow_unseen)
    if not isinstance(policy, str | Path):
        raise SettingsError(f"policy is a name, a path, 'auto' or None, got {policy!r}")
    loaded = load(policy)
    missing = uncovered(loaded.bundle, atomic_numbers)
    if not missing or allow_unseen:
        return Decision(loaded)
    return Decision(
        None,
        f"the policy {loaded.bundle.name} was not trained on {', '.join(missing)}, so the classical core relaxes; "
        f"{INSIST}",
    )


def _automatic(atomic_numbers: Collection[int], *, allow_unseen: bool) -> Decision:
    """The first shipped policy that was trained on all the elements, or, if insisted on, on most of them."""
    shipped, broken = _shipped()
    if not shipped:
        return Decision(None, broken)
    nearest = min(shipped, key=lambda loaded: len(uncovered(loaded.bundle, atomic_numbers)))
    missing = uncovered(nearest.bundle, atomic_numbers)
    if not missing or allow_unseen:
        return Decision(nearest)
    return Decision(
        None,
        f"no shipped policy covers all elements ({nearest.bundle.name} lacks {', '.join(missing)}), so the classical "
        f"core relaxes; {INSIST}",
        loud=False,
    )


def _shipped() -> tuple[list[Loaded], str]:
    """Those that can be read, and a sentence about the others: nobody named them, so they are no reason to stop."""
    found, broken = [], []
    for name in shipped_names():
        try:
            found.append(load(name))
        except PolicyError as error:
            broken.append(str(error))
    return found, "; ".join([*broken, "the classical core relaxes"]) if broken else ""


def load(name_or_path: str | Path) -> Loaded:
    """The bundle with its networks; read again only when its file has changed."""
    file = find_file(name_or_path, WORDS)
    about = file.stat()
    return _load(file, about.st_mtime_ns, about.st_size)


@lru_cache(maxsize=8)
def _load(file: Path, _changed: int, _size: int) -> Loaded:
    bundle = PolicyBundle.read(file)
    gate = bundle.networks.get(GATE)
    turned = None if gate is None else gate_of(gate, bundle.name)
    return Loaded(bundle, policy_of(bundle), turned, bundle.weights_sha256)
