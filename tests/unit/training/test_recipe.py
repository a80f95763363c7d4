"""Recipes: found, read, overridden, refused."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest

from relaxion.errors import FileError, SettingsError
from relaxion.settings import SETTINGS_PAGE, assigned
from relaxion.train.agents import AGENT_SETTINGS
from relaxion.train.agents.vector_networks import VectorNetworkSettings
from relaxion.train.tasks.settings import (
    SHIPPED,
    TrainingSettings,
    find,
    read_settings,
    read_toml,
    run_folder,
    settings_from_recipe,
)

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools"))

from documentation.pieces import filled  # noqa: E402  a script beside the package, not part of it

RECIPE = """
task = "Pendulum-v1"
default_agent = "sac"
batch_size = 64
[agent.td3]
batch_size = 32
target_noise = 0.3
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "own.toml"
    path.write_text(RECIPE)
    return path


def test_sections_go_over_the_common_part_and_overrides_over_both(recipe: Path) -> None:
    assert settings_from_recipe(recipe, None, {}).agent_name == "sac"
    assert settings_from_recipe(recipe, "sac", {}).training.batch_size == 64
    td3 = settings_from_recipe(recipe, "TD3", {"seed": 3, "policy_delay": 4, "widths": [8]})
    assert (td3.training.batch_size, td3.training.seed, td3.networks.widths) == (32, 3, (8,))
    assert td3.agent.model_dump()["target_noise"] == 0.3
    assert td3.agent.model_dump()["policy_delay"] == 4


def test_the_written_settings_are_a_recipe_again(recipe: Path) -> None:
    for agent in AGENT_SETTINGS:
        settings = settings_from_recipe(recipe, agent, {"steps": 77})
        recipe.with_name("settings.toml").write_text(settings.as_toml())
        assert settings_from_recipe(find(str(recipe.parent)), None, {}) == settings


def test_settings_of_one_agent_are_no_recipe_for_another(recipe: Path) -> None:
    again = recipe.with_name("settings.toml")
    again.write_text(settings_from_recipe(recipe, "td3", {}).as_toml())
    with pytest.raises(SettingsError, match="holds settings for td3, not for sac"):
        settings_from_recipe(again, "sac", {})


@pytest.mark.parametrize("agent", AGENT_SETTINGS)
def test_shipped_recipes_are_valid(agent: str) -> None:
    assert {file.stem for file in SHIPPED.glob("*.toml")} >= {"pendulum", "half-cheetah"}
    for file in SHIPPED.glob("*.toml"):
        if "kinds" not in read_toml(file):  # those are named by others
            assert settings_from_recipe(find(file.stem), agent, {}).agent_name == agent


def test_a_recipe_of_kinds_is_not_one_for_training() -> None:
    with pytest.raises(SettingsError, match="lists kinds of starts"):
        settings_from_recipe(find("universal-data"), None, {})


def test_no_name_means_two_things() -> None:
    for kind in AGENT_SETTINGS.values():
        names = [name for part in (TrainingSettings, kind, VectorNetworkSettings) for name in part.model_fields]
        assert len(names) == len(set(names))
        assert "agent" not in names


def test_words_of_the_command_line() -> None:
    words = ["a=3", "b=1e-3", "c=[64, 64]", "d=true", "e=Pendulum-v1", 'f="x=y"']
    assert assigned(words) == {"a": 3, "b": 1e-3, "c": [64, 64], "d": True, "e": "Pendulum-v1", "f": "x=y"}
    with pytest.raises(SettingsError, match="takes key=value, got 'oops'"):
        assigned(["oops"])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"batchsize": 3}, "unknown setting 'batchsize' for sac: did you mean 'batch_size'"),
        ({"policy_delay": 3}, "unknown setting 'policy_delay' for sac"),
        ({"agent": "sacc"}, "no agent named 'sacc': did you mean 'sac'"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"batch_size": 2000}, "warmup_steps 1000 is below batch_size 2000"),
        ({"replay_capacity": 100}, "replay_capacity 100 is below batch_size 128"),
        ({"replay_capacity": 500}, "replay_capacity 500 is below warmup_steps 1000"),
        ({"n_environments": 3}, "must be a multiple of n_environments 3"),
        ({"exploration_noise_final": 0.1}, "no meaning for sac"),
    ],
)
def test_settings_that_cannot_be(values: dict[str, object], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        read_settings({"agent": "sac", "task": "Pendulum-v1"} | values)


def test_recipes_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"no recipe 'pendulun'.*did you mean 'pendulum'"):
        find("pendulun")
    with pytest.raises(FileError, match=r"no recipe 'alfe'.*did you mean 'alfe-cubic' or 'alfe-quick'\?"):
        find("alfe")
    broken = tmp_path / "broken.toml"
    broken.write_text("task = ")
    with pytest.raises(SettingsError, match="not valid TOML"):
        settings_from_recipe(broken, None, {})
    broken.write_text("[agent.sacc]\nx = 1")
    with pytest.raises(SettingsError, match="did you mean 'sac'"):
        settings_from_recipe(broken, None, {})
    broken.write_text("seed = 1")
    with pytest.raises(SettingsError, match="no task"):
        settings_from_recipe(broken, None, {})


