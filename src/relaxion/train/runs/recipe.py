"""Recipes: TOML files that say what to train, found by name or path, with overrides from the command line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from relaxion.errors import FileError, SettingsError
from relaxion.files import toml_of
from relaxion.settings import nearest
from relaxion.train.runs.settings import DEFAULT_AGENT, RunSettings, agent_name

SHIPPED = Path(__file__).parent.parent / "recipes"
SETTINGS = "settings.toml"  # in the folder of a run
COLLECTED = "kinds"  # of structures: the mark of a recipe for `relaxion collect`


def find(name_or_path: str) -> Path:
    """A shipped recipe by name, or a file, or the settings of an earlier run by its folder."""
    shipped = _shipped()
    if name_or_path in shipped:  # ./pendulum and pendulum/ are paths, pendulum is not
        return shipped[name_or_path]
    path = Path(name_or_path)
    if path.is_file():
        return path
    if (folder := run_folder(name_or_path)) is not None:
        return folder / SETTINGS
    if path.is_dir():
        raise FileError(f"the folder '{name_or_path}' holds no run: it has no {SETTINGS} with an agent and a task")
    raise FileError(f"no recipe '{name_or_path}', neither shipped nor a file: {_meant(name_or_path, shipped)}")


def _meant(word: str, names: Iterable[str]) -> str:
    """All recipes that begin with the word, or the one nearest to it."""
    longer = [f"'{name}'" for name in sorted(names) if word and name.startswith(word)]
    return f"did you mean {' or '.join(longer)}?" if longer else nearest(word, names)


def run_folder(name_or_path: str) -> Path | None:
    """The folder, if this names one of an earlier run; no other folder is ever taken for one."""
    folder = Path(name_or_path)
    if name_or_path in _shipped() or not (folder / SETTINGS).is_file():
        return None
    values = read_toml(folder / SETTINGS)
    return folder if isinstance(values.get("agent"), str) and isinstance(values.get("task"), str) else None


def _shipped() -> dict[str, Path]:
    return {file.stem: file for file in SHIPPED.glob("*.toml")}


def settings_from_recipe(path: Path, agent: str | None, overrides: Mapping[str, Any]) -> RunSettings:
    """The recipe's common part, then the section of the agent, then the overrides (an `agent` there chooses it too)."""
    table = read_toml(path)
    given = dict(overrides)
    asked = _asked_agent(agent, given.pop("agent", None))
    owner = f"{path}: "
    if COLLECTED in table:
        raise SettingsError(f"{path} says what 'relaxion collect' collects; 'relaxion train' takes recipes with a task")
    default = agent_name(table.pop("default_agent", DEFAULT_AGENT), f"{owner}default_agent: ")
    sections = table.pop("agent", {})
    of_a_run = False
    if isinstance(sections, str):  # the settings of an earlier run belong to one agent
        default = agent_name(sections, owner)
        sections = {}
        of_a_run = True
        if asked not in (None, default):
            raise SettingsError(f"{path} holds settings for {default}, not for {asked}; use a recipe instead")
    chosen = asked or default
    layers = [table, _sections(sections, owner).get(chosen, {}), given]
    values = {name: value for layer in layers for name, value in layer.items()}
    if "steps" in given and not of_a_run:  # a run that goes on keeps its intervals
        values = _with_shorter_intervals(values, table | layers[1], given)
    return RunSettings.read({**values, "agent": chosen})


INTERVALS = ("log_interval_steps", "assessment_interval_steps", "checkpoint_interval_steps")


def _with_shorter_intervals(
    values: dict[str, Any], recipe: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Those of a recipe, scaled with its steps where fewer are asked for: a short run shows as much as a long one."""
    steps = given["steps"]
    usual = recipe.get("steps")
    if not (isinstance(steps, int) and isinstance(usual, int)) or steps >= usual:
        return values
    own = {name: values[name] for name in INTERVALS if isinstance(values.get(name), int) and name not in given}
    return values | {name: max(min(interval, 1), interval * steps // usual) for name, interval in own.items()}


def _asked_agent(option: str | None, override: Any) -> str | None:
    names = {agent_name(word) for word in (option, override) if word is not None}
    if len(names) > 1:
        raise SettingsError(f"two agents asked for, {option} and agent = {override} in the settings; leave one out")
    return names.pop() if names else None


def _sections(sections: Any, owner: str) -> dict[str, dict[str, Any]]:
    """By the agent's name. In a recipe `agent` is a table of tables."""
    if not isinstance(sections, dict):
        raise SettingsError(f"{owner}agent is a word or has a section for each, like [agent.sac], got {sections!r}")
    named: dict[str, dict[str, Any]] = {}
    for word, section in sections.items():
        name = agent_name(word, owner)
        if not isinstance(section, dict):
            raise SettingsError(f"{owner}[agent.{word}] must be a section of settings, got {word} = {section!r}")
        if "agent" in section or name in named:
            raise SettingsError(f"{owner}[agent.{word}] names an agent twice")
        named[name] = section
    return named


def read_toml(path: Path) -> dict[str, Any]:
    """A recipe; a sentence where it is none."""
    try:
        return toml_of(path)
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise SettingsError(f"{path} is not valid TOML: {str(error)[:200]}") from error
