"""From a run of the task `universal` to a bundle, with a card measured on starts of the store never trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
from ase.data import chemical_symbols

from relaxion.bundles import CardResult, ModelCard, PolicyBundle
from relaxion.bundles.card import POLICY
from relaxion.bundles.networks import network_of, policy_of
from relaxion.collecting.store import Trajectory
from relaxion.files import Stored
from relaxion.networks.metric.policies import MetricPolicy
from relaxion.optimize.gate import GATE, described_steady, gate_of
from relaxion.optimize.guard import Guard
from relaxion.optimize.learned import LearnedMetrics
from relaxion.optimize.quasi_newton import QuasiNewtonSettings
from relaxion.optimize.stepper import Stepper
from relaxion.structures.splits import ELEMENTS as HELD_APART
from relaxion.training.metals_assessment import CAP, COMPARED, FMAX
from relaxion.training.metals_packaging import CORE
from relaxion.training.run_settings import UniversalRunSettings
from relaxion.training.universal_assessment import UniversalAssessor
from relaxion.training.universal_trainer import split_store
from relaxion.version import __version__


def bundle_of_universal(
    name: str, stored: Stored, settings: UniversalRunSettings, command: str, progress: Mapping[str, Any]
) -> PolicyBundle:
    """The metric, with the elements it has really seen."""
    training, validation = split_store(settings.universal)
    network = network_of(settings.metric, stored.part("metric"), stochastic=False)
    calls = {"environment_steps": sum(len(t) for t in (*training, *validation))}  # its steps are updates
    networks = {"policy": network, GATE: described_steady(settings.universal.gate())}
    bundle = PolicyBundle(name, networks, _card(settings, training, command, {**progress, **calls}))
    assessor = UniversalAssessor(validation, settings.training.assessment_starts)
    return replace(bundle, card=_with_results(bundle, assessor))


def _card(
    settings: UniversalRunSettings, training: Sequence[Trajectory], command: str, progress: Mapping[str, Any]
) -> ModelCard:
    numbers = sorted({int(number) for t in training for number in t.numbers.unique()})
    sizes = [t.n_atoms for t in training]
    kinds = {kind: sum(t.kind == kind for t in training) for kind in sorted({t.kind for t in training})}
    symbols = [chemical_symbols[number] for number in numbers]
    periodic = _periodic(training)
    return ModelCard(
        elements=tuple(symbols),
        unseen=tuple(sorted(HELD_APART - set(symbols))) if periodic else (),  # measured in docs/universal.md
        smallest_n_atoms=min(sizes),
        largest_n_atoms=max(sizes),
        potential=" and ".join(sorted({t.engine for t in training})),
        starts=tuple(f"{number} relaxations of kind {kind}" for kind, number in kinds.items()),
        cells="both" if any(bool(t.cell_free) for t in training) else "fixed",
        periodic=periodic,
        force_tolerance_ev_per_angstrom=FMAX,
        agent="imitation",
        training_command=command,
        seed=settings.training.seed,
        relaxion_version=__version__,
        date=datetime.now(UTC).date().isoformat(),
        training_settings=settings.flat(),
        **progress,
    )


def _periodic(training: Sequence[Trajectory]) -> bool | None:
    """What all of them are; None where they differ."""
    found = {bool(t.pbc.any()) for t in training}
    return found.pop() if len(found) == 1 else None


def _with_results(bundle: PolicyBundle, assessor: UniversalAssessor) -> ModelCard:
    """By metric and guard together, as they come out of the bundle, beside the core and ASE's."""
    method, policy = QuasiNewtonSettings(), policy_of(bundle)
    assert isinstance(policy, MetricPolicy)
    metrics, gate = LearnedMetrics(policy.network), gate_of(bundle.networks[GATE], bundle.name)
    found = assessor.calls(lambda: Stepper(method, quasi_newton=Guard(method, metrics, gate)))
    every = np.concatenate(list(found.values()))
    core = np.concatenate(list(assessor.calls(lambda: Stepper(method)).values()))
    classical = [(CORE, core), *((name, assessor.ase_calls(name)) for name in COMPARED)]
    lost = {kind: int((calls >= CAP).sum()) for kind, calls in found.items()}
    failures = [f"{number} of {len(found[kind])} starts of kind {kind}" for kind, number in lost.items() if number]
    values = {
        "n_assessment_starts": len(every),
        "results": (_row(POLICY, every), *(_row(name, calls) for name, calls in classical)),
        "fails_on": (
            *(failures or ["None of the assessment starts failed."]),
            "Potentials other than those named were not trained on; docs/universal.md shows how it carries over.",
        ),
    }
    return bundle.card.model_copy(update=values)


def _row(name: str, calls: np.ndarray) -> CardResult:
    return CardResult(
        optimizer=name,
        mean_force_calls=float(calls.mean()),
        success_rate=float((calls < CAP).mean()),
        largest_force_calls=float(calls.max()),
    )
