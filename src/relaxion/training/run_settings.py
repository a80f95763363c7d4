"""All settings of a run: one flat table in files, typed parts inside. What the parts are depends on the task."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from relaxion.agents.make import AGENT_SETTINGS, AgentSettings
from relaxion.errors import SettingsError
from relaxion.experience.environment import EnvironmentSettings
from relaxion.experience.gate_environment import GateTaskSettings
from relaxion.networks.metric.network import MetricSettings, MetricShape
from relaxion.networks.observer import AtomNetworkSettings
from relaxion.networks.vector import VectorNetworkSettings
from relaxion.settings import Settings, nearest
from relaxion.training.atom_settings import AtomTaskSettings
from relaxion.training.metals_settings import MetalsSettings
from relaxion.training.metric_imitation import ImitationSettings
from relaxion.training.metric_settings import LessonSettings, MetricPolicySettings
from relaxion.training.settings import TrainingSettings, VectorTrainingSettings
from relaxion.training.universal_settings import UniversalSettings

DEFAULT_AGENT = "td3"
RELAX = "relax"  # the task whose states are atomic structures
POLICIES = ("direct", "metric")  # kinds of policies on atoms
METALS = "metals"  # the task of the metric policy and its gate
UNIVERSAL = "universal"  # the task of a metric that learns from a store; all others are Gymnasium's


@dataclass(frozen=True)
class RunSettings:
    """Of the training and of the agent; subclasses add what their kind of task needs."""

    PARTS: ClassVar[dict[str, type[Settings]]] = {}  # by field; `agent` depends on the agent

    agent_name: str
    training: TrainingSettings
    agent: AgentSettings

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> RunSettings:
        """From a flat table with the keys `agent` and `task` and settings of all kinds that the task has."""
        kinds = {RELAX: AtomRunSettings, METALS: MetalsRunSettings, UNIVERSAL: UniversalRunSettings}
        return kinds.get(str(values.get("task")), VectorRunSettings).read(values)

    @classmethod
    def _read(cls, values: Mapping[str, Any]) -> Any:
        rest = dict(values)
        name = agent_name(rest.pop("agent", DEFAULT_AGENT))
        kinds = {**cls.PARTS, "agent": AGENT_SETTINGS[name]}
        known = [key for kind in kinds.values() for key in kind.model_fields]
        for key in rest:
            if key not in known:
                raise SettingsError(f"unknown setting '{key}' for {name}: {nearest(key, known)}")
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
        noisy = "exploration_noise" in type(self.agent).model_fields
        if self.training.exploration_noise_final is not None and not noisy:
            raise SettingsError(
                f"exploration_noise_final has no meaning for {self.agent_name}, which explores by itself"
            )

    def flat(self) -> dict[str, Any]:
        """One table of plain values; `read` takes it back."""
        parts = [getattr(self, field) for field in (*self.PARTS, "agent")]
        return {"agent": self.agent_name} | {k: v for part in parts for k, v in part.model_dump(mode="json").items()}

    def as_toml(self) -> str:
        """A recipe that repeats this run. (JSON's numbers, strings and lists are TOML's as well; None is left out.)"""
        return "".join(f"{key} = {json.dumps(value)}\n" for key, value in self.flat().items() if value is not None)


@dataclass(frozen=True)
class VectorRunSettings(RunSettings):
    """A Gymnasium task."""

    PARTS: ClassVar[dict[str, type[Settings]]] = {
        "training": VectorTrainingSettings,
        "networks": VectorNetworkSettings,
    }

    training: VectorTrainingSettings
    networks: VectorNetworkSettings

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> VectorRunSettings:
        return cls._read(values)


@dataclass(frozen=True)
class AtomRunSettings(RunSettings):
    """Atomic structures to be relaxed."""

    PARTS: ClassVar[dict[str, type[Settings]]] = {
        "training": TrainingSettings,
        "atoms": AtomTaskSettings,
        "environment": EnvironmentSettings,
        "networks": AtomNetworkSettings,
    }

    atoms: AtomTaskSettings
    environment: EnvironmentSettings
    networks: AtomNetworkSettings

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> AtomRunSettings:
        """`policy` = direct, which is never written down, or metric."""
        policy = values.get("policy", "direct")
        if policy == "metric":
            return MetricRunSettings._read(values)
        if policy != "direct":
            raise SettingsError(f"policy = {policy!r}: {nearest(str(policy), POLICIES)}")
        return AtomRunSettings._read({key: value for key, value in values.items() if key != "policy"})

    @property
    def policy(self) -> AtomNetworkSettings | MetricSettings:
        """Of the policy's network."""
        return self.networks

    @property
    def reinforced(self) -> Literal["all", "gate"]:
        """What of the policy the agent moves."""
        return "all"

    def check_together(self) -> None:
        super().check_together()
        given, plain = self.networks, AtomNetworkSettings()
        if not given.environment_information and given.largest_gate_factor != plain.largest_gate_factor:
            raise SettingsError(
                f"a gate was asked for (largest_gate_factor = {given.largest_gate_factor:g}) with no "
                "environment_information; name some, for example ['log_largest_force'], or leave the gate out"
            )
        n_structures = self.environment.n_structures
        if self.training.replay_capacity < n_structures:
            raise SettingsError(
                f"replay_capacity {self.training.replay_capacity} is below n_structures {n_structures}: "
                "one step of all structures must fit"
            )


