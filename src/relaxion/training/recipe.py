"""Recipes: TOML files that say what to train, found by name or path, with overrides from the command line."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relaxion.agents.vector_agents import AGENT_SETTINGS, AgentSettings
from relaxion.errors import FileError, SettingsError
from relaxion.networks.vector import VectorNetworkSettings
from relaxion.settings import nearest
from relaxion.training.settings import TrainingSettings

DEFAULT_AGENT = "td3"
SHIPPED = Path(__file__).parent.parent / "recipes"


@dataclass(frozen=True)
class RunSettings:
    """All settings of a run: of the training, of the agent, of its networks. In files they share one flat table."""

    agent_name: str
    training: TrainingSettings
    agent: AgentSettings
    networks: VectorNetworkSettings

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> RunSettings:
        """From a flat table with the key `agent` and settings of all three kinds."""
        rest = dict(values)
        name = str(rest.pop("agent", DEFAULT_AGENT)).lower()
        if name not in AGENT_SETTINGS:
            raise SettingsError(f"no agent named '{name}': {nearest(name, AGENT_SETTINGS)}")
        kinds = (TrainingSettings, AGENT_SETTINGS[name], VectorNetworkSettings)
        known = [key for kind in kinds for key in kind.model_fields]
        for key in rest:
            if key not in known:
                raise SettingsError(f"unknown setting '{key}' for {name}: {nearest(key, known)}")
        if "task" not in rest:
            raise SettingsError('no task: a recipe names a Gymnasium id, for example task = "Pendulum-v1"')
        parts = [kind.read({key: rest[key] for key in rest if key in kind.model_fields}) for kind in kinds]
        settings = cls(name, *parts)  # type: ignore[arg-type]
        settings._check_noise()
        return settings

    def _check_noise(self) -> None:
        if (
            self.training.exploration_noise_final is not None
            and "exploration_noise" not in type(self.agent).model_fields
        ):
            raise SettingsError(
                f"exploration_noise_final has no meaning for {self.agent_name}, which explores by itself"
            )

    def flat(self) -> dict[str, Any]:
        """One table of plain values; `read` takes it back."""
        parts = (self.training, self.agent, self.networks)
        return {"agent": self.agent_name} | {k: v for part in parts for k, v in part.model_dump(mode="json").items()}

    def as_toml(self) -> str:
        """A recipe that repeats this run. (JSON's numbers, strings and lists are TOML's as well; None is left out.)"""
        return "".join(f"{key} = {json.dumps(value)}\n" for key, value in self.flat().items() if value is not None)


def find(name_or_path: str) -> Path:
    """A shipped recipe by name, or a file, or the settings of an earlier run by its folder."""
    path = Path(name_or_path)
    for candidate in (SHIPPED / f"{name_or_path}.toml", path / "settings.toml", path):
        if candidate.is_file():
            return candidate
    shipped = sorted(file.stem for file in SHIPPED.glob("*.toml"))
    raise FileError(f"no recipe '{name_or_path}', neither shipped nor a file: {nearest(name_or_path, shipped)}")


def settings_from_recipe(path: Path, agent: str | None, overrides: Mapping[str, Any]) -> RunSettings:
    """The recipe's common part, then the section of the agent, then the overrides."""
    table = read_toml(path)
    sections = table.pop("agent", {})
    chosen = (agent or table.pop("default_agent", None) or DEFAULT_AGENT).lower()
    table.pop("default_agent", None)
    if isinstance(sections, str):  # the settings of an earlier run belong to one agent
        if agent is not None and agent.lower() != sections:
            raise SettingsError(f"{path} holds settings for {sections}, not for {agent}; take a recipe instead")
        chosen, sections = sections, {}
    for name in sections:
        if name not in AGENT_SETTINGS:
            raise SettingsError(f"{path}: no agent named '{name}': {nearest(name, AGENT_SETTINGS)}")
    return RunSettings.read({**table, **sections.get(chosen, {}), **overrides, "agent": chosen})


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path} is no valid TOML: {error}") from error


def overrides(assignments: Sequence[str]) -> dict[str, Any]:
    """`key=value` words; values are TOML (3e-4, true, [64, 64]), anything else is taken as text."""
    result: dict[str, Any] = {}
    for word in assignments:
        key, equals, value = word.partition("=")
        if not equals or not key.strip():
            raise SettingsError(f"--set takes key=value, got '{word}'; for example --set batch_size=256")
        try:
            result[key.strip()] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            result[key.strip()] = value.strip()
    return result
