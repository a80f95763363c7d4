"""Settings of a run: one flat table in files, typed parts inside. Its task decides which parts there are.

They come from a recipe with overrides from the command line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field

from relaxion.errors import SettingsError
from relaxion.files import Stored
from relaxion.settings import SETTINGS_PAGE, Settings, nearest
from relaxion.train.agents import AGENT_SETTINGS, AGENTS, own_agent
from relaxion.train.agents.shared import LinearSchedule, NoisyExplorer
from relaxion.train.recipes import SHIPPED, find, read_toml, run_folder

if TYPE_CHECKING:
    from relaxion.model.policy_file import Network, PolicyFile
    from relaxion.train.judge.assessment import Assessor, Relax
    from relaxion.train.tasks.progress import RunTrainer


DEFAULT_AGENT = "td3"
VECTOR_CAPACITY = 100_000  # transitions in replay
GIVEN_UP = {"largest_defect_n_atoms": 40, "largest_particle_n_atoms": 60}  # constants now; cards name them


class LoopSettings(Settings):
    """What is learned, for how long, and what is written down: the same for every task."""

    task: str
    """Any Gymnasium id with a bounded Box of actions; "relax": an agent on atomic structures; "stiffness": a
    stiffness, fitted to relaxations; "search": a critic of hops."""

    steps: int = Field(default=10_000, ge=1)
    """Environment steps in all, or updates of a stiffness or a critic. A resume may change it, and the intervals."""

    seed: int = Field(default=0, ge=0)
    """Seed of all random numbers: weights, exploration, batches, starts."""

    log_interval_steps: int = Field(default=1_000, ge=1)
    """A line in metrics.jsonl every so many steps."""

    assessment_interval_steps: int = Field(default=5_000, ge=0)
    """Assess the policy without noise every so many steps; 0: only at the end."""

    assessment_starts: int = Field(default=20, ge=1)
    """Fixed starts, the same for every agent and seed; of the task stiffness, so many of each kind."""

    checkpoint_interval_steps: int = Field(default=5_000, ge=1)
    """Most steps that a kill can cost. A checkpoint holds the whole replay."""

    tensorboard: bool = False
    """Also write TensorBoard files (extra: relaxion[train])."""


class TrainingSettings(LoopSettings):
    """What every agent needs besides."""

    replay_capacity: int | None = Field(default=None, ge=1)
    """Transitions kept; the newest replaces the oldest. None: 100 000 of vectors, and on atoms as many as suit the size
    of the structures (R8.1), 5 000 for 4 atoms."""

    batch_size: int = Field(default=128, ge=1)
    """Transitions per update, drawn without replacement."""

    warmup_steps: int = Field(default=1_000, ge=1)
    """Transitions collected by random actions before the first update (R1.2)."""

    n_steps: int = Field(default=1, ge=1)
    """Steps of reward before the bootstrap; 5 for D4PG unless given, as in its paper (R5.2)."""

    exploration_noise_final: float | None = Field(default=None, ge=0)
    """The agent's `exploration_noise` goes linearly to this, half ranges of the action; None: it stays."""

    exploration_noise_steps: int = Field(default=10_000, ge=1)
    """Environment steps until `exploration_noise_final` is reached."""

    learning_rate_final_share: float = Field(default=1.0, gt=0, le=1)
    """The learning rates of policy and critics go linearly to this share of theirs; 1: they stay."""

    learning_rate_steps: int = Field(default=100_000, ge=1)
    """Environment steps until `learning_rate_final_share` is reached."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        settings = super().read(values)
        settings._check_together()
        return settings

    @property
    def learning_rate_schedule(self) -> LinearSchedule:
        """Of the share of the learning rates."""
        return LinearSchedule(1.0, self.learning_rate_final_share, self.learning_rate_steps)

    def noise_schedule(self, agent: object) -> LinearSchedule | None:
        """Of the exploration noise; None for an agent that explores by itself."""
        if not isinstance(agent, NoisyExplorer):
            return None
        start = agent.exploration_scale
        end = self.exploration_noise_final
        return LinearSchedule(start, start if end is None else end, self.exploration_noise_steps)

    def capacity(self, advised: int = VECTOR_CAPACITY) -> int:
        """`replay_capacity`, or what is advised where none is given, with room for the warm-up."""
        return max(advised, self.warmup_steps) if self.replay_capacity is None else self.replay_capacity

    def _check_together(self) -> None:
        for small, large, reason in (
            ("replay_capacity", "batch_size", "a batch needs that many different transitions"),
            ("warmup_steps", "batch_size", "the first batch needs that many different transitions"),
            ("replay_capacity", "warmup_steps", "the first update would never come"),
        ):
            own = getattr(self, small)
            least = getattr(self, large)
            if own is not None and own < least:
                raise SettingsError(f"{small} {own} is below {large} {least}: {reason}")


@dataclass(frozen=True)
class Packed:
    """What a task makes a policy file of: networks, facts for the card, and how the results are measured."""

    networks: Mapping[str, Network]
    card: Mapping[str, Any]
    assessor: Assessor
    relax: Callable[[PolicyFile], Relax]  # as a user of the policy file would
    fails_on: tuple[str, ...] = ()  # sentences beside what the assessment shows
    same_starts: bool = True  # the run measured its baselines on the starts of the assessor
    steps_are_updates: bool = False  # not of an environment, whose steps a card counts


@dataclass(frozen=True)
class RunSettings:
    """Of the loop; each task adds its parts as fields, and says who trains and what becomes of it."""

    agent_name: str  # a run of the task stiffness has none; the word stays in its records
    training: LoopSettings

    COUNTS_FORCE_CALLS = True  # assessments do: few are good. Else returns, and many

    @classmethod
    def parts(cls, values: Mapping[str, Any]) -> dict[str, type[Settings]]:
        """By field, those that these values ask for; `agent` depends on the agent."""
        raise NotImplementedError

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """From a flat table with the keys `agent` and `task` and settings of all kinds that the task has."""
        name = agent_name(values.get("agent", DEFAULT_AGENT))
        kinds = cls.parts({**values, "agent": name})
        gone = dict(GIVEN_UP)
        for kind in kinds.values():
            gone |= kind.given_up()
        rest = {key: value for key, value in values.items() if key not in gone or value != gone[key]}
        rest.pop("agent", None)
        known = [key for kind in kinds.values() for key in kind.model_fields]
        for key in rest:
            if key in gone:
                raise SettingsError(f"{key} is not a setting any more: it is {gone[key]}, got {rest[key]!r}")
            if key not in known:
                raise SettingsError(f"unknown setting '{key}' for {name}: {nearest(key, known, SETTINGS_PAGE)}")
        if "task" not in rest:
            raise SettingsError(
                'no task: a recipe names a Gymnasium id, for example task = "Pendulum-v1", or task = "relax" for atoms'
            )
        parts: dict[str, Any] = {
            field: kind.read({key: rest[key] for key in rest if key in kind.model_fields})
            for field, kind in kinds.items()
        }
        settings = cls(agent_name=name, **parts)
        settings.check_together()
        return settings

    def check_together(self) -> None:
        """Refuse what does not go together although each part is right."""

    def flat(self) -> dict[str, Any]:
        """One table of plain values; `read` takes it back."""
        parts = [part for part in vars(self).values() if isinstance(part, Settings)]
        return {"agent": self.agent_name} | {k: v for part in parts for k, v in part.model_dump(mode="json").items()}

    def as_toml(self) -> str:
        """A recipe that repeats this run. (JSON's numbers, strings and lists are TOML's as well; None is left out.)"""
        return "".join(f"{key} = {json.dumps(value)}\n" for key, value in self.flat().items() if value is not None)

    def trainer(self) -> RunTrainer:
        """Who trains."""
        raise NotImplementedError

    def assessed_on_validation(self) -> Self:
        """The same, for choosing settings: what is chosen must not have seen the structures of the results."""
        return self

    def packed(self, _stored: Stored, /) -> Packed | None:
        """What a policy file is made of, from the weights of a run; None where the run relaxes no atoms."""
        return None


@dataclass(frozen=True)
class AgentRunSettings(RunSettings):
    """Of a task in which an agent acts."""

    training: TrainingSettings
    agent: Settings

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        by_agent = AGENTS[agent_name(values.get("agent", DEFAULT_AGENT))].training
        return super().read({**by_agent, **values})

    def check_together(self) -> None:
        noisy = "exploration_noise" in type(self.agent).model_fields
        if self.training.exploration_noise_final is not None and not noisy:
            raise SettingsError(
                f"exploration_noise_final has no meaning for {self.agent_name}, which explores by itself"
            )


def agent_name(word: Any, owner: str = "") -> str:
    """The agent meant by a word of the user."""
    if not isinstance(word, str):
        raise SettingsError(f"{owner}an agent is named by a word ({', '.join(AGENT_SETTINGS)}), got {word!r}")
    if ":" in word:
        return own_agent(word)
    if (name := word.lower()) not in AGENT_SETTINGS:
        raise SettingsError(f"{owner}no agent named '{word}': {nearest(name, AGENT_SETTINGS)}")
    return name


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
        case "search":
            from relaxion.train.tasks.search import SearchRunSettings

            return SearchRunSettings.read(values)
        case _:  # an id of Gymnasium, or a mistake that its settings describe
            from relaxion.train.tasks.control import VectorRunSettings

            return VectorRunSettings.read(values)


def settings_from_recipe(path: Path, agent: str | None, overrides: Mapping[str, Any]) -> RunSettings:
    """The recipe's common part, then the section of the agent, then the overrides (an `agent` there chooses it too)."""
    table = read_toml(path)
    given = dict(overrides)
    override = given.pop("agent", None)
    names = {agent_name(word) for word in (agent, override) if word is not None}
    if len(names) > 1:
        raise SettingsError(f"two agents asked for, {agent} and agent = {override} in the settings; leave one out")
    asked = names.pop() if names else None
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
