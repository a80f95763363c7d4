"""Training on structures: who proposes, what is stored, what the loss sees, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ase import Atoms
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.io import write
from ase.optimize import BFGS

from relaxion.errors import FileError, InputError, MissingElementError, RelaxionWarning, SettingsError, StructureError
from relaxion.files import digest
from relaxion.potentials.registry import potential
from relaxion.structures import Move, State, Structures
from relaxion.train.agents import AGENT_SETTINGS
from relaxion.train.data.dataset import composition
from relaxion.train.experience.environment import EnvironmentSettings, Source
from relaxion.train.experience.vectors import Batch
from relaxion.train.runs.loop import make_trainer, train
from relaxion.train.tasks.relax import PolicyPenalties, RelaxTrainer, deviation, imitation
from relaxion.train.tasks.relax_settings import RelaxRunSettings, reward_weights
from relaxion.train.tasks.relax_task import Expert, relax_task
from relaxion.train.tasks.settings import read_settings

SMALL = {
    "task": "relax",
    "structures": "alloys:Al-Cu-Ni:2-4",
    "n_pooled": 40,
    "steps": 64,
    "n_structures": 8,
    "max_force_calls": 30,
    "channels": 4,
    "n_layers": 1,
    "cutoff_angstrom": 3.5,
    "batch_size": 8,
    "warmup_steps": 24,
    "replay_capacity": 400,
    "updates_per_round": 2,
    "log_interval_steps": 16,
    "assessment_interval_steps": 32,
    "assessment_starts": 4,
    "checkpoint_interval_steps": 32,
}


def settings(agent: str = "td3", **changes: Any) -> RelaxRunSettings:
    return RelaxRunSettings.read({**SMALL, "agent": agent, **changes})


def make(agent: str = "td3", **changes: Any) -> RelaxTrainer:
    read = settings(agent, **changes)
    return RelaxTrainer(read, relax_task(read))


OWN = """
from pydantic import Field
from relaxion.train.agents import AgentKind, TD3Settings
from relaxion.train.agents.td3 import TD3

class PatientSettings(TD3Settings):
    policy_delay: int = Field(default=5, ge=1)

PATIENT = AgentKind(TD3, PatientSettings, draws=True)

def calls(progress):
    return -2 * (progress.force_after > 0).double()
