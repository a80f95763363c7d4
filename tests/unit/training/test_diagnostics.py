"""Diagnostics part by part: what is measured, how it is averaged, when an alarm begins and ends, what it says (R9)."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from ase import Atoms
from ase.build import bulk

from relaxion.model.actions import MoveActions
from relaxion.model.backbone import AtomNetworkSettings
from relaxion.potentials import potential
from relaxion.structures import Move, Outcome, State, Structures
from relaxion.train.agents import atom_agent
from relaxion.train.agents.d4pg import D4PGSettings
from relaxion.train.agents.ddpg import DDPGSettings
from relaxion.train.agents.sac import SACSettings
from relaxion.train.agents.td3 import TD3Settings
from relaxion.train.data import perturbations as perturb
from relaxion.train.data.alloys import fcc_alloys
from relaxion.train.data.starts import PerturbedStarts
from relaxion.train.diagnostics import DIAGNOSTICS, RULES, Alarms, Diagnosis, Facts, Seen, standing
from relaxion.train.diagnostics.diagnosis import (
    Averages,
    Mean,
    RelaxationsUnderWay,
    Tally,
    closest_pairs,
    critic_values,
    gate_factors,
    lowest_gate_factor,
)
from relaxion.train.experience.environment import Environment, EnvironmentSettings, Source
from relaxion.train.experience.structure_replay import StructureReplay

FACTS = Facts(0.05, 0.7, 0.5, memory_steps=20)
SMALL = AtomNetworkSettings(channels=4, n_radial=4)
BOUNDS = MoveActions(0.5, 0.1)
AGENTS = (TD3Settings(), SACSettings(), DDPGSettings(), D4PGSettings(lowest_value=-3, highest_value=3, n_bins=7))


def make_agent(settings=AGENTS[0], networks=SMALL):
    return atom_agent(BOUNDS, torch.Generator().manual_seed(0), settings, networks)


def environment(max_force_calls=4, n_structures=5) -> Environment:
    pool = fcc_alloys(["Cu", "Au"], 4, torch.Generator().manual_seed(0), n_atoms=4)
    starts = PerturbedStarts(pool, [perturb.perturbation("rattle:0.15")])
    settings = EnvironmentSettings(n_structures=n_structures, max_force_calls=max_force_calls, discount_factor=0.5)
    return Environment(potential("emt"), starts, settings)


def some_state() -> State:
    return environment().reset(torch.Generator().manual_seed(1))


def replay() -> StructureReplay:
    return StructureReplay(100, 4000, generator=torch.Generator())


class TestMeasures:
    def test_closest_pair_sees_own_images_and_says_how_far_it_looked(self):
        gold, pair, alone = bulk("Au"), Atoms("H2", [[0, 0, 0], [0, 0, 0.75]]), Atoms("He2", [[0, 0, 0], [9.0, 0, 0]])
        found = closest_pairs(Structures.from_ase([gold, pair, alone]))
        assert found.tolist() == pytest.approx([4.08 / math.sqrt(2), 0.75, 4.0])

    def test_an_atom_that_flew_away_ends_no_run(self):
        assert closest_pairs(Structures.from_ase([Atoms("H2", [[0, 0, 0], [0, 0, 1e7]])])).tolist() == [4.0]

    @pytest.mark.parametrize("settings", AGENTS[:3], ids=lambda s: type(s).__name__)
    def test_value_is_the_smallest_critics(self, settings):
        agent, state = make_agent(settings), some_state()
        move = agent.act(state)
        critics = agent.critic if isinstance(settings, DDPGSettings) else agent.critics
        expected = critics(state, move).min(dim=1).values
        assert torch.equal(critic_values(agent, state, move), expected.double())

    def test_value_of_a_distribution_is_its_mean(self):
        agent, state = make_agent(AGENTS[3]), some_state()
        move = agent.act(state)
        chances = agent.critic(state, move).softmax(dim=1)
        by_hand = sum(chances[:, k] * (-3 + k) for k in range(7))
        assert torch.allclose(critic_values(agent, state, move), by_hand.double())

    def test_gate_factors_are_the_policys_or_exactly_one(self):
        state, plain = some_state(), make_agent()
        gated = make_agent(networks=SMALL.model_copy(update={"environment_information": ("log_largest_force",)}))
        assert gate_factors(plain, state).tolist() == [1.0] * 5
        assert lowest_gate_factor(plain) is None
        assert torch.equal(gate_factors(gated, state), gated.policy.gate_factors(state).double())
        assert lowest_gate_factor(gated) == pytest.approx(0.1)


class TestRelaxations:
    def test_returns_and_bonuses_by_hand(self):
        kept, steps = RelaxationsUnderWay(), torch.tensor
        assert kept.fresh(2).tolist() == [0, 1]
        kept.begin(steps([0, 1]), steps([5.0, 6.0]))
        none = kept.add(steps([1.0, 1.0]), steps([0.5, 0.5]), steps([False, False]))
        assert len(none.values) == 0
        assert kept.fresh(2).tolist() == []
        first = kept.add(steps([2.0, 2.0]), steps([0.0, 0.5]), steps([True, False]))
        assert (first.values.tolist(), first.returns.tolist()) == ([5.0], [1 + 0.5 * 2])
        assert first.bonus_discounts.tolist() == [0.5]
        assert kept.fresh(2).tolist() == [0]
        kept.begin(steps([0]), None)
        both = kept.add(steps([7.0, 4.0]), steps([0.0, 0.5]), steps([True, True]))
        assert both.returns.tolist() == [7.0, 1 + 0.5 * 2 + 0.25 * 4]
        assert both.bonus_discounts.tolist() == [0.0, 0.5 + 0.25]
        assert math.isnan(both.values[0])


class TestAverages:
    def test_a_tally_begins_anew(self):
        tally = Tally()
        tally.mean("a", torch.tensor([1.0, 2.0]))
        tally.mean("a", torch.tensor([6.0]))
        tally.mean("nothing", torch.tensor([]))
        tally.total("b", 2.0)
        tally.lowest("c", torch.tensor([3.0, 2.5]))
        assert tally.take() == ({"a": Mean(3.0, 3)}, {"b": 2.0, "c": 2.5})
        assert tally.take() == ({}, {})

    def test_judged_alike_whatever_the_log_interval(self):
        often, seldom = Averages(), Averages()
        for value in (1.0, 3.0):
            seldom.add("x", Mean(value, 40), memory=30)
            for _ in range(10):
                often.add("x", Mean(value, 4), memory=30)
        assert often.now()["x"] == pytest.approx(seldom.now()["x"])
        assert often.before()["x"] == pytest.approx(seldom.before()["x"])
        assert often.before()["x"] < often.now()["x"]  # the slow one still thinks of the first value

    def test_nothing_is_judged_before_one_memory(self):
        averages = Averages()
        averages.add("x", Mean(1.0, 29), memory=30)
        assert averages.now() == {}
        averages.add("x", Mean(1.0, 1), memory=30)
        assert averages.now() == {"x": pytest.approx(1.0)}


HEALTHY: dict[str, float] = {
    "assessed_calls_beside_best": 1.05,
    "entropy_weight": 0.01,
    "entropy_gap": 0.1,
    "blocked_share": 0.02, "share_blocked": 0.05, "share_converged": 0.6, "share_non_finite": 0.0,
    "proposed_move_angstrom": 0.2, "executed_move_angstrom": 0.19, "policy_move_angstrom": 0.1,
    "policy_move_beside_springs": 0.8,
    "q_at_start": 1.2, "return_from_start": 1.0, "squared_return": 1.2, "reward_size": 0.2, "gate_factor": 0.7,
    "lowest_gate_factor": 0.1, "crowded_share": 0.0, "expert_share": 0.1,
    "atoms_per_structure": 8.0, "replay_age_transitions": 5000.0, "replay_forgets": 1.0, "returns_outside_support": 0.0,
    "trained_steps": 1000.0, "assessed_calls_beside_bfgs": 0.8, **{k: float(v) for k, v in vars(FACTS).items()},
}  # fmt: skip

LENGTHS: dict[str, float] = {
    "value_of_half_move": 0.5, "value_of_own_move": 1.0, "value_of_double_move": 0.8, "worth_of_half_move": 0.7,
    "worth_of_own_move": 1.2, "worth_of_double_move": 1.0, "half_move_error": 0.05, "double_move_error": 0.05,
}  # fmt: skip
HEALTHY |= LENGTHS

TROUBLES: list[tuple[str, dict[str, float], str]] = [
    (
        "wrong_way",
        {"value_of_half_move": 1.2},
        "critic ranks lengths of moves wrongly: its values of 0.5, 1 and 2 times the move are 1.2, 1, 0.8; "
        "their worth is 0.7, 1.2, 1; ",
    ),
    (
        "wall",
        {"blocked_share": 0.4, "executed_move_angstrom": 0.01},
        "blocked against a wall: moves of 0.2 Å are asked",
    ),
    ("wall", {"share_blocked": 0.6, "blocked_share": 0.15}, "blocked against a wall"),
    (
        "overestimation",
        {"q_at_start": 4.0},
        "critic overestimates: it predicts 4 at the start of relaxations that return",
    ),
    ("stillness", {"gate_factor": 0.12}, "avoids penalties by not moving: the gate's factor is 0.12"),
    (
        "stillness",
        {"policy_move_angstrom": 0.008, "policy_move_beside_springs": 0.05, "share_converged": 0.3},
        "avoids penalties by not moving: the gate's factor is 0.7 and under a large force the policy moves 0.008 Å",
    ),
    ("non_finite", {"share_non_finite": 0.2}, "the potential fails too often: 20% of the relaxations"),
    ("crowding", {"crowded_share": 0.6}, "atoms stay at the minimum distance: 60% of the steps"),
    (
        "replay_old",
        {"replay_age_transitions": 60_000},
        "replay is too old: sampled transitions are 60000 steps old",
    ),
    ("replay_young", {"replay_age_transitions": 60}, "replay is too young"),
    ("support", {"returns_outside_support": 0.1}, "returns leave the critic's support: 10%"),
    ("worse_than_bfgs", {"assessed_calls_beside_bfgs": 2.5}, "needs more force calls than BFGS: 2.50 times as many"),
    (
        "lost",
        {"assessed_calls_beside_best": 1.3},
        "the policy got worse: it needs 1.30 times the force calls of the best",
    ),
    (
        "entropy_weight",
        {"entropy_weight": 0.2, "entropy_gap": 3.0},
        "SAC's entropy weight runs away: it is 0.2, and the entropy is short of its target by 300%",
    ),
]


def judged(numbers: Mapping[str, float], before: Mapping[str, float] | None = None) -> Alarms:
    alarms = Alarms()
    alarms.judge(1, Seen(numbers, before or HEALTHY))
    return alarms


class TestRules:
    def test_health_raises_nothing(self):
        assert judged(HEALTHY).active == []

    @pytest.mark.parametrize(("name", "change", "words"), TROUBLES, ids=[name for name, _, _ in TROUBLES])
    def test_each_trouble_alone_raises_its_own_alarm(self, name, change, words):
        alarms = judged(HEALTHY | change)
        (event,) = alarms.take_events()
        assert (event.name, event.begins) == (name, True)
        assert event.sentence.startswith(words)
        assert event.sentence.endswith(next(rule.remedy for rule in RULES if rule.name == name))

    def test_every_rule_has_a_trouble(self):
        assert {name for name, _, _ in TROUBLES} == {rule.name for rule in RULES}

    def test_it_says_when_q_rises_and_the_return_does_not(self):
        numbers = HEALTHY | {"q_at_start": 4.0}
        (event,) = judged(numbers, HEALTHY | {"q_at_start": 3.0}).take_events()
        assert "rises while the return does not" in event.sentence
        (event,) = judged(numbers, HEALTHY | {"q_at_start": 5.0}).take_events()
        assert "rises" not in event.sentence

    def test_the_entropy_sac_is_paid_for_is_no_overestimate(self):
        assert judged(HEALTHY | {"q_at_start": 21.0, "entropy_bonus": 20.0}).active == []

    def test_a_critic_that_has_not_learned_yet_is_on_its_way_down(self):
        numbers = HEALTHY | {"q_at_start": -0.2, "return_from_start": -20.0, "squared_return": 400.2}
        assert judged(numbers, HEALTHY | {"q_at_start": 0.1}).active == []
        assert judged(numbers, HEALTHY | {"q_at_start": -5.0}).active == ["overestimation"]

    def test_a_few_early_ends_are_no_wall(self):
        assert judged(HEALTHY | {"share_blocked": 1.0, "blocked_share": 0.05}).active == []

    def test_who_converges_may_move_little(self):
        assert judged(HEALTHY | {"gate_factor": 0.11, "share_converged": 0.9}).active == []

    def test_a_young_policy_may_move_little_and_must_not_stand_still(self):
        young = HEALTHY | {"trained_steps": 100.0}
        assert judged(young | {"policy_move_beside_springs": 0.05}).active == []
        assert judged(young | {"policy_move_beside_springs": 0.01}).active == ["stillness"]

    def test_what_is_unknown_is_not_judged(self):
        assert judged({}).active == []

    def test_a_weight_that_rises_to_its_place_does_not_run_away(self):
        assert judged(HEALTHY | {"entropy_weight": 0.2, "entropy_gap": 0.2}).active == []
        assert judged(HEALTHY | {"entropy_weight": 0.012, "entropy_gap": 3.0}).active == []

    def test_a_replay_that_fills_is_not_too_young(self):
        assert judged(HEALTHY | {"replay_age_transitions": 60, "replay_forgets": 0.0}).active == []

    def test_advice_waits_for_the_training(self):
        assert judged(HEALTHY | {"assessed_calls_beside_bfgs": 2.5, "trained_steps": 100.0}).active == []

    def test_told_once_when_it_begins_and_once_when_it_ends(self, caplog):
        alarms = Alarms()
        with caplog.at_level(logging.INFO, logger="relaxion"):
            for step, share in enumerate((0.0, 0.4, 0.5, 0.25, 0.31, 0.1, 0.25)):  # 0.25: below the limit, not enough
                alarms.judge(step, Seen(HEALTHY | {"blocked_share": share}, HEALTHY))
        assert [(event.step, event.begins) for event in alarms.take_events()] == [(1, True), (5, False)]
        assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
        assert caplog.messages[0].startswith("step 1: blocked against a wall")
        assert caplog.messages[1] == "step 5: resolved: blocked against a wall"

    def test_advice_is_no_warning(self, caplog):
        with caplog.at_level(logging.INFO, logger="relaxion"):
            judged(HEALTHY | {"assessed_calls_beside_bfgs": 2.5})
        assert [record.levelno for record in caplog.records] == [logging.INFO]

    def test_columns_and_headlines(self):
        alarms = judged(HEALTHY | {"crowded_share": 0.9, "assessed_calls_beside_bfgs": 2.5})
        metrics = alarms.scalars()
        assert metrics["diagnosis/alarm_crowding"] == 1.0
        assert metrics["diagnosis/advice_worse_than_bfgs"] == 1.0
        assert sum(metrics.values()) == 2.0
        assert len(metrics) == len(RULES)
        assert standing(metrics) == ["atoms stay at the minimum distance"]


def walked(diagnosis: Diagnosis, agent, steps: int, seed=5):
    """Steps of a real environment, half of them the expert's; what the last one left."""
    world, generator = environment(), torch.Generator().manual_seed(seed)
    state, kept, ring = world.reset(generator), [], replay()
    for _ in range(steps):
        sources = torch.tensor([Source.POLICY, Source.EXPERT, Source.POLICY, Source.EXPERT, Source.POLICY])
        move = Move(0.05 * state.evaluation.forces, torch.zeros_like(state.structures.cells))
        transition = world.step(state, move, sources)
        diagnosis.add(transition, agent)
        ring.add(transition)
        kept.append(transition)
        state = world.renew(transition, generator)
    return state, ring, kept


