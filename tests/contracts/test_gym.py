"""Gymnasium's and Stable-Baselines3's own checks of our environments."""

from __future__ import annotations

import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

import relaxion.train.gym
from relaxion.errors import StructureError
from relaxion.train.data.alloys import fcc_alloys
from relaxion.train.data.perturbations import perturbation
from relaxion.train.data.starts import PerturbedStarts
from relaxion.train.experience.environment import EnvironmentSettings

NAMES = list(relaxion.train.gym.ENVIRONMENTS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n_atoms", [4, (2, 6)])
def test_gymnasium_accepts_it(name: str, n_atoms: int | tuple[int, ...]) -> None:
    """Warnings are errors here, as everywhere in the tests."""
    environment = gymnasium.make(name, n_atoms=n_atoms)
    check_env(environment.unwrapped)


def test_stable_baselines_accepts_it() -> None:
    from stable_baselines3.common.env_checker import check_env as check_for_stable_baselines

    check_for_stable_baselines(gymnasium.make("relaxion/RelaxPadded-v0", n_atoms=(2, 4)).unwrapped)


def test_stable_baselines_learns_on_it() -> None:
    from stable_baselines3 import SAC

    torch.manual_seed(0)
    environment = gymnasium.make("relaxion/RelaxPadded-v0", n_atoms=2, elements=["Cu"])
    agent = SAC("MlpPolicy", environment, learning_starts=50, batch_size=32, seed=0, device="cpu")
    before = [parameter.detach().clone() for parameter in agent.policy.actor.parameters()]
    agent.learn(250)
    after = list(agent.policy.actor.parameters())
    assert agent.num_timesteps == 250
    assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert all(torch.isfinite(parameter).all() for parameter in after)


def episode(name: str, seed: int, steps: int = 8) -> list[float]:
    environment = gymnasium.make(name, n_atoms=4)
    _, info = environment.reset(seed=seed)
    numbers = [info["energy_ev"]]
    rng = np.random.default_rng(1)
    for _ in range(steps):
        shape = environment.action_space.shape
        _, reward, terminated, truncated, info = environment.step(rng.uniform(-0.1, 0.1, shape).astype(np.float32))
        numbers += [float(reward), info["energy_ev"], info["largest_force_ev_per_angstrom"]]
        if terminated or truncated:
            _, info = environment.reset()
    return numbers


@pytest.mark.parametrize("name", NAMES)
def test_seed_decides_everything(name: str) -> None:
    assert episode(name, 3) == episode(name, 3)
    assert episode(name, 3) != episode(name, 4)


def test_both_views_show_the_same_world() -> None:
    assert episode("relaxion/Relax-v0", 5) == episode("relaxion/RelaxPadded-v0", 5)


def test_second_reset_without_seed_goes_on() -> None:
    environment = gymnasium.make("relaxion/RelaxPadded-v0")
    first, _ = environment.reset(seed=1)
    second, _ = environment.reset()
    again, _ = environment.reset(seed=1)
    assert not np.array_equal(first, second)
    assert np.array_equal(first, again)


def test_steepest_descent_terminates_and_says_why() -> None:
    environment = gymnasium.make("relaxion/Relax-v0", n_atoms=4)
    graph, info = environment.reset(seed=0)
    assert info["outcome"] == "running"
    terminated = truncated = False
    steps = 0
    while not (terminated or truncated):
        forces = graph.nodes[:, 5:8]
        graph, _, terminated, truncated, info = environment.step((0.02 * forces / 0.5).clip(-1, 1))
        steps += 1
    assert terminated
    assert info["outcome"] == "converged"
    assert info["force_calls"] == steps + 1
    assert info["largest_force_ev_per_angstrom"] <= 0.05


def test_step_limit_truncates() -> None:
    environment = gymnasium.make("relaxion/RelaxPadded-v0", settings=EnvironmentSettings(max_force_calls=3))
    environment.reset(seed=0)
    small = np.full(environment.action_space.shape, 0.001, np.float32)
    small[0] = 0.002
    assert environment.step(small)[2:4] == (False, False)
    _, _, terminated, truncated, info = environment.step(small)
    assert (terminated, truncated, info["outcome"]) == (False, True, "step limit")


def test_graph_shows_pairs_within_the_cutoff() -> None:
    graph, _ = gymnasium.make("relaxion/Relax-v0", n_atoms=4).reset(seed=0)
    lengths = np.linalg.norm(graph.edges, axis=1)
    assert 2.0 < lengths.min() < lengths.max() <= 5.0
    assert graph.edge_links.shape == (len(graph.edges), 2)
    assert np.abs(graph.nodes[:, 2:5].mean(axis=0)).max() < 1e-5


def test_padding_is_zero_and_its_actions_do_nothing() -> None:
    environment = gymnasium.make("relaxion/RelaxPadded-v0", n_atoms=2, max_atoms=5)
    observation, _ = environment.reset(seed=0)
    rows = observation.reshape(5, 12)
    assert rows[:, 0].tolist() == [1, 1, 0, 0, 0]
    assert not rows[2:].any()
    action = np.zeros(15, np.float32)
    action[:3] = 0.1
    one = environment.step(action)[0]
    environment.reset(seed=0)
    action[6:] = 1.0
    np.testing.assert_array_equal(environment.step(action)[0], one)


def test_too_large_a_start_is_explained() -> None:
    pool = fcc_alloys(["Cu"], 1, torch.Generator().manual_seed(0), n_atoms=6)
    starts = PerturbedStarts(pool, [perturbation("rattle:0.2")])
    environment = gymnasium.make("relaxion/RelaxPadded-v0", starts=starts, max_atoms=4)
    with pytest.raises(StructureError, match="6 atoms, more than max_atoms=4"):
        environment.reset(seed=0)


def batch(name: str, number: int = 5, **options) -> gymnasium.vector.VectorEnv:
    return gymnasium.make_vec(name, num_envs=number, vectorization_mode="vector_entry_point", n_atoms=(2, 5), **options)


@pytest.mark.parametrize(("name", "options"), [(NAMES[0], {}), (NAMES[1], {}), (NAMES[1], {"n_neighbors": 12})])
def test_a_batch_shows_what_single_ones_show(name: str, options: dict) -> None:
    many = batch(name, **options)
    seen, _ = many.reset(seed=2)
    assert many.observation_space.contains(seen)
    world, state = many.unwrapped.world, many.unwrapped.state
    for place in range(5):
        for one, other in zip(world.view(state.select(torch.tensor([place])))[0], seen[place], strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_batch_begins_anew_where_a_relaxation_ended() -> None:
    many = batch("relaxion/RelaxPadded-v0", settings=EnvironmentSettings(max_force_calls=3))
    many.reset(seed=0)
    still = np.full(many.action_space.shape, 0.001, np.float32)
    still[:, 0] = 0.002
    _, _, _, truncated, infos = many.step(still)
    assert not truncated.any()
    assert infos["force_calls"].tolist() == [2] * 5
    seen, _, terminated, truncated, infos = many.step(still)
    assert truncated.all()
    assert not terminated.any()
    assert infos["final_info"]["outcome"].tolist() == ["step limit"] * 5
    assert many.single_observation_space.contains(infos["final_obs"][4])
    assert not np.array_equal(infos["final_obs"][4], seen[4])
    assert many.step(still)[4]["force_calls"].tolist() == [2] * 5


def test_a_free_cell_takes_a_strain() -> None:
    environment = gymnasium.make("relaxion/RelaxPadded-v0", n_atoms=2, cell_free=True, n_neighbors=4)
    environment.reset(seed=0)
    before = environment.unwrapped.state.structures.volumes
    action = np.zeros(environment.action_space.shape, np.float32)
    action[-6] = 0.5
    assert len(action) == 12
    environment.step(action)
    assert float(environment.unwrapped.state.structures.volumes / before) == pytest.approx(1.05)


def test_the_world_of_a_recipe() -> None:
    training, held_apart = (
        gymnasium.make("relaxion/RelaxPadded-v0", recipe="alfe-quick", side=side, n_neighbors=12)
        for side in ("training", "held_apart")
    )
    first, info = training.reset(seed=0)
    assert info["largest_force_ev_per_angstrom"] > 0.01
    assert len(first) == 2 * (15 + 4 * 12) + 9
    assert not np.array_equal(first, held_apart.reset(seed=1)[0])


@pytest.mark.parametrize("name", ["sb3_td3", "cleanrl_td3", "torchrl_td3"])
def test_agents_of_others_learn_on_it(name: str) -> None:
    """The same scripts with more steps need fewer calls than BFGS (docs/tutorials/bring-an-agent.md)."""
    if name == "torchrl_td3" and find_spec("torchrl") is None:  # importing it here would change this process
        pytest.skip("torchrl is not installed")
    script = Path(__file__).resolve().parents[2] / "examples" / "agents" / f"{name}.py"
    words = [sys.executable, str(script), "--steps", "1200", *(["--starts", "4"] if "sb3" in name else [])]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "force calls after 1200 steps" in done.stdout, done.stderr


def run_fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_module_form_in_a_fresh_interpreter() -> None:
    made = run_fresh("import gymnasium; print(gymnasium.make('relaxion.train.gym:relaxion/Relax-v0').spec.id)")
    assert made.strip() == "relaxion/Relax-v0"


def test_registering_twice_is_harmless() -> None:
    run_fresh("import relaxion.train.gym as g; g.register_environments(); g.register_environments()")


def test_registration_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        relaxion.train.gym.register_environments()
