"""Environment steps per second against the number of collectors, and what the learner's share of a step costs.

    python benchmarks/distributed/throughput.py [--seconds 20] [--json FILE] [--check]

Two potentials: EMT as it is, and EMT with a sleep of 0.25 s per force call, which stands for a dearer one and leaves
the cores free, so that scaling can be seen on two of them. Costs are CPU time: a busy machine changes them little.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

HERE = Path(__file__).parent
os.chdir(HERE)  # where collectors look for slow_emt, too

from relaxion.train.collectors import (  # noqa: E402
    CollectorRequest,
    DistributedRelaxTrainer,
    arrays,
    packed,
    unpacked,
)
from relaxion.train.tasks.relax import RelaxTrainer  # noqa: E402
from relaxion.train.tasks.relax_settings import RelaxRunSettings  # noqa: E402
from relaxion.train.tasks.relax_task import Collected, relax_task  # noqa: E402
from relaxion.train.tasks.settings import find, settings_from_recipe  # noqa: E402
from relaxion.workers import WorkerPlace  # noqa: E402
from relaxion.workers.on_ray import RayEngine  # noqa: E402

NUMBERS = (1, 2, 3)
POTENTIALS = {"EMT": "emt", "EMT and 0.25 s": "slow_emt:SlowEmt"}
GIVEN = {"n_structures": 8, "updates_per_round": 1, "warmup_steps": 32, "expert_share": 0.0, "imitation_weight": 0.0}


@dataclass(frozen=True)
class Costs:
    """Of one turn: a step of `n_structures` structures and the updates after it."""

    n_structures: int
    atoms_per_structure: float
    collect_ms: float
    pack_ms: float
    unpack_ms: float
    store_ms: float
    update_ms: float
    request_bytes: int
    answer_bytes: int

    @property
    def answer_bytes_per_transition(self) -> float:
        return self.answer_bytes / self.n_structures


def settings_for(potential: str) -> RelaxRunSettings:
    settings = settings_from_recipe(find("emt-metals"), "td3", {**GIVEN, "potential": potential})
    assert isinstance(settings, RelaxRunSettings)
    return settings


def rate(trainer: RelaxTrainer, seconds: float) -> float:
    """Environment steps per second, after the warm-up."""
    while trainer.n_updates == 0:
        trainer.advance()
    for _ in range(6):
        trainer.advance()
    first, begin = trainer.step, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        trainer.advance()
    return (trainer.step - first) / (time.perf_counter() - begin)


def rates(potential: str, seconds: float) -> dict[str, float]:
    settings = settings_for(potential)
    found = {"local": rate(RelaxTrainer(settings, relax_task(settings)), seconds)}
    engine = RayEngine(None, max(NUMBERS))
    try:
        for number in NUMBERS:
            trainer = DistributedRelaxTrainer(settings, relax_task(settings), WorkerPlace("ray", number))
            found[str(number)] = rate(trainer, seconds)
            trainer.close()
    finally:
        engine.stop()
    return found


def milliseconds(action: Any, times: int = 40) -> float:
    """Median CPU time."""
    took = []
    for _ in range(times):
        begin = time.process_time()
        action()
        took.append(time.process_time() - begin)
    return 1e3 * median(took)


def costs() -> Costs:
    trainer = RelaxTrainer(settings := settings_for("emt"), relax_task(settings_for("emt")))
    while trainer.n_updates < 20:
        trainer.advance()
    collected: list[Collected] = []
    collect = milliseconds(
        lambda: collected.append(trainer.collector.collect(trainer.state, len(trainer.replay), trainer.step))
    )
    generators = arrays({name: trainer.generators[name].get_state() for name in ("exploration", "starts", "expert")})
    one = collected[-1]
    answer = packed(one, False, generators, 0)
    policy = {f"policy.{name}": tensor for name, tensor in trainer.agent.policy.state_dict().items()}
    request = CollectorRequest(arrays(policy), 1, 1)
    states = one.transition.state.structures
    return Costs(
        n_structures=settings.environment.n_structures,
        atoms_per_structure=float(states.n_atoms) / states.n_structures,
        collect_ms=collect,
        pack_ms=milliseconds(lambda: pickle.dumps(packed(one, False, generators, 0), protocol=5)),
        unpack_ms=milliseconds(lambda: unpacked(answer, one.transition.state)),
        store_ms=milliseconds(
            lambda: (trainer.replay.add(one.transition), trainer.diagnosis.add(one.transition, None))
        ),
        update_ms=milliseconds(lambda: trainer.agent.update(trainer._sampled())),
        request_bytes=len(pickle.dumps(request, protocol=5)),
        answer_bytes=len(pickle.dumps(answer, protocol=5)),
    )


def _store(trainer: RelaxTrainer, collected: Collected) -> None:
    trainer.replay.add(collected.transition)
    trainer.diagnosis.add(collected.transition, None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="per measurement")
    parser.add_argument("--json", type=Path, help="all numbers")
    parser.add_argument("--check", action="store_true", help="fail unless three collectors double one, with the sleep")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    own = costs()
    print(f"one turn: {own.n_structures} structures of {own.atoms_per_structure:.1f} atoms, CPU time")
    for name, value in asdict(own).items():
        print(f"  {name:24} {value:10.4g}")
    print(f"  {'bytes per transition':24} {own.answer_bytes_per_transition:10.4g}")
    print(f"\nload average {os.getloadavg()[0]:.1f}\n| potential | local | " + " | ".join(map(str, NUMBERS)) + " |")
    table = {}
    for words, potential in POTENTIALS.items():
        table[words] = rates(potential, arguments.seconds)
        print(
            f"| {words} | " + " | ".join(f"{value:.1f}" for value in table[words].values()) + " | steps/s", flush=True
        )
    if arguments.json:
        facts = {"costs": asdict(own), "steps_per_second": table, "load_average": os.getloadavg()}
        arguments.json.write_text(json.dumps(facts, indent=2) + "\n")
    slow = table["EMT and 0.25 s"]
    return 1 if arguments.check and slow["3"] < 2 * slow["1"] else 0


if __name__ == "__main__":
    sys.exit(main())