def test_an_agent_among_the_overrides_is_the_one_asked_for(recipe: Path) -> None:
    td3 = settings_from_recipe(recipe, None, assigned(["agent=TD3"]))
    assert td3 == settings_from_recipe(recipe, "td3", {})
    assert td3 == settings_from_recipe(recipe, "td3", {"agent": "td3"})
    with pytest.raises(SettingsError, match="two agents asked for, sac and agent = td3"):
        settings_from_recipe(recipe, "sac", {"agent": "td3"})
    with pytest.raises(SettingsError, match=r"named by a word .*got 3"):
        settings_from_recipe(recipe, None, {"agent": 3})
    with pytest.raises(SettingsError, match="no agent named ''"):
        settings_from_recipe(recipe, "", {})


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("default_agent = 3", "default_agent: an agent is named by a word .*got 3"),
        ('default_agent = "sacc"', "default_agent: no agent named 'sacc': did you mean 'sac'"),
        ("agent = 3", "agent is a word or has a section for each.*got 3"),
        ('agent = "sacc"', "no agent named 'sacc': did you mean 'sac'"),
        ("[agent]\nsac = 3", r"\[agent.sac\] must be a section of settings, got sac = 3"),
        ("[[agent]]\nbatch_size = 3", "agent is a word or has a section for each"),
        ('[agent.sac]\nagent = "td3"', r"\[agent.sac\] names an agent twice"),
        ("[agent.sac]\n[agent.SAC]", r"\[agent.SAC\] names an agent twice"),
    ],
)
def test_agents_that_are_none(tmp_path: Path, lines: str, words: str) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(f'task = "Pendulum-v1"\n{lines}\n')
    with pytest.raises(SettingsError, match=rf"odd\.toml: .*{words}"):
        settings_from_recipe(path, None, {})


def test_agents_may_be_written_in_capitals(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('task = "Pendulum-v1"\nagent = "SAC"\n')
    assert settings_from_recipe(path, "sac", {}).agent_name == "sac"
    path.write_text('task = "Pendulum-v1"\ndefault_agent = "TD3"\n[agent.TD3]\nbatch_size = 32\n')
    assert settings_from_recipe(path, None, {}).training.batch_size == 32


def test_only_the_folder_of_a_run_is_one(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("pendulum", "other"):
        Path(name).mkdir()
        assert run_folder(name) is None
        Path(name, "settings.toml").write_text('colour = "blue"\n')
        assert run_folder(name) is None
    assert find("pendulum") == SHIPPED / "pendulum.toml"
    with pytest.raises(FileError, match="the folder 'other' holds no run"):
        find("other")
    Path("pendulum/settings.toml").write_text(settings_from_recipe(recipe, "td3", {}).as_toml())
    assert run_folder("pendulum") is None  # the name of a recipe stays one
    for path in ("./pendulum", "pendulum/", str(tmp_path / "pendulum")):
        assert run_folder(path) == Path(path)
        assert find(path) == Path(path) / "settings.toml"


def test_intervals_shrink_with_the_run() -> None:
    usual = settings_from_recipe(find("pendulum"), "td3", {}).training
    short = settings_from_recipe(find("pendulum"), "td3", {"steps": usual.steps // 10}).training
    assert short.assessment_interval_steps == usual.assessment_interval_steps // 10
    assert short.log_interval_steps == usual.log_interval_steps // 10
    own = settings_from_recipe(find("pendulum"), "td3", {"steps": 100, "log_interval_steps": 500}).training
    assert own.log_interval_steps == 500
    longer = settings_from_recipe(find("pendulum"), "td3", {"steps": 2 * usual.steps}).training
    assert longer.assessment_interval_steps == usual.assessment_interval_steps


def test_a_run_that_goes_on_keeps_its_intervals(tmp_path: Path) -> None:
    usual = settings_from_recipe(find("pendulum"), "td3", {})
    (tmp_path / "settings.toml").write_text(usual.as_toml())
    again = settings_from_recipe(tmp_path / "settings.toml", None, {"steps": 1000})
    assert again.training.log_interval_steps == usual.training.log_interval_steps


@cache
def settings_page() -> str:
    """As the site has it."""
    return filled(ROOT, (ROOT / SETTINGS_PAGE).read_text())


@pytest.mark.parametrize(
    "recipe",
    ["pendulum", "emt-metals", "emt-stiffness", "al-fe-stiffness", "metals", "universal", "fine-tune", "search-metals"],
)
def test_the_page_that_errors_name_has_every_setting(recipe):
    page = settings_page()
    known = settings_from_recipe(find(recipe), None, {}).flat().keys() - {"agent", "task"}
    assert [name for name in known if f"- `{name}` (" not in page] == []