"""


class TestSettings:
    def test_one_flat_table_there_and_back(self) -> None:
        read = settings("sac", environment_information=["density"], reward="step:0.5+energy:2")
        assert read_settings(read.flat()) == read
        assert 'reward = "step:0.5+energy:2"' in read.as_toml()

    @pytest.mark.parametrize("agent", AGENT_SETTINGS)
    def test_no_name_means_two_things(self, agent: str) -> None:
        parts = RelaxRunSettings.parts({"agent": agent}).values()
        names = [name for part in parts for name in part.model_fields]
        assert len(names) == len(set(names))
        assert "agent" not in names

    def test_alternatives_are_written_down_as_what_was_taken(self, tmp_path: Path) -> None:
        read = settings(
            potential=f"eam:{tmp_path}/no.fs | emt", structures=f"file:{tmp_path}/no.xyz | alloys:Al-Cu:2-3"
        )
        assert (read.atoms.potential, read.atoms.structures) == ("emt", "alloys:Al-Cu:2-3")
        assert 'potential = "emt"' in read.as_toml()

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"strucures": "b2:AlFe"}, "did you mean 'structures'"),
            ({"n_environments": 3}, "unknown setting 'n_environments'"),
            ({"replay_capacity": 6}, "replay_capacity 6 is below batch_size 8"),
            ({"replay_capacity": 24, "n_structures": 32}, "replay_capacity 24 is below n_structures 32"),
            ({"reward": "lock_force"}, "unknown reward 'lock_force': did you mean 'log_force'"),
            ({"reward": "step:much"}, "write step:NUMBER, got 'much'"),
            ({"imitation_weight": 1.0}, "needs an expert to imitate"),
            ({"fewest_atoms": 9, "most_atoms": 3}, "fewest_atoms 9 is above most_atoms 3"),
            ({"environment_information": ["densty"]}, "did you mean 'density'"),
            ({"perturbation": "ratle:0.1"}, "did you mean 'rattle'"),
            ({"held_apart": "composition"}, "for example composition:0.2"),
        ],
    )
    def test_settings_that_cannot_be(self, changes: dict[str, Any], words: str) -> None:
        with pytest.raises(SettingsError, match=words):
            make(**changes)

    def test_rewards_in_words(self) -> None:
        assert reward_weights("log_force_decrease + step:0.25") == {"log_force_decrease": 1.0, "step": 0.25}

    def test_a_reward_and_an_agent_of_the_users_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "my_learning.py").write_text(OWN)
        monkeypatch.chdir(tmp_path)
        chosen = settings("my_learning:PATIENT", reward="my_learning:calls:0.5+step:1")
        assert read_settings(chosen.flat()) == chosen
        trainer = RelaxTrainer(chosen, relax_task(chosen))
        while trainer.n_updates == 0:
            trainer.advance()
        assert type(trainer.agent.settings).__name__ == "PatientSettings"  # type: ignore[attr-defined]
        assert trainer.agent.settings.policy_delay == 5  # type: ignore[attr-defined]
        rewards = trainer.replay.rewards[: len(trainer.replay)] + 0.5 * trainer.replay.back_offs[: len(trainer.replay)]
        assert torch.allclose(rewards, torch.full_like(rewards, -2.0))

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"agent": "my_learning:NOBODY"}, "the agent 'my_learning:NOBODY' cannot be loaded"),
            ({"agent": "math:pi"}, "the agent 'math:pi' is a float"),
            ({"agent": "td3", "reward": "math:pi:2"}, "the reward 'math:pi' is a float"),
        ],
    )
    def test_names_that_are_no_own_ones(self, changes: dict[str, Any], words: str) -> None:
        with pytest.raises(SettingsError, match=words):
            settings(**changes)


class TestBadInput:
    def test_a_structure_the_potential_lacks(self) -> None:
        with pytest.raises(MissingElementError, match=r"alloys:Al-Fe:2-4.*no parameters for Fe; "):
            make(structures="alloys:Al-Fe:2-4")

    def test_nothing_left_after_filtering(self) -> None:
        with pytest.raises(SettingsError, match=r"left for training: .* has 40, none with 50 to 60 atoms"):
            make(fewest_atoms=50, most_atoms=60)

    def test_nothing_left_to_hold_apart(self, tmp_path: Path) -> None:
        write(tmp_path / "one.extxyz", bulk("Cu", cubic=True))
        with pytest.raises(SettingsError, match="no structure is left for"):
            make(structures=f"file:{tmp_path}/one.extxyz")

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(FileError, match="does not exist"):
            make(structures=f"file:{tmp_path}/nothing.extxyz")

    def test_forces_beyond_all_reason_at_the_start(self, tmp_path: Path) -> None:
        crushed = Atoms("Cu2", [[0, 0, 0], [0.15, 0, 0]], cell=[9, 9, 9], pbc=True)
        write(tmp_path / "crushed.extxyz", crushed)
        with pytest.raises(StructureError, match=r"not finite or above\s10000"):
            make(
                structures=f"file:{tmp_path}/crushed.extxyz",
                potential="lj",
                held_apart="starts",
                perturbation="rattle:0.001",
            )

    def test_starts_that_are_relaxed_already(self) -> None:
        with pytest.raises(StructureError, match="perturb the former more"):
            make(structures="alloys:Cu:4", held_apart="starts", perturbation="rattle:0")

    def test_a_replay_out_of_proportion_is_worth_a_word(self) -> None:
        with pytest.warns(RelaxionWarning, match="a replay of 90000 transitions is large for systems of"):
            make(replay_capacity=90_000)

    def test_nothing_is_written_when_the_task_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InputError):
            train(settings(fewest_atoms=50), tmp_path / "run")
        assert not (tmp_path / "run").exists()


class TestCollecting:
    def test_warm_up_is_random_and_updates_nothing(self) -> None:
        trainer = make()
        before = trainer.weights()
        while len(trainer.replay) < 24:
            trainer.advance()
        assert trainer.n_updates == 2  # of the round that ended the warm-up
        assert set(trainer.replay.sources[:24].tolist()) == {Source.RANDOM}
        trainer.advance()
        assert set(trainer.replay.sources[24:32].tolist()) == {Source.POLICY}
        after = trainer.weights()
        assert any(not torch.equal(after[name], before[name]) for name in before if "policy" in name)

    def test_steps_and_force_calls_are_counted(self) -> None:
        trainer = make()
        for _ in range(6):
            trainer.advance()
        metrics = trainer.scalars()
        assert metrics["time/total_timesteps"] == 48
        # every step costs a call, every new relaxation its first
        assert metrics["time/force_calls"] == trainer.task.potential.calls
        assert metrics["time/force_calls"] >= 48 + 8 + metrics["time/episodes"]

    def test_expert_transitions_join_their_own_states(self) -> None:
        """What replay holds is the step that the expert proposes in the stored state, and where it led (R8.2)."""
        trainer = make(expert_share=0.5, expert_steps=10**6)
        for _ in range(8):
            trainer.advance()
        taught = (trainer.replay.sources[: len(trainer.replay)] == Source.EXPERT).nonzero().flatten()
        assert 12 < len(taught) < 52
        batch = trainer.replay.assemble(taught)
        again = Expert()(batch.observations)
        assert torch.allclose(batch.actions.displacements, again.displacements, atol=1e-4)  # float32 in replay
        led_to = trainer.environment.step(_double(batch.observations), batch.actions).next_state
        assert torch.allclose(
            led_to.structures.positions.float(), batch.next_observations.structures.positions, atol=1e-4
        )

    def test_share_and_imitation_fade_by_schedule(self) -> None:
        trainer = make(expert_share=0.8, imitation_weight=2.0, expert_steps=64, steps=128)
        lines = []
        for _ in range(12):
            trainer.advance()
            lines.append(trainer.scalars())
        early, late = lines[:3], lines[9:]
        assert sum(line["diagnosis/expert_share"] for line in early) / 3 > 0.4
        assert all(line["diagnosis/expert_share"] == 0 for line in late)
        assert lines[3]["diagnosis/imitation_weight"] == 1.0
        assert trainer.penalties.imitation_weight == 0.0

    def test_no_edges_and_no_nan_are_stored(self) -> None:
        trainer = make()
        for _ in range(5):
            trainer.advance()
        batch = trainer.replay.sample(8)
        assert batch.observations.graph is None
        assert torch.isfinite(trainer.replay.store.atoms).all()


def _double(state: State) -> State:
    structures = state.structures.to(torch.float64)
    evaluation = replace(
        state.evaluation,
        energies=state.evaluation.energies.double(),
        forces=state.evaluation.forces.double(),
        stresses=None,
    )
    return replace(
        state,
        structures=structures,
        evaluation=evaluation,
        last_move=state.last_move.to(torch.float64),
        last_forces=state.last_forces.double(),
        trust_radii=state.trust_radii.double(),
    )


def near_pair(gap: float = 1.0) -> State:
    """Two coppers nearly touching the minimum distance, and two far apart."""
    pairs = [Atoms("Cu2", [[0, 0, 0], [d, 0, 0]], cell=[9, 9, 9], pbc=True) for d in (gap, 3.0)]
    structures = Structures.from_ase(pairs)
    zero = Move.zero(structures)
    return State(
        structures=structures,
        evaluation=potential("emt")(structures),
        graph=None,
        last_move=zero,
        last_forces=torch.zeros_like(zero.displacements),
        trust_radii=torch.full((2,), 0.3, dtype=torch.float64),
        calls=torch.ones(2, dtype=torch.int64),
    )


class TestPenalties:
    WORLD = EnvironmentSettings(minimum_distance_angstrom=0.8, max_displacement_angstrom=0.5)

    def test_deviation_by_hand(self) -> None:
        """The first pair may come 0.2 Å nearer and is asked for 0.4: half is undone. The second is free."""
        state = near_pair()
        displacements = torch.zeros(4, 3, dtype=torch.float64)
        displacements[1, 0] = displacements[3, 0] = -0.4
        displacements.requires_grad_()
        found = deviation(state, Move(displacements, torch.zeros(2, 3, 3, dtype=torch.float64)), self.WORLD)
        assert found.tolist() == pytest.approx([0.2**2 / 2, 0.0])
        (gradient,) = torch.autograd.grad(found.sum(), displacements)
        assert gradient[1].tolist() == pytest.approx([2 * -0.2 / 2, 0, 0])  # away from the wall
        assert not gradient[3].any()

    def test_imitation_only_where_the_expert_was_and_relative_to_its_step(self) -> None:
        state = near_pair()
        shown = Move(torch.full((4, 3), 0.1, dtype=torch.float64), torch.zeros(2, 3, 3, dtype=torch.float64))
        half = Move(shown.displacements / 2, shown.strains)
        sources = torch.tensor([int(Source.EXPERT), int(Source.POLICY)])
        nothing = torch.zeros(2, dtype=torch.float64)
        batch = Batch(state, shown, nothing, nothing, state, sources)
        assert imitation(batch, half).tolist() == pytest.approx([0.25, 0.0], abs=1e-4)
        assert imitation(replace(batch, sources=None), half).tolist() == [0.0, 0.0]

    def test_weights(self) -> None:
        state = near_pair()
        shown = Move(torch.zeros(4, 3, dtype=torch.float64), torch.zeros(2, 3, 3, dtype=torch.float64))
        pushed = Move(shown.displacements.clone(), shown.strains)
        pushed.displacements[1, 0] = -0.4
        nothing = torch.zeros(2, dtype=torch.float64)
        batch = Batch(state, shown, nothing, nothing, state, torch.full((2,), int(Source.EXPERT)))
        penalties = PolicyPenalties(3.0, self.WORLD)
        assert penalties(batch, pushed).tolist() == pytest.approx([3 * 0.02, 0.0])
        assert PolicyPenalties(0.0, self.WORLD)(batch, pushed).tolist() == [0.0, 0.0]

    @pytest.mark.parametrize("agent", AGENT_SETTINGS)
    def test_every_agent_turns_away_from_a_wall_without_asking_the_potential(self, agent: str) -> None:
        """With λ alone in charge (no reward to speak of) what the corrector undoes falls (R7.3, R1.4)."""
        support = {"lowest_value": -3.0, "highest_value": 3.0} if agent == "d4pg" else {}
        trainer = make(
            agent,
            minimum_distance_angstrom=2.4,
            deviation_penalty_per_angstrom2=1e4,
            reward="step:0",
            policy_learning_rate=3e-3,
            moves_follow_forces=False,
            **support,
        )
        trainer.environment.reward.back_off_cost = 0.0
        while len(trainer.replay) < 40:
            trainer._collect()
        batch, calls = trainer._sampled(), trainer.task.potential.calls

        def undone() -> float:
            move = trainer.agent.act(batch.observations)
            return float(deviation(batch.observations, move, trainer.settings.environment).mean())

        before = undone()
        for _ in range(60):
            trainer.agent.update(batch)
        assert trainer.task.potential.calls == calls
        assert before > 1e-5
        assert undone() < 0.5 * before


class TestAssessment:
    def test_held_apart_structures_are_never_trained_on(self) -> None:
        trainer = make()
        pools = trainer.task.pools
        ratios = [{composition(atoms) for atoms in pool.to_ase()} for pool in pools.values()]
        assert not ratios[0] & ratios[2]
        assert not ratios[1] & ratios[2]

    def test_force_calls_of_failures_are_the_cap(self) -> None:
        trainer = make(max_force_calls=3)  # nobody relaxes in two steps of an untrained policy
        found = trainer.assess()
        assert set(found.force_calls.tolist()) == {3}
        assert found.success_rate == 0.0
        assert {one.outcome for one in found.relaxed} == {"step_limit"}

    def test_counting_of_a_whole_relaxation(self) -> None:
        """With the expert in place of the policy: force calls are evaluations, one by one."""
        trainer = make()
        starts = trainer.assessor.starts
        before = trainer.task.potential.calls
        found = trainer.assessor(trainer.task.following(Expert()))
        assert found.success_rate == 1.0
        assert int(found.force_calls.sum()) == trainer.task.potential.calls - before
        assert found.force_calls.tolist() == [(one.length or 0) + 1 for one in found.relaxed]
        assert trainer.assessor.starts is starts

    def test_bfgs_is_counted_as_ase_counts(self) -> None:
        trainer = make()
        (starts,) = (group.structures for group in trainer.assessor.starts)
        counted = trainer.assessor.measure("BFGS")
        for atoms, calls in zip(starts.to_ase(), counted.force_calls, strict=True):
            atoms.calc = EMT()
            with BFGS(atoms, logfile=None) as optimizer:  # pyright: ignore
                converged = optimizer.run(fmax=0.05, steps=29)
            assert calls == (optimizer.nsteps + 1 if converged else 30)

    def test_what_a_run_leaves(self, tmp_path: Path) -> None:
        result = train(settings(), tmp_path / "run")
        written = json.loads((tmp_path / "run" / "result.json").read_text())
        assert written["final_force_calls_mean"] == result.final_force_calls_mean  # pyright: ignore
        assert {
            "final_force_calls_median",
            "final_success_rate",
            "force_calls_bfgs",
            "force_calls_fire",
        } <= written.keys()
        assert (written["potential"], written["structures"]) == ("emt", "alloys:Al-Cu-Ni:2-4")
        kept = json.loads((tmp_path / "run" / "baselines.json").read_text())
        assert kept["BFGS"]["mean_force_calls"] == written["force_calls_bfgs"]
        lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        assessed = [line for line in lines if "eval/force_calls_mean" in line]
        assert [line["time/total_timesteps"] for line in assessed] == [0, 32, 64]
        assert all(line["eval/force_calls_bfgs"] == written["force_calls_bfgs"] for line in assessed)
        assert assessed[0]["eval/force_calls_fire"] > assessed[0]["eval/force_calls_bfgs"]

    def test_old_weights_begin_a_new_run(self, tmp_path: Path) -> None:
        train(settings(), tmp_path / "old")
        result = train(settings(seed=1, steps=8), tmp_path / "new", from_weights=tmp_path / "old")
        assert result.steps == 8
        old, new = (make_trainer(settings(seed=s)) for s in (0, 1))
        assert isinstance(old, RelaxTrainer)
        assert digest(old.weights()) != digest(new.weights())


class TestLearningRates:
    def test_they_fall_with_the_environment_steps(self) -> None:
        """To a share of each agent's own rates; the entropy weight keeps its own."""
        trainer = make("sac", learning_rate_final_share=0.1, learning_rate_steps=40, policy_learning_rate=1e-3)
        agent: Any = trainer.agent
        while trainer.n_updates == 0:
            trainer.advance()
        share = 1 - 0.9 * trainer.step / 40
        assert agent.policy_optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * share)
        assert agent.critic_optimizer.param_groups[0]["lr"] == pytest.approx(3e-4 * share)
        assert agent.entropy_optimizer.param_groups[0]["lr"] == 3e-4
        while trainer.step < 48:
            trainer.advance()
        assert agent.policy_optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)

    def test_they_stay_by_default(self) -> None:
        trainer = make()
        while trainer.step < 48:
            trainer.advance()
        assert trainer.agent.policy_optimizer.param_groups[0]["lr"] == 1e-3


