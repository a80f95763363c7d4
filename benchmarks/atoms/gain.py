"""Springs times one number: the baseline of every stiffness policy, without any learning.

    python benchmarks/atoms/gain.py [--recipe al-fe]     # 1 CPU-minute; then python tools/fill_pages.py

The move is what springs make of the forces, damped as a stiffness policy's, times a gain. The gain is found on
validation starts; the row of results is one look at the starts held out, with that gain and with 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from relaxion.files import write_json
from relaxion.model.atom_policies import damping
from relaxion.model.solve import solve
from relaxion.model.stiffness import strain_matrices
from relaxion.model.stiffness_network import SolveInputs, StiffnessSettings
from relaxion.structures import Move, State
from relaxion.train.judge.assessment import Assessed
from relaxion.train.tasks.relax_settings import RelaxRunSettings
from relaxion.train.tasks.relax_task import RelaxTask, relax_task
from relaxion.train.tasks.settings import find, settings_from_recipe

KEPT = Path(__file__).parent / "results" / "learning"
GAINS = [1 + 0.125 * number for number in range(9)]


def springs(settings: StiffnessSettings, gain: float) -> Callable[[State], Move]:
    def move(state: State) -> Move:
        inputs = SolveInputs.of(state, settings, torch.float64)
        prior = inputs.prior()
        answer = solve(prior, inputs.pulls)
        answer = answer.scaled(gain * damping(prior, inputs), state.structures)
        return Move(answer.atoms, strain_matrices(answer.cells)).allowed(state.structures)

    return move


def assessed(task: RelaxTask, settings: StiffnessSettings, gain: float) -> Assessed:
    found = task.assessor()(task.following(springs(settings, gain)))
    print(f"gain {gain:g}: {found.force_calls.mean():.2f} force calls, {1 - found.success_rate:.0%} failed", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", default="al-fe")
    recipe = parser.parse_args().recipe
    torch.set_num_threads(1)
    settings = settings_from_recipe(find(recipe), "td3", {"policy": "stiffness", "environment_information": []})
    assert isinstance(settings, RelaxRunSettings)
    assert isinstance(settings.policy, StiffnessSettings)
    print("validation starts")
    validation = relax_task(settings.assessed_on_validation())
    calls = {gain: float(assessed(validation, settings.policy, gain).force_calls.mean()) for gain in GAINS}
    best = min(calls, key=lambda gain: calls[gain])
    print("starts held out")
    held_out = {gain: assessed(relax_task(settings), settings.policy, gain) for gain in (1.0, best)}
    rows = {
        f"{gain:g}": {"force_calls_mean": float(found.force_calls.mean()), "success_rate": found.success_rate}
        for gain, found in held_out.items()
    }
    write_json(KEPT / f"{recipe}-springs.json", {"validation": calls, "gain": best, "held_out": rows})


if __name__ == "__main__":
    main()
