"""A stiffness as the policy of an agent's run on atoms: a fit first, then the agent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ase.build import bulk
from ase.calculators.emt import EMT

from relaxion import Relaxer
from relaxion.errors import CheckpointError, RunError, SettingsError
from relaxion.files import Stored
from relaxion.model.atom_policies import StiffnessGaussianPolicy, StiffnessPolicy
from relaxion.model.stiffness import Unknowns, strain_vectors
from relaxion.model.stiffness_network import pulls_of
from relaxion.optimizer.hessian.learned import LearnedHessians
from relaxion.potentials.registry import potential
from relaxion.structures import Move
from relaxion.train.agents import AGENT_SETTINGS
from relaxion.train.data.starts import source_at_hand, structure_source
from relaxion.train.experience.environment import Source
from relaxion.train.runs.loop import train
from relaxion.train.runs.packaging import bundle_from_run, training_command
from relaxion.train.runs.run_folder import RunFolder
from relaxion.train.supervised.fit import Examples, relative_errors
from relaxion.train.tasks.relax import RelaxTrainer
from relaxion.train.tasks.relax_settings import RelaxRunSettings
from relaxion.train.tasks.relax_task import relax_task
from relaxion.train.tasks.settings import find, read_settings, settings_from_recipe

SMALL = {
    "task": "relax",
    "policy": "stiffness",
    "structures": "alloys:Al-Cu-Ni:2-4",
    "n_pooled": 12,
    "held_apart": "seed",
    "steps": 46,
    "n_structures": 4,
    "max_force_calls": 30,
    "channels": 4,
    "n_layers": 1,
    "n_hidden": 4,
    "n_radial": 4,
    "cutoff_angstrom": 3.5,
    "batch_size": 4,
    "warmup_steps": 8,
    "replay_capacity": 400,
    "updates_per_round": 2,
    "assessment_interval_steps": 0,
    "assessment_starts": 4,
    "checkpoint_interval_steps": 1000,
    "fit_updates": 6,
    "examples_per_update": 8,
    "example_relaxations": 6,
    "example_rounds_before": 1,
    "example_interval_updates": 3,
    "example_tolerance_ev_per_angstrom": 2e-3,
    "expert_share": 0.25,
    "expert_steps": 32,
    "imitation_weight": 0.5,
}
SUPPORT = {"lowest_value": -4.0, "highest_value": 4.0, "n_bins": 11}


def settings(agent: str = "td3", **changes: Any) -> RelaxRunSettings:
    support = SUPPORT if agent == "d4pg" else {}
    return RelaxRunSettings.read({**SMALL, **support, "agent": agent, **changes})


def make(agent: str = "td3", **changes: Any) -> RelaxTrainer:
    read = settings(agent, **changes)
    return RelaxTrainer(read, relax_task(read))


def go(trainer: RelaxTrainer, until: int) -> RelaxTrainer:
    while trainer.step < until:
        trainer.advance()
    return trainer


def weights(trainer: RelaxTrainer, part: str) -> dict[str, torch.Tensor]:
    return {name: t for name, t in trainer.agent.snapshot().items() if name.startswith(f"{part}.")}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


class TestSettings:
    def test_one_flat_table_there_and_back(self) -> None:
        read = settings("sac", environment_information=["density"])
        assert read.stiffness is not None
        assert read_settings(read.flat()) == read
        assert 'policy = "stiffness"' in read.as_toml()

    def test_direct_is_the_default_and_not_written_down(self) -> None:
        """So runs from before can be resumed."""
        plain = {key: value for key, value in SMALL.items() if key in type(settings().networks).model_fields}
        read = RelaxRunSettings.read({**plain, "task": "relax", "structures": "b2:AlFe", "policy": "direct"})
        assert read.stiffness is None
        assert "policy" not in read.flat()

    @pytest.mark.parametrize("agent", AGENT_SETTINGS)
    def test_no_name_means_two_things(self, agent: str) -> None:
        parts = RelaxRunSettings.parts({"policy": "stiffness", "agent": agent}).values()
        names = [name for part in parts for name in part.model_fields]
        assert len(names) == len(set(names))

    def test_critics_and_policy_look_equally_far(self) -> None:
        read = settings(channels=6, n_coordinates=2, environment_information=["density"])
        assert (read.policy.channels, read.policy.cutoff_angstrom) == (6, 3.5)
        assert read.stiffness is not None
        assert (read.policy.n_coordinates, read.policy.environment_information) == (2, ("density",))

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"policy": "stifness"}, "did you mean 'stiffness'"),
            ({"fit_update": 3}, "did you mean 'fit_updates'"),
            ({"policy": "direct"}, "unknown setting 'n_hidden'"),
            ({"moves_follow_forces": False}, "has no meaning for .*stiffness"),
        ],
    )
    def test_settings_that_cannot_be(self, changes: dict[str, Any], words: str) -> None:
        with pytest.raises(SettingsError, match=words):
            settings(**changes)

    def test_the_command_names_what_differs_only(self, tmp_path: Path) -> None:
        read = settings_from_recipe(find("emt-metals"), "td3", {"policy": "stiffness", "fit_updates": 100})
        folder = RunFolder(tmp_path)
        assert training_command(read, folder).endswith("--set policy=stiffness --set fit_updates=100")
        folder.origin.write_text("runs/an older one\n")
        assert training_command(read, folder).endswith("fit_updates=100 --from 'runs/an older one'")


class TestFit:
    @pytest.mark.parametrize("agent", AGENT_SETTINGS)
    def test_the_fit_comes_first_and_the_target_follows(self, agent: str) -> None:
        trainer = make(agent)
        kind = StiffnessGaussianPolicy if agent == "sac" else StiffnessPolicy
        assert type(trainer.agent.policy) is kind
        fresh = weights(trainer, "policy")
        go(trainer, 6)
        assert trainer.fit is not None
        assert trainer.fit.done
        assert (len(trainer.replay), trainer.n_updates, trainer.reinforced_steps) == (0, 0, 0)
        assert trainer.force_calls > 40  # counted, though no environment step of the agent was made
        assert not same(fresh, weights(trainer, "policy"))
        if agent != "sac":
            target = {name.removeprefix("target_"): t for name, t in weights(trainer, "target_policy").items()}
            assert same(target, weights(trainer, "policy"))
        go(trainer, 46)
        assert trainer.reinforced_steps == 40
        assert trainer.n_updates == 18
        assert trainer.scalars()["fit/relative_error"] > 0

    def test_no_random_warm_up(self) -> None:
        trainer = make(fit_updates=0)
        trainer.advance()
        sources = trainer.replay.sources[: len(trainer.replay)].tolist()
        assert set(sources) <= {int(Source.POLICY), int(Source.EXPERT)}

    def test_the_critics_learn_alone_at_first(self) -> None:
        trainer = go(make(critic_updates_before=6), 6)
        taught, critics = weights(trainer, "policy"), weights(trainer, "critics")
        while trainer.n_updates < 6:
            trainer.advance()
        assert same(taught, weights(trainer, "policy"))
        assert not same(critics, weights(trainer, "critics"))
        go(trainer, 46)
        assert not same(taught, weights(trainer, "policy"))

    def test_nothing_to_learn_from_is_said(self) -> None:
        with pytest.raises(RunError, match="none of the relaxations came to"):
            make(example_force_calls=2).advance()


class TestMetric:
    def test_a_secant_of_the_stiffness_itself_is_no_error(self) -> None:
        trainer = make()
        policy: Any = trainer.agent.policy
        state = trainer.state
        generator = torch.Generator().manual_seed(0)
        step = 0.05 * torch.randn(state.structures.positions.shape, generator=generator, dtype=torch.float64)
        way = Move(step, torch.zeros_like(state.structures.cells))
        stiffness = policy.network(state).to(torch.float64).detached()
        drop = stiffness.apply(Unknowns(step, strain_vectors(way.strains)))
        secants = Examples(state, way, pulls_of(state) - drop)
        errors = relative_errors(policy.network, secants).detach()
        assert float(errors.max()) < 1e-3  # the network is float32
        twice = Unknowns(2 * drop.atoms, 2 * drop.cells)  # stiffer in truth: the step is twice as long as it should be
        torch.testing.assert_close(
            relative_errors(policy.network, Examples(state, way, pulls_of(state) - twice)).detach(),
            torch.ones(state.n_structures, dtype=torch.float64),
            rtol=1e-3,
            atol=1e-3,
        )

    def test_steps_are_shortened_where_the_stiffness_was_too_soft(self) -> None:
        trainer = make(max_displacement_angstrom=2.0)
        policy: Any = trainer.agent.policy
        state = trainer.state
        last = Move(0.01 * policy.move(state).displacements.double(), torch.zeros_like(state.structures.cells))
        applied = (
            policy.network(state)
            .to(torch.float64)
            .detached()
            .apply(Unknowns(last.displacements, strain_vectors(last.strains)))
        )
        forces = state.evaluation.forces
        for stiffer, factor in ((4.0, 0.25), (0.5, 1.0), (100.0, 0.1)):
            met = replace(state, last_move=last, last_forces=forces + stiffer * applied.atoms)
            expected = factor * policy.move(state).displacements.double()
            torch.testing.assert_close(policy(met).displacements.double(), expected, rtol=1e-3, atol=1e-5)
        plain = make(damped=False)
        policy = plain.agent.policy
        met = replace(state, last_move=last, last_forces=forces + 100 * applied.atoms)
        assert torch.equal(policy(met).displacements, policy(state).displacements)


class TestRuns:
    @pytest.mark.parametrize(("agent", "stop"), [("td3", 4), ("td3", 6), *((agent, 34) for agent in AGENT_SETTINGS)])
    def test_stop_and_resume_is_the_straight_run(self, agent: str, stop: int) -> None:
        """In the fit, just after it, and while the agent learns (R10.1)."""
        straight = go(make(agent), stop)
        resumed = make(agent)
        resumed.restore(Stored(straight.snapshot(), {}))
        one, two = go(straight, 46).snapshot(), go(resumed, 46).snapshot()
        assert one.keys() == two.keys()
        differ = [name for name in one if not torch.equal(one[name].nan_to_num(), two[name].nan_to_num())]
        assert differ == []  # what diagnostics do not know yet is NaN

    def test_another_agent_takes_the_stiffness_over(self) -> None:
        taught = go(make(), 6)
        stored = Stored(taught.weights(), {"settings": taught.settings.flat()})
        for agent, changes in (("sac", {}), ("td3", {"environment_information": ["density"]})):
            other = make(agent, **changes)
            before = weights(other, "critics")
            other.start_from(stored)
            assert same(weights(other, "policy.network"), weights(taught, "policy.network"))
            assert same(weights(other, "critics"), before)
            assert other.step == 0
        target = weights(other, "target_policy.network")
        assert same({k.removeprefix("target_"): t for k, t in target.items()}, weights(taught, "policy.network"))
        alike = make()
        alike.start_from(stored)
        assert same(weights(alike, "critics"), weights(taught, "critics"))

    def test_another_stiffness_is_refused(self) -> None:
        taught = make()
        stored = Stored(taught.weights(), {"settings": taught.settings.flat()})
        with pytest.raises(CheckpointError, match=r"these differ: n_coordinates \(was 4, now 2\)"):
            make("sac", n_coordinates=2).start_from(stored)
        with pytest.raises(CheckpointError, match=r"these differ: softens \(was False, now True\)"):
            make("sac", softens=True).start_from(stored)
        with pytest.raises(CheckpointError, match="has no stiffness model"):
            make("sac").start_from(Stored({}, {"settings": {"task": "relax", "agent": "td3"}}))

    def test_packaged_and_used_by_the_relaxer(self, tmp_path: Path) -> None:
        train(settings(steps=22, assessment_starts=2), tmp_path / "run")
        bundle = bundle_from_run(tmp_path / "run", "taught")
        assert bundle.policy.kind == "stiffness"
        assert bundle.card.agent == "imitation, then td3"
        assert {row.optimizer for row in bundle.card.results} == {"policy", "BFGS", "FIRE"}
        bundle.write(tmp_path / "taught.safetensors")
        atoms = bulk("Cu", cubic=True)
        atoms.rattle(0.1, seed=1)
        atoms.calc = EMT()
        opt = Relaxer(atoms, policy=tmp_path / "taught.safetensors", logfile=None)
        opt.run(fmax=0.05)
        assert isinstance(opt._stepper.safeguard.models.policy, LearnedHessians)
        assert opt.policy_steps > 0


def test_sources_together() -> None:
    source = structure_source("alloys:Al-Cu:2-3 + packings:Al-Cu:4-5")
    images = source(7, torch.Generator().manual_seed(0), potential("emt"))
    assert [len(atoms) <= 3 for atoms in images] == [True] * 4 + [False] * 3
    assert source_at_hand("alloys:Al-Cu:2-3 + packings:Al-Cu:4-5")
    assert not source_at_hand("alloys:Al-Cu:2-3 + file:/no/such/file.xyz")