@dataclass(frozen=True)
class MetricRunSettings(AtomRunSettings):
    """The same with a policy that follows a metric, and its lessons."""

    PARTS: ClassVar[dict[str, type[Settings]]] = {
        **AtomRunSettings.PARTS,
        "metric": MetricPolicySettings,
        "lessons": LessonSettings,
    }

    metric: MetricPolicySettings
    lessons: LessonSettings

    @property
    def policy(self) -> MetricSettings:
        """Its own shape, with backbone and gate of the critics' settings."""
        shared = {k: v for k, v in self.networks.model_dump().items() if k in MetricSettings.model_fields}
        own = {name: getattr(self.metric, name) for name in MetricShape.model_fields}
        return MetricSettings(**shared, **own)

    @property
    def reinforced(self) -> Literal["all", "gate"]:
        return self.metric.reinforced

    def check_together(self) -> None:
        super().check_together()
        if not self.networks.moves_follow_forces:
            raise SettingsError("moves_follow_forces = false has no meaning for a metric, whose moves always do")
        if self.reinforced == "gate" and not self.networks.environment_information and self.agent_name != "sac":
            raise SettingsError(
                "reinforced = gate: there is no gate to learn; name some environment_information, for example "
                "['log_largest_force'], or leave it out"
            )


@dataclass(frozen=True)
class MetalsRunSettings(RunSettings):
    """The metric policy for metals and the gate beside it, whose agent is the run's."""

    PARTS: ClassVar[dict[str, type[Settings]]] = {
        "training": VectorTrainingSettings,
        "networks": VectorNetworkSettings,
        "metric": MetricSettings,
        "imitation": ImitationSettings,
        "metals": MetalsSettings,
        "gate": GateTaskSettings,
    }

    training: VectorTrainingSettings
    networks: VectorNetworkSettings
    metric: MetricSettings
    imitation: ImitationSettings
    metals: MetalsSettings
    gate: GateTaskSettings

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> MetalsRunSettings:
        return cls._read(values)

    def check_together(self) -> None:
        super().check_together()
        if self.training.normalise_observations:
            raise SettingsError("the gate's observations are numbers of order one: set normalise_observations = false")


@dataclass(frozen=True)
class UniversalRunSettings(RunSettings):
    """The metric policy for all elements. No agent acts here; one may fine-tune later."""

    PARTS: ClassVar[dict[str, type[Settings]]] = {
        "training": TrainingSettings,
        "metric": MetricSettings,
        "universal": UniversalSettings,
    }

    metric: MetricSettings
    universal: UniversalSettings

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> UniversalRunSettings:
        return cls._read(values)


def agent_name(word: Any, owner: str = "") -> str:
    """The agent meant by a word of the user."""
    if not isinstance(word, str):
        raise SettingsError(f"{owner}an agent is named by a word ({', '.join(AGENT_SETTINGS)}), got {word!r}")
    if (name := word.lower()) not in AGENT_SETTINGS:
        raise SettingsError(f"{owner}no agent named '{word}': {nearest(name, AGENT_SETTINGS)}")
    return name