class TestDiagnosis:
    def test_numbers_by_hand(self):
        diagnosis, agent = Diagnosis(FACTS), make_agent()
        state, ring, kept = walked(diagnosis, agent, 7)
        line = diagnosis.scalars(35, state, agent, ring, {"imitation_weight": 0.25})
        executed = torch.cat([t.executed.largest_displacements(t.state.structures) for t in kept])
        assert line["diagnosis/executed_move_angstrom"] == pytest.approx(float(executed.mean()))
        assert line["diagnosis/expert_share"] == 0.4
        assert line["diagnosis/imitation_weight"] == 0.25
        assert line["diagnosis/gate_factor"] == 1.0
        outcomes = torch.cat([t.outcome for t in kept])
        for outcome in Outcome:
            if outcome:
                assert line[f"diagnosis/outcome_{outcome.name.lower()}"] == int((outcomes == outcome).sum())
        calls = torch.cat([t.next_state.calls[t.finished] for t in kept]).double()
        assert line["diagnosis/force_calls_per_relaxation"] == pytest.approx(float(calls.mean()))
        closest = min(float(closest_pairs(t.next_state.structures).min()) for t in kept)
        assert line["diagnosis/closest_pair_angstrom"] == pytest.approx(closest)
        assert line["diagnosis/replay_age"] == pytest.approx((len(ring) - 1) / 2 / 100)

    def test_q_stands_beside_the_return_of_the_same_relaxations(self):
        diagnosis, agent = Diagnosis(FACTS), make_agent()
        state, ring, kept = walked(diagnosis, agent, 7)
        line = diagnosis.scalars(35, state, agent, ring, {})
        expected, obtained, begun = [], [], {}
        for transition in kept:
            values = critic_values(agent, transition.state, transition.proposed)
            for place in range(5):
                value, rewards = begun.setdefault(place, (float(values[place]), []))
                rewards.append(float(transition.reward[place]))
                if transition.finished[place]:
                    expected.append(value)
                    obtained.append(sum(0.5**k * reward for k, reward in enumerate(rewards)))
                    del begun[place]
        assert len(expected) > 5
        assert line["diagnosis/q_at_start"] == pytest.approx(sum(expected) / len(expected), abs=1e-6)
        assert line["diagnosis/return_from_start"] == pytest.approx(sum(obtained) / len(obtained))

    def test_names_are_those_of_the_table(self):
        diagnosis, agent = Diagnosis(FACTS), make_agent(AGENTS[3])
        state, ring, _ = walked(diagnosis, agent, 7)
        diagnosis.assessed(2.0, 1.5, LENGTHS)
        others = {"imitation_weight": 0.25, "train/entropy": 1.0, "train/ent_coef": 0.1, "train/target_entropy": -6.0}
        line = diagnosis.scalars(35, state, agent, ring, others)
        table = {f"diagnosis/{diagnostic.name}" for diagnostic in DIAGNOSTICS} | {rule.column for rule in RULES}
        assert set(line) == table
        assert all(math.isfinite(value) for value in line.values())
        assert line["diagnosis/assessed_calls_beside_bfgs"] == 2.0

    def test_the_warm_up_is_not_judged(self):
        diagnosis = Diagnosis(FACTS)
        state, ring, kept = walked(diagnosis, None, 7)
        line = diagnosis.scalars(35, state, None, ring, {})
        assert "diagnosis/q_at_start" not in line
        assert diagnosis.trained_steps == 0
        assert diagnosis.averages.now() == {}
        assert line["diagnosis/outcome_step_limit"] == sum(int((t.outcome == Outcome.STEP_LIMIT).sum()) for t in kept)

    @pytest.mark.parametrize("lines_before", [0, 1])
    def test_restored_it_says_the_same_to_the_bit(self, lines_before):
        straight, agent = Diagnosis(FACTS), make_agent()
        state, ring, _ = walked(straight, agent, 6)
        for _ in range(lines_before):
            straight.scalars(30, state, agent, ring, {})
            state, ring, _ = walked(straight, agent, 3, seed=8)
        straight.assessed(9.0, 6.0, {"value_of_half_move": 0.25})
        resumed = Diagnosis(FACTS)
        resumed.restore({name: tensor.clone() for name, tensor in straight.snapshot().items()})
        lines = []
        for diagnosis in (straight, resumed):
            state, ring, _ = walked(diagnosis, agent, 5, seed=9)
            lines.append(diagnosis.scalars(60, state, agent, ring, {}))
        assert lines[0] == lines[1]
        first, second = straight.snapshot(), resumed.snapshot()
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)

    def test_standing_alarms_survive_a_restore(self):
        alarms, resumed = judged(HEALTHY | {"crowded_share": 0.9, "blocked_share": 0.9}), Alarms()
        resumed.restore(alarms.snapshot())
        resumed.judge(2, Seen(HEALTHY | {"crowded_share": 0.9, "blocked_share": 0.9}, HEALTHY))
        assert resumed.active == alarms.active == ["wall", "crowding"]
        assert resumed.take_events() == []

    def test_it_leaves_no_trace_in_what_it_looks_at(self):
        agent = make_agent()
        before = agent.snapshot()
        state, ring, kept = walked(Diagnosis(FACTS), agent, 2)
        place = ring.generator.get_state()
        diagnosis = Diagnosis(FACTS)
        diagnosis.add(kept[0], agent)
        diagnosis.scalars(5, state, agent, ring, {})
        assert all(torch.equal(tensor, before[name]) for name, tensor in agent.snapshot().items())
        assert torch.equal(place, ring.generator.get_state())


def test_only_the_policys_own_steps_are_called_blocked():
    world = environment()
    state = world.reset(torch.Generator().manual_seed(1))
    transition = world.step(state, Move(0.05 * state.evaluation.forces, torch.zeros_like(state.structures.cells)))
    stuck = replace(transition, back_off=torch.ones(5), source=torch.tensor([0, 1, 2, 0, 1]))
    diagnosis = Diagnosis(replace(FACTS, force_tolerance_ev_per_angstrom=1e-4))
    diagnosis.add(stuck, make_agent())
    means, _ = diagnosis.tally.take()
    assert means["blocked_share"] == Mean(1.0, 2)