def test_replay_suits_the_structures_unless_asked_for(recwarn: pytest.WarningsRecorder) -> None:
    """R8.1: 5 000 transitions for about 4 atoms."""
    values = {name: value for name, value in SMALL.items() if name != "replay_capacity"}
    task = relax_task(RelaxRunSettings.read({**values, "agent": "td3"}))
    assert task.mean_atoms < 4
    assert task.replay_capacity == 5_000
    large = relax_task(
        RelaxRunSettings.read({**values, "agent": "td3", "structures": "alloys:Al-Cu-Ni:8-8", "held_apart": "seed"})
    )
    assert large.replay_capacity == 10_000
    assert relax_task(settings()).replay_capacity == 400
    assert not [warning for warning in recwarn if "replay" in str(warning.message)]


def test_length_noise_makes_whole_moves_longer_or_shorter() -> None:
    """One factor per structure, and nothing is drawn where there is no such noise: older runs stay as they were."""
    plain, noisy = make(), make(exploration_length_noise=0.5)
    state = noisy.state
    move = Move(torch.full_like(state.structures.positions, 0.01), torch.zeros(state.n_structures, 3, 3))
    before = plain.generators["exploration"].get_state()
    assert plain.collector._lengthened(move, plain.state) is move
    assert torch.equal(plain.generators["exploration"].get_state(), before)
    factors = noisy.collector._lengthened(move, state).displacements[:, 0] / 0.01  # (n_atoms,)
    per_structure = [factors[state.structures.structure_index == number] for number in range(state.n_structures)]
    assert all(torch.allclose(each, each[0].expand_as(each)) for each in per_structure)
    firsts = torch.stack([each[0] for each in per_structure])
    assert bool((firsts > 1).any())
    assert bool((firsts < 1).any())
    far = noisy.collector._lengthened(Move(100 * move.displacements, move.strains), state)
    assert float(far.displacements.norm(dim=1).max()) <= noisy.settings.environment.max_displacement_angstrom + 1e-9
