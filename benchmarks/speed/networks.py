"""CPU seconds of the networks for atoms on 100 four-atom cells: passes, and whole updates of TD3.

    python benchmarks/speed/networks.py [--rounds 10] [--check] [--profile]

States are rattled four-atom fcc alloys after one step, moves are random; one torch thread, CPU time of the process,
medians over the rounds, the two backbones in turns. The neighbour search is part of every update: batches come without
a graph, and it is made once for the states and once for the next states. `--check` fails where an update takes longer
than a tenth (tensor_field) or a fortieth (light) of the published code's 2.9 s without, 4.4 s with the policy.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch

import relaxion
from relaxion.model.actions import MoveActions
from relaxion.model.atom_policies import AtomPolicy
from relaxion.model.backbone import AtomNetworkSettings
from relaxion.model.layers import with_graph
from relaxion.structures import State
from relaxion.train.agents.atom_critics import AtomCritics
from relaxion.train.agents.td3 import TD3
from relaxion.train.data.alloys import fcc_alloys
from relaxion.train.data.perturbations import perturbation
from relaxion.train.data.starts import PerturbedStarts
from relaxion.train.experience.environment import Environment, EnvironmentSettings
from relaxion.train.experience.vectors import Batch

N_CELLS = 100
ELEMENTS = ("Al", "Ni", "Cu", "Pd", "Ag", "Pt", "Au")
PUBLISHED_SECONDS = {"critics": 2.9, "critics and policy": 4.4}
REQUIRED_RATIO = {"light": 40, "tensor_field": 10}


def make_batch() -> Batch:
    """100 transitions without graphs, as a replay gives them."""
    generator = torch.Generator().manual_seed(0)
    pool = fcc_alloys(ELEMENTS, N_CELLS, generator, n_atoms=4)
    starts = PerturbedStarts(pool, [perturbation("rattle:0.1")])
    environment = Environment(relaxion.potential("emt"), starts, EnvironmentSettings(n_structures=N_CELLS))
    actions = MoveActions()
    first = environment.reset(generator)
    before = environment.step(first, actions.random(first, generator)).next_state
    transition = environment.step(before, actions.random(before, generator))
    return Batch(
        observations=before,
        actions=transition.executed.to(torch.float32),
        rewards=transition.reward.float(),
        discounts=transition.discount.float(),
        next_observations=transition.next_state,
    )


def seconds(run: Callable[[], object]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def networks(settings: AtomNetworkSettings) -> tuple[AtomPolicy, AtomCritics]:
    generator = torch.Generator().manual_seed(1)
    return AtomPolicy(MoveActions(), settings, generator), AtomCritics(settings, generator=generator)


def passes(settings: AtomNetworkSettings, state: State, batch: Batch) -> dict[str, Callable[[], object]]:
    """Forward and backward of policy and of twin critics, on a state that has its graph."""
    policy, critics = networks(settings)
    return {
        "policy, forward + backward": lambda: policy(state).displacements.square().sum().backward(),
        "twin critics, forward + backward": lambda: critics(state, batch.actions).sum().backward(),
        "policy, forward": torch.no_grad()(lambda: policy(state)),
        "twin critics, forward": torch.no_grad()(lambda: critics(state, batch.actions)),
    }


def update(settings: AtomNetworkSettings, batch: Batch) -> Callable[[], object]:
    """One update of TD3; every second one moves the policy too."""
    agent = TD3(*networks(settings), MoveActions(), torch.Generator().manual_seed(2))
    cutoff = settings.cutoff_angstrom

    def run() -> object:
        seen, then = with_graph(batch.observations, cutoff), with_graph(batch.next_observations, cutoff)
        return agent.update(replace(batch, observations=seen, next_observations=then))

    return run


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Median CPU seconds of each backbone and piece of work."""
    batch = make_batch()
    work: dict[str, dict[str, Callable[[], object]]] = {}
    for name in REQUIRED_RATIO:
        settings = AtomNetworkSettings.read({"backbone": name})
        state = with_graph(batch.observations, settings.cutoff_angstrom)
        assert state.graph is not None
        print(f"{name}: {settings.channels} channels, {settings.n_layers} layers, {state.graph.n_pairs} pairs")
        work[name] = passes(settings, state, batch)
        run = update(settings, batch)
        work[name] |= {"critics": run, "critics and policy": run}  # in turns, as they come
    found: dict[str, dict[str, list[float]]] = {name: {what: [] for what in work[name]} for name in work}
    for number in range(rounds + 1):
        for name, pieces in work.items():
            for what, run in pieces.items():
                spent = seconds(run)
                found[name][what] += [spent] if number else []  # the first round warms up
    return {name: {what: statistics.median(times) for what, times in found[name].items()} for name in found}


def profile() -> None:
    """Where an update's time goes."""
    batch = make_batch()
    for name in REQUIRED_RATIO:
        run = update(AtomNetworkSettings.read({"backbone": name}), batch)
        run(), run()
        with torch.profiler.profile() as found:
            run(), run()
        print(name, found.key_averages().table(sort_by="self_cpu_time_total", row_limit=18, max_name_column_width=50))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--check", action="store_true", help="exit 1 where an update is too slow")
    parser.add_argument("--profile", action="store_true", help="where an update's time goes, and nothing else")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.profile:
        profile()
        return 0
    times = measure(arguments.rounds)
    print(f"\ntorch {torch.__version__}, CPU milliseconds\n")
    print("| backbone | work | ms | published / ours |\n|---|---|---|---|")
    too_slow = []
    for name, pieces in times.items():
        for what, spent in pieces.items():
            ratio = PUBLISHED_SECONDS[what] / spent if what in PUBLISHED_SECONDS else None
            label = f"TD3 update, {what}" if ratio else what
            print(f"| {name} | {label} | {1e3 * spent:.1f} | {f'{ratio:.0f}' if ratio else '–'} |")
            too_slow += [f"{name} {what}"] if ratio and ratio < REQUIRED_RATIO[name] else []
    if arguments.check and too_slow:
        print(f"too slow: {', '.join(too_slow)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
