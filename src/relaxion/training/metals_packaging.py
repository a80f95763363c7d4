"""From a run of the task `metals` to a bundle: metric, gate, and a card measured with both as they come out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from relaxion.bench.baselines import ase_calls
from relaxion.bundles import CardResult, ModelCard, Network, PolicyBundle
from relaxion.bundles.card import POLICY
from relaxion.bundles.networks import network_of, policy_of
from relaxion.files import Stored
from relaxion.generators.metals import ADSORBATES, EAM_METALS, EMT_METALS
from relaxion.networks.metric.policies import MetricPolicy
from relaxion.optimize.gate import GATE, described_gate, gate_of
from relaxion.optimize.guard import Guard
from relaxion.optimize.learned import LearnedMetrics
from relaxion.optimize.quasi_newton import QuasiNewtonSettings
from relaxion.optimize.stepper import Stepper
from relaxion.training.metals_assessment import CAP, COMPARED, FMAX, MetalsAssessed, MetalsAssessor
from relaxion.training.run_settings import MetalsRunSettings
from relaxion.version import __version__

CORE = "classical core"
GATE_POLICY, GATE_UPDATES = "gate.agent.policy.", "gate.agent.n_updates"  # where a run keeps the gate


def bundle_of_metals(
    name: str, stored: Stored, settings: MetalsRunSettings, command: str, progress: Mapping[str, Any]
) -> PolicyBundle:
    """The metric, and the gate where the run came that far."""
    networks = {"policy": network_of(settings.metric, stored.part("metric"), stochastic=False)}
    if (gate := gate_in(stored, settings)) is not None:
        networks[GATE] = gate
    teacher = f"imitation, then {settings.agent_name} for the gate" if GATE in networks else "imitation"
    bundle = PolicyBundle(name, networks, _card(settings, teacher, command, progress))
    return replace(bundle, card=_with_results(bundle, settings.training.assessment_starts))


def gate_in(stored: Stored, settings: MetalsRunSettings) -> Network | None:
    """The gate of a run; None where it has none, or has stopped in the gate's warm-up."""
    weights = {k.removeprefix(GATE_POLICY): t for k, t in stored.tensors.items() if k.startswith(GATE_POLICY)}
    trained = stored.tensors.get(GATE_UPDATES)
    if not weights or trained is None or int(trained) == 0:
        return None
    return described_gate(weights, settings.networks.widths, stochastic=settings.agent_name == "sac")


def _card(settings: MetalsRunSettings, teacher: str, command: str, progress: Mapping[str, Any]) -> ModelCard:
    metals = settings.metals
    return ModelCard(
        elements=tuple(sorted({*EMT_METALS, *EAM_METALS})),
        adsorbates=ADSORBATES,
        smallest_n_atoms=metals.smallest_n_atoms,
        largest_n_atoms=metals.largest_n_atoms,
        potential="emt (Al Cu Ag Au Ni Pd Pt) and eam (16 metals)",
        starts=(
            *(f"{kind} {share:g}" for kind, share in metals.shares.items()),
            f"displaced by Gaussians of up to {metals.largest_rattle_angstrom:g} Å",
            f"{metals.free_cell_share:.0%} of the crystals strained by up to 4 %, with a free cell",
        ),
        cells="both",
        force_tolerance_ev_per_angstrom=FMAX,
        agent=teacher,
        training_command=command,
        seed=settings.training.seed,
        relaxion_version=__version__,
        date=datetime.now(UTC).date().isoformat(),
        training_settings=settings.flat(),
        **progress,
    )


def _with_results(bundle: PolicyBundle, per_kind: int) -> ModelCard:
    """On the validation starts, by metric, gate and guard together, beside the core and ASE's."""
    assessor, method = MetalsAssessor(per_kind), QuasiNewtonSettings()
    policy, gate = policy_of(bundle), bundle.networks.get(GATE)
    assert isinstance(policy, MetricPolicy)
    turned = None if gate is None else gate_of(gate, bundle.name)
    metrics = LearnedMetrics(policy.network)
    assessed = assessor(lambda: Stepper(method, quasi_newton=Guard(method, metrics, turned)))
    core = assessor(lambda: Stepper(method)).all_calls
    classical = [(CORE, core), *((name, _ase(name, assessor)) for name in COMPARED)]
    values = {
        "n_assessment_starts": len(assessed.all_calls),
        "results": (_row(POLICY, assessed.all_calls), *(_row(name, calls) for name, calls in classical)),
        "fails_on": tuple(_failures(assessed)),
    }
    return bundle.card.model_copy(update=values)


def _ase(name: str, assessor: MetalsAssessor) -> np.ndarray:
    worlds = assessor.starts.values()
    return np.concatenate([ase_calls(name, starts, c.potential, FMAX, CAP).force_calls for c, starts in worlds])


def _row(name: str, calls: np.ndarray) -> CardResult:
    return CardResult(
        optimizer=name,
        mean_force_calls=float(calls.mean()),
        success_rate=float((calls < CAP).mean()),
        largest_force_calls=float(calls.max()),
    )


def _failures(assessed: MetalsAssessed) -> list[str]:
    lost = {kind: int((calls >= CAP).sum()) for kind, calls in assessed.force_calls.items()}
    found = [
        f"{number} of {len(assessed.force_calls[kind])} starts of kind {kind}"
        for kind, number in lost.items()
        if number
    ]
    return [
        *(found or ["None of the assessment starts failed."]),
        "The starts of the results are validation starts: never trained on, but the guard's rule was chosen on such.",
        "Other bonding than metals' was never seen; H, C, N and O only as single atoms on slabs of EMT's metals.",
    ]
