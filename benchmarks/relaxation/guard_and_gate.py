"""What the guard's numbers and the gate are worth: force calls on validation starts, as Markdown.

    export OMP_NUM_THREADS=1
    python benchmarks/relaxation/guard_and_gate.py rules                      # hand-made rules for the knobs
    python benchmarks/relaxation/guard_and_gate.py guard                      # when the metric is mistrusted
    python benchmarks/relaxation/guard_and_gate.py noise                      # weights replaced by noise
    python benchmarks/relaxation/guard_and_gate.py gates runs/gate-0 runs/gate-1 runs/gate-2

Starts are those of `relaxion bench` with other seeds (`--seed`, below 9000): near and far from minima, never used for
results. Every row relaxes the same starts; `p95` is the 95th percentile of paired ratios to the core. A gate is trained
around a finished metric by
`relaxion train metals --from-weights RUN --set n_updates=0 --steps 4000 --seed S --out runs/gate-S`.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from ase import Atoms
from ase.filters import FrechetCellFilter
from relaxion.training.metals_assessment import force_calls
from relaxion.training.metals_packaging import gate_in

from relaxion.bench.sets import FIRST_SEED, SETS
from relaxion.networks.metric.network import MetricNetwork
from relaxion.networks.metric.policies import MetricPolicy
from relaxion.optimize.choice import load
from relaxion.optimize.gate import gate_of
from relaxion.optimize.guard import OBSERVATION, Gate, Guard, GuardSettings, Knobs
from relaxion.optimize.learned import LearnedMetrics
from relaxion.optimize.quasi_newton import QuasiNewtonSettings
from relaxion.optimize.stepper import Stepper
from relaxion.potentials.ase import PotentialCalculator
from relaxion.training.metric import MetalsRunSettings
from relaxion.training.packaging import read_weights
from relaxion.training.run_folder import RunFolder
from relaxion.training.settings import RunSettings

FMAX, CAP = 0.05, 300  # eV/Å, force calls
CORE, HAND_MADE = "core", "the rule that ships"
USUAL = "mixed:40,alfe:24,emt-slabs:40,emt-bulk:24"
SEEN = {name: place for place, name in enumerate(OBSERVATION)}

MakeChain = Callable[[], Stepper]


@dataclass(frozen=True)
class Start:
    atoms: Atoms
    calculator: PotentialCalculator
    free_cell: bool

    def calls(self, chain: Stepper) -> int:
        atoms = self.atoms.copy()
        atoms.calc = self.calculator
        return force_calls(FrechetCellFilter(atoms) if self.free_cell else atoms, chain, FMAX, CAP)


def starts_of(text: str, seed: int) -> dict[str, list[Start]]:
    """From `mixed:40,alfe:24`: so many starts of each set."""
    found = {}
    for part in text.split(","):
        name, _, number = part.partition(":")
        chosen = SETS[name]
        calculator = PotentialCalculator(chosen.make_potential())
        found[name] = [Start(atoms, calculator, chosen.free_cell) for atoms in chosen.starts(int(number), seed)]
    return found


def guarded(network: MetricNetwork, gate: Gate | None = None, guard: GuardSettings | None = None) -> MakeChain:
    settings = QuasiNewtonSettings()
    return lambda: Stepper(settings, quasi_newton=Guard(settings, LearnedMetrics(network), gate, guard))


def steady(factor: float, secants: float = 0.0) -> Gate:
    """The trust radius times a number, whatever happens."""
    return lambda _: Knobs(log_trust=float(np.log(factor)), secant_weight=secants)


def watchful(good: float, factor: float) -> Gate:
    """A larger trust radius only after steps that kept this share of the energy they promised."""

    def gate(observation: np.ndarray) -> Knobs:
        fine = observation[SEEN["energy_ratio"]] > good and not observation[SEEN["rejected"]]
        return Knobs(log_trust=float(np.log(factor)) if fine else 0.0, secant_weight=0.0)

    return gate


def correcting(softness: float, largest_force: float) -> Gate:
    """Secants where the metric has just been too soft and the end is near."""

    def gate(observation: np.ndarray) -> Knobs:
        near = observation[SEEN["log10_largest_force"]] < np.log10(largest_force)
        soft = observation[SEEN["log_curvature_ratio"]] > softness
        return Knobs(log_trust=float(np.log(2)), secant_weight=float(near and soft))

    return gate


def shortening(share: float) -> Gate:
    """Steps shorter by a share of what the last one was too long by."""

    def gate(observation: np.ndarray) -> Knobs:
        too_soft = float(np.clip(observation[SEEN["log_curvature_ratio"]], 0.0, 1.0))
        return Knobs(log_trust=float(np.log(2)), log_scale=-share * too_soft, secant_weight=0.0)

    return gate


def rules(network: MetricNetwork) -> dict[str, MakeChain]:
    made = {f"trust radius × {factor:g}": guarded(network, steady(factor)) for factor in (1, 1.5, 3, 4)}
    made["× 2, secants always"] = guarded(network, steady(2, 1.0))
    for good in (0.25, 0.5):
        made[f"× 2 after steps that kept {good:g}, else × 1"] = guarded(network, watchful(good, 2.0))
    for largest in (0.2, 0.5, 100.0):
        made[f"× 2, secants below {largest:g} eV/Å if too soft"] = guarded(network, correcting(0.2, largest))
    for share in (0.5, 1.0):
        made[f"× 2, step shortened by {share:g} of what it was too long"] = guarded(network, shortening(share))
    return made


def guards(network: MetricNetwork) -> dict[str, MakeChain]:
    changes = [{"least_kept": kept} for kept in (0.0, 0.1, 0.4)]
    changes += [{"most_core_steps": most} for most in (3, 40)]
    changes += [{"another": ratio} for ratio in (1.5, 4.0)]
    return {
        ", ".join(f"{name} = {value:g}" for name, value in change.items()): guarded(
            network, guard=GuardSettings(**change)
        )
        for change in changes
    }


def noises(network: MetricNetwork) -> dict[str, MakeChain]:
    made = {f"noise of each tensor's own width, draw {seed}": guarded(noise(network, seed, None)) for seed in (0, 1, 2)}
    return made | {"noise of width 0.1": guarded(noise(network, 0, 0.1))}


def noise(network: MetricNetwork, seed: int, width: float | None) -> MetricNetwork:
    changed, generator = copy.deepcopy(network), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in changed.parameters():
            size = width if width is not None else float(parameter.std()) if parameter.numel() > 1 else 0.0
            parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    return changed


def gates(network: MetricNetwork, folders: list[Path]) -> dict[str, MakeChain]:
    made = {}
    for folder in folders:
        stored = read_weights(RunFolder(folder))
        settings = RunSettings.read(stored.values["settings"])
        if not isinstance(settings, MetalsRunSettings) or (found := gate_in(stored, settings)) is None:
            sys.exit(f"{folder} has no trained gate: train metals with more --steps than n_updates")
        made[f"gate of {folder.name}"] = guarded(network, gate_of(found, folder.name))
    return made


def row(name: str, calls: dict[str, np.ndarray], core: dict[str, np.ndarray]) -> str:
    cells = [
        f"{found.mean():.2f} ({int(found.max())}, {np.quantile(found / core[kind], 0.95):.2f})"
        for kind, found in calls.items()
    ]
    share = np.exp(np.mean([np.log(found.mean() / core[kind].mean()) for kind, found in calls.items()]))
    return f"| {name} | {' | '.join(cells)} | {share:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["rules", "guard", "noise", "gates"])
    parser.add_argument("folders", nargs="*", type=Path, help="runs with a gate")
    parser.add_argument("--policy", default="metals", help="name or file of the policy whose metric is used")
    parser.add_argument("--sets", default=USUAL, help="NAME:NUMBER,… of relaxion bench")
    parser.add_argument("--seed", type=int, default=8101, help="below 9000")
    parser.add_argument("--json", type=Path, help="keep the calls of every start")
    options = parser.parse_args()
    if options.seed >= FIRST_SEED:
        sys.exit(f"seeds from {FIRST_SEED} on are for results; nothing is chosen on them")
    torch.set_num_threads(1)
    policy = load(options.policy).policy
    assert isinstance(policy, MetricPolicy)
    network = policy.network
    made = {"rules": rules, "guard": guards, "noise": noises}.get(options.what)
    chains = gates(network, options.folders) if made is None else made(network)
    starts = starts_of(options.sets, options.seed)
    began, kept = time.process_time(), dict[str, dict[str, np.ndarray]]()
    print(
        "| force calls: mean (worst, p95 of ratios to the core) |", " | ".join(starts), "| geometric mean of shares |"
    )
    print("|---|" + "---|" * (len(starts) + 1))
    for name, make in {CORE: lambda: Stepper(QuasiNewtonSettings()), HAND_MADE: guarded(network), **chains}.items():
        kept[name] = {kind: np.array([start.calls(make()) for start in some]) for kind, some in starts.items()}
        print(row(name, kept[name], kept[CORE]), flush=True)
    print(f"\n{time.process_time() - began:.0f} s of processor time", file=sys.stderr)
    if options.json is not None:
        plain = {name: {kind: found.tolist() for kind, found in calls.items()} for name, calls in kept.items()}
        options.json.write_text(
            json.dumps({"seed": options.seed, "sets": options.sets, "force_calls": plain}, indent=1)
        )


if __name__ == "__main__":
    main()
