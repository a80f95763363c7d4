"""Each trouble is caused with real parts, and the diagnosis names it; without the trouble it does not (R9)."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from relaxion.potentials import potential
from relaxion.potentials.base import Potential
from relaxion.structures import Evaluation, Move, State, Structures
from relaxion.train.agents.shared import adam
from relaxion.train.diagnostics import Event
from relaxion.train.diagnostics.diagnosis import closest_pairs
from relaxion.train.runs.loop import Interrupted, train
from relaxion.train.tasks.relax import RelaxTrainer
from relaxion.train.tasks.relax_settings import RelaxRunSettings
from relaxion.train.tasks.relax_task import RelaxTask, relax_task
from relaxion.train.tasks.settings import read_settings
from training_runs import without_times

SMALL: dict[str, Any] = {
    "task": "relax",
    "structures": "alloys:Cu-Au:2-4",
    "held_apart": "starts",
    "n_pooled": 16,
    "n_structures": 16,
    "max_force_calls": 8,
    "discount_factor": 0.95,
    "channels": 4,
    "n_radial": 4,
    "batch_size": 16,
    "warmup_steps": 64,
    "replay_capacity": 2000,
    "updates_per_round": 2,
    "alarm_memory_steps": 160,
    "log_interval_steps": 80,
    "assessment_interval_steps": 0,
    "assessment_starts": 4,
}
SUPPORT = {"lowest_value": -4.0, "highest_value": 4.0}
AGENTS = {"td3": {}, "ddpg": {}, "d4pg": SUPPORT, "sac": {"initial_entropy_weight": 0.1}}
PUSHING = {"minimum_distance_angstrom": 2.9}  # bonds are shorter: every move runs into somebody
GATED = {"environment_information": ("log_largest_force",)}


def settings(agent: str = "td3", **changes: Any) -> RelaxRunSettings:
    read = read_settings({**SMALL, **AGENTS[agent], "agent": agent, **changes})
    assert isinstance(read, RelaxRunSettings)
    return read


def events_of(
    chosen: RelaxRunSettings,
    steps: int = 480,
    change: Callable[[RelaxTrainer], None] | None = None,
    engine: Potential | None = None,
) -> list[Event]:
    """Alarms of a training, `change` done to it before it begins."""
    task = relax_task(chosen)
    trainer = RelaxTrainer(chosen, task if engine is None else RelaxTask(chosen, engine, task.pools))
    if change is not None:
        change(trainer)
    events, interval = [], chosen.training.log_interval_steps
    while trainer.step < steps:
        before = trainer.step
        trainer.advance()
        if trainer.step // interval > before // interval:
            trainer.scalars()
            events += trainer.take_events()
    return events


@cache
def healthy(agent: str = "td3") -> list[Event]:
    return events_of(settings(agent))


def sentence(events: list[Event], name: str) -> str:
    """Of the alarm of that name, which began once and stands."""
    (event,) = [event for event in events if event.name == name]
    assert event.begins
    return event.sentence


@pytest.mark.parametrize("agent", AGENTS)
def test_a_healthy_run_raises_no_alarm(agent: str) -> None:
    assert healthy(agent) == []


def test_a_wall() -> None:
    """The policy follows the forces, and the corrector undoes what it wants (R9.1)."""
    events = events_of(settings(**PUSHING), steps=320)
    assert sentence(events, "wall").startswith("blocked against a wall: moves of 0.")
    assert "minimum_distance_angstrom" in sentence(events, "wall")
    assert sentence(events, "crowding").startswith("atoms stay at the minimum distance: 100% of the steps")
    assert healthy() == []


def plant(bias: float) -> Callable[[RelaxTrainer], None]:
    """A critic, and its target, that believe every move to be worth so much more."""

    def change(trainer: RelaxTrainer) -> None:
        agent: Any = trainer.agent
        names = ("critics", "target_critics") if hasattr(agent, "critics") else ("critic", "target_critic")
        for name in names:
            answer = getattr(agent, name).networks.pooled.answer
            with torch.no_grad():
                if hasattr(agent, "support"):  # a distribution: its upper bins
                    answer.bias += bias * torch.linspace(-1, 1, answer.bias.shape[-1])
                else:
                    answer.bias += bias

    return change


@pytest.mark.parametrize("agent", AGENTS)
def test_an_overestimating_critic(agent: str) -> None:
    """Updates go on as ever, but bootstrapped from targets that are far too high (R9.2)."""
    events = events_of(settings(agent), change=plant(30.0), steps=400)
    assert sentence(events, "overestimation").startswith("critic overestimates: ")
    assert "lower critic_learning_rate" in sentence(events, "overestimation")
    assert healthy(agent) == []


def only_the_gate_learns(trainer: RelaxTrainer) -> None:
    agent: Any = trainer.agent
    agent.policy_optimizer = adam(agent.policy.gate.parameters(), 0.1)


def test_a_gate_going_to_zero() -> None:
    """Every move is undone and every deviation is dear: the cheapest is not to move (R9.3)."""
    dear = {**GATED, "deviation_penalty_per_angstrom2": 1e4}
    events = events_of(settings(**dear, **PUSHING), change=only_the_gate_learns)
    assert sentence(events, "stillness").startswith("avoids penalties by not moving: the gate's factor is 0.1")
    assert "lower deviation_penalty_per_angstrom2" in sentence(events, "stillness")
    assert events_of(settings(**GATED)) == []


def test_a_policy_without_gate_that_stops_moving() -> None:
    dear = {"updates_per_round": 4, "policy_learning_rate": 0.01, "deviation_penalty_per_angstrom2": 1e6}
    events = events_of(settings(**dear, **PUSHING))
    words = "avoids penalties by not moving: under a large force the policy moves 0.00"
    assert sentence(events, "stillness").startswith(words)
    assert healthy() == []


@pytest.mark.parametrize(("share", "alarmed"), [(0.05, True), (0.5, False)])
def test_a_policy_whose_moves_are_a_small_share_of_those_of_springs(share: float, alarmed: bool) -> None:
    """It follows every force, by a twentieth of F/k: moves of hundredths of an Å, and hardly anything converges."""

    def follow_forces(trainer: RelaxTrainer) -> None:
        def act(state: State) -> Move:
            return Move(share / 5.0 * state.evaluation.forces, torch.zeros_like(state.structures.cells))

        agent: Any = trainer.agent
        agent.act = act

    events = events_of(settings(updates_per_round=0), change=follow_forces, steps=1760)
    if alarmed:
        assert "Å, 0.05" in sentence(events, "stillness")
    else:
        assert "stillness" not in {event.name for event in events}


def short_is_better(trainer: RelaxTrainer) -> None:
    """Critics that take more off the value the farther atoms move."""
    for critics in (trainer.agent.critics, trainer.agent.target_critics):  # type: ignore[attr-defined]
        plain = critics.forward
        critics.forward = lambda state, move, plain=plain: (
            plain(state, move) - 5 * move.largest_displacements(state.structures)[:, None]
        )


@pytest.mark.parametrize("planted", [True, False])
def test_a_critic_that_takes_short_moves_for_better(planted: bool) -> None:
    """Moves of springs are about right, and half of one is worth half (docs/results/learning.md)."""
    chosen = settings(policy="stiffness", critic_updates_before=1000)
    trainer = RelaxTrainer(chosen, relax_task(chosen))
    if planted:
        short_is_better(trainer)
    for _ in range(20):
        trainer.advance()
    calls = trainer.force_calls
    trainer.assess()
    assert trainer.force_calls == calls  # what an assessment costs is not what training costs
    line = trainer.scalars()
    assert line["diagnosis/worth_of_half_move"] < line["diagnosis/worth_of_own_move"] or planted
    names = [event.name for event in trainer.take_events()]
    assert ("wrong_way" in names) == planted


def test_an_entropy_that_cannot_be_reached() -> None:
    """No deviation has so large an entropy: the weight only rises, and the policy is paid for chance (R9.4)."""
    rising = {"target_entropy_per_dimension": 50.0, "entropy_weight_learning_rate": 0.2}
    events = events_of(settings("sac", **rising))
    assert sentence(events, "entropy_weight").startswith("SAC's entropy weight runs away: it is ")
    assert "lower target_entropy_per_dimension" in sentence(events, "entropy_weight")
    assert healthy("sac") == []


def test_a_policy_that_gets_lost() -> None:
    """Springs know the way before the first update; then the rate is far too large (R9.4)."""
    losing = {"policy": "stiffness", "policy_learning_rate": 0.1, "updates_per_round": 4, "averaged_policy": False}
    chosen = settings(**losing, max_force_calls=30)
    trainer = RelaxTrainer(chosen, relax_task(chosen))
    trainer.assess()
    while trainer.step < 320:
        trainer.advance()
    trainer.assess()
    trainer.scalars()
    assert sentence(trainer.take_events(), "lost").startswith("the policy got worse: it needs ")
    assert trainer.kept.best is not None
    assert trainer.kept.best.step == 0


class Fragile(Potential):
    """EMT that knows nothing of atoms nearer than it was fitted for, as learned potentials do."""

    name = "fragile"

    def __init__(self, nearest: float) -> None:
        super().__init__()
        self.inner, self.nearest = potential("emt"), nearest
        self.has_stress = self.inner.has_stress

    def evaluate(self, structures: Structures, stresses: bool) -> Evaluation:
        answer = self.inner.evaluate(structures, stresses)
        too_near = closest_pairs(structures) < self.nearest
        return Evaluation(answer.energies.masked_fill(too_near, torch.nan), answer.forces, answer.stresses)


def test_a_potential_that_fails() -> None:
    chosen = settings(exploration_noise=5.0)  # far into the unknown
    events = events_of(chosen, engine=Fragile(nearest=2.2))
    assert sentence(events, "non_finite").startswith("the potential fails too often: ")
    assert "raise minimum_distance_angstrom" in sentence(events, "non_finite")
    assert [event for event in events_of(chosen, engine=Fragile(nearest=0.0)) if event.name == "non_finite"] == []


def test_a_replay_of_the_last_few_rounds() -> None:
    with pytest.warns(match="is small for systems"):
        events = events_of(settings(replay_capacity=64, warmup_steps=64), steps=320)
    assert sentence(events, "replay_young").startswith("replay is too young: sampled transitions are ")
    assert "raise replay_capacity" in sentence(events, "replay_young")
    assert healthy() == []


def test_a_replay_of_long_ago() -> None:
    long = {"n_structures": 512, "replay_capacity": 80_000, "updates_per_round": 0, "log_interval_steps": 1024}
    with pytest.warns(match="is large for systems"):
        events = events_of(settings(**long, structures="b2:AlCu", warmup_steps=53_000), steps=55_000)
    assert sentence(events, "replay_old").startswith("replay is too old: sampled transitions are 2")
    assert "lower replay_capacity" in sentence(events, "replay_old")
    assert healthy() == []


@pytest.mark.filterwarnings("ignore:.*lie outside the support:relaxion.errors.RelaxionWarning")
def test_returns_that_the_critic_cannot_express() -> None:
    events = events_of(settings("d4pg", lowest_value=-0.01, highest_value=0.01), steps=400)
    assert sentence(events, "support").startswith("returns leave the critic's support: ")
    assert "widen lowest_value and highest_value" in sentence(events, "support")
    assert healthy("d4pg") == []


def records(out: Path) -> list[dict[str, float | None]]:
    return [without_times(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def alarms(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "alarms.jsonl").read_text().splitlines()]


def test_a_run_writes_its_alarms_down_and_goes_on_with_them(tmp_path: Path) -> None:
    """Interrupted and resumed, the same lines to the bit; alarms in numbers and in words; advice beside BFGS."""
    chosen = settings(
        **PUSHING, steps=480, alarm_memory_steps=40, checkpoint_interval_steps=160, assessment_interval_steps=240
    )
    train(chosen, tmp_path / "straight")

    def stop(step: int, _newest: Any) -> None:
        if step == 288:
            raise KeyboardInterrupt

    with pytest.raises((Interrupted, KeyboardInterrupt)):
        train(chosen, tmp_path / "stopped", on_progress=stop)
    train(chosen, tmp_path / "stopped", resume=True)
    straight = alarms(tmp_path / "straight")
    assert alarms(tmp_path / "stopped") == straight
    assert records(tmp_path / "stopped") == records(tmp_path / "straight")
    wall = next(line for line in straight if line.get("alarm") == "wall")
    assert wall["event"] == "begins"
    assert wall["sentence"].startswith("blocked against a wall")
    columns = {
        line["time/total_timesteps"]: line.get("diagnosis/alarm_wall") for line in records(tmp_path / "straight")
    }
    assert all(value == (step >= wall["step"]) for step, value in columns.items() if value is not None)
    advice = next(line for line in straight if "advice" in line)
    assert advice["sentence"].startswith("needs more force calls than BFGS: ")
