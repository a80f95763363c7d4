"""How long a batch takes from the replay of structures: 100 structures of 4–40 atoms, without edges.

    python benchmarks/speed/replay.py [--check]

CPU time per draw, median over many; states alone as in the bar of 0.1 ms, and whole transitions.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median

import torch

from relaxion.structures import Evaluation, Move, State, Structures
from relaxion.train.experience.environment import Transition
from relaxion.train.experience.structure_replay import StructureReplay
from relaxion.train.experience.vectors import draw_without_replacement

BAR_MILLISECONDS = 0.1
BATCH, STORED, ROUNDS = 100, 2_000, 400


def random_state(number: int, generator: torch.Generator) -> State:
    counts = torch.randint(4, 41, (number,), generator=generator)
    n_atoms = int(counts.sum())
    structures = Structures(
        positions=torch.randn(n_atoms, 3, generator=generator, dtype=torch.float64),
        cells=torch.eye(3, dtype=torch.float64).expand(number, 3, 3).clone(),
        periodic=torch.ones(number, 3, dtype=torch.bool),
        atomic_numbers=torch.full((n_atoms,), 29),
        structure_index=torch.repeat_interleave(counts),
        movable=torch.ones(n_atoms, dtype=torch.bool),
        cell_free=torch.zeros(number, dtype=torch.bool),
    )
    forces = torch.randn(n_atoms, 3, generator=generator, dtype=torch.float64)
    energies = torch.zeros(number, dtype=torch.float64)
    ones = torch.ones(number, dtype=torch.int64)
    evaluation = Evaluation(energies, forces, torch.zeros_like(structures.cells))
    return State(structures, evaluation, None, Move.zero(structures), forces, energies, ones)


def filled(generator: torch.Generator) -> StructureReplay:
    replay = StructureReplay(STORED, 100 * STORED, generator=generator)
    state = random_state(STORED, generator)
    nothing = torch.zeros(STORED)
    zeros = torch.zeros(STORED, dtype=torch.int64)
    move = Move.zero(state.structures)
    replay.add(Transition(state, move, move, nothing, nothing, state, zeros, zeros, nothing))
    return replay


def timed(action) -> float:
    """Median milliseconds of CPU time."""
    times = []
    for _ in range(ROUNDS):
        begin = time.process_time()
        action()
        times.append(1000 * (time.process_time() - begin))
    return median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help=f"exit with 1 above {BAR_MILLISECONDS} ms")
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    replay = filled(generator)
    numbers = draw_without_replacement(STORED, BATCH, generator)
    states = timed(lambda: replay.store.read(replay.states[numbers]))
    print("| what | ms |\n|---|---|")
    print(f"| drawing {BATCH} of {STORED} | {timed(lambda: draw_without_replacement(STORED, BATCH, generator)):.3f} |")
    print(f"| {BATCH} states of 4–40 atoms | {states:.3f} |")
    print(f"| {BATCH} transitions: both states, moves, rewards | {timed(lambda: replay.sample(BATCH)):.3f} |")
    return int(options.check and states > BAR_MILLISECONDS)


if __name__ == "__main__":
    sys.exit(main())
