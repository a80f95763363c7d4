"""The settings of a run, from a recipe with overrides from the command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relaxion.errors import SettingsError
from relaxion.train.recipes import SHIPPED, find, read_toml, run_folder
from relaxion.train.tasks.settings import DEFAULT_AGENT, RunSettings, agent_name

KINDS = "kinds"  # of starts: the mark of a recipe that other recipes name


__all__ = ["SHIPPED", "find", "read_settings", "read_toml", "run_folder", "settings_from_recipe"]


def read_settings(values: Mapping[str, Any]) -> RunSettings:
    """The settings of any run, from a flat table; its `task` decides which parts there are."""
    match values.get("task"):
        case "relax":
            from relaxion.train.tasks.relax_settings import RelaxRunSettings

            return RelaxRunSettings.read(values)
        case "stiffness":
            from relaxion.train.tasks.stiffness import StiffnessRunSettings

            return StiffnessRunSettings.read(values)
        case _:  # an id of Gymnasium, or a mistake that its settings describe
            from relaxion.train.tasks.control import VectorRunSettings

            return VectorRunSettings.read(values)


def settings_from_recipe(path: Path, agent: str | None, overrides: Mapping[str, Any]) -> RunSettings:
    """The recipe's common part, then the section of the agent, then the overrides (an `agent` there chooses it too)."""
    table = read_toml(path)
    given = dict(overrides)
    asked = _asked_agent(agent, given.pop("agent", None))
    owner = f"{path}: "
    if KINDS in table:
        raise SettingsError(f"{path} lists kinds of starts; 'relaxion train' takes a recipe that names it in kinds_of")
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
    return read_settings({**values, "agent": chosen})


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
