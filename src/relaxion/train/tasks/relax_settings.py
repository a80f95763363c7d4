"""Settings of the task `relax`: an agent relaxes atomic structures. Which ones, what is rewarded, who teaches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from pydantic import Field

from relaxion.errors import SettingsError
from relaxion.files import Stored
from relaxion.model.backbone import AtomNetworkSettings
from relaxion.model.stiffness_network import StiffnessSettings, StiffnessShape
from relaxion.settings import Settings, nearest
from relaxion.train.agents import AGENT_SETTINGS
from relaxion.train.data.starts import first_at_hand, potential_at_hand, source_at_hand
from relaxion.train.experience.environment import BACK_OFF, REWARDS, EnvironmentSettings, reward_named
from relaxion.train.supervised.dataset import LiveSettings
from relaxion.train.tasks.settings import AgentRunSettings, TrainingSettings

if TYPE_CHECKING:
    from relaxion.train.tasks.relax import RelaxTrainer
    from relaxion.train.tasks.settings import Packed


PolicyKind = Literal["direct", "stiffness"]
POLICIES: tuple[str, ...] = get_args(PolicyKind)


class AtomTaskSettings(Settings):
    """What is relaxed and how it is learned. When a relaxation ends is in `EnvironmentSettings`.

    `potential` and `structures` may name alternatives, `first | second`: the first available one is taken and stored in
    the settings of the run.
    """

    younger = ("policy",)

    potential: str = "emt"
    """As `relaxion calculators` lists them. Files are looked for from the working directory."""

    structures: str
    """Where structures come from: `file:PATH@SLICE`, `b2:AlFe`, `alloys:Al-Cu-Ni:2-16`, `packings:Al-Fe:2-20`."""

    n_pooled: int = Field(default=512, ge=1)
    """Structures that `alloys` and `packings` make; every start is one of them, perturbed."""

    fewest_atoms: int = Field(default=1, ge=1)
    """Smaller structures are left out."""

    most_atoms: int = Field(default=200, ge=1)
    """Larger structures are left out."""

    perturbation: str = "rattle:0.1"
    """What makes a start of a structure: `rattle:Å`, `uniform:Å`, `strain:SIZE`, `vacancy:N`, joined by `+`."""

    cell_free: bool = False
    """Whether cells relax too."""

    held_apart: str = "composition:0.2"
    """What assessments see and training never does: `composition:SHARE`, `system:SHARE` or `KEY:SHARE` (an entry of
    `atoms.info`, a prototype, say): whole groups, chosen by hash; `elements:Pd,Pt`: all structures with one of them;
    `seed`: other random structures of the same kind; `starts`: other perturbations of the same structures."""

    assess_on: Literal["held_apart", "validation"] = "held_apart"
    """Settings are chosen on `validation`: structures that are neither trained on nor used for results."""

    reward: str = "log_force_decrease:1"
    """Rewards and their weights, joined by `+`: force, log_force, step, energy, log_force_decrease, log_gap_decrease
    (R7.4), or `module:function:WEIGHT` of your own, a function of a `StepProgress`. `back_off:0.5` is what a move that
    the minimum distance undoes costs (R7.2), named or not."""

    deviation_penalty_per_angstrom2: float = Field(default=1.0, ge=0)
    """λ of R7.3: weight in the policy's loss of the mean squared distance between proposed and executed move."""

    policy: PolicyKind = "direct"
    """Which kind of policy: "direct" predicts the move; with "stiffness" the move is what a predicted stiffness makes
    of the forces (docs/how-it-works.md)."""

    critic_updates_before: int = Field(default=0, ge=0)
    """Updates of the agent in which only its critics learn: a policy that was fitted before would be undone by critics
    that have learned nothing yet."""

    updates_per_round: int = Field(default=16, ge=0)
    """Updates after each step of all structures side by side."""

    exploration_length_noise: float = Field(default=0.0, ge=0)
    """While collecting, the whole move of each structure is also made longer or shorter by exp(N(0, this)). Noise on
    single atoms does not show how far to go: a critic that has seen one length only ranks shorter moves better."""

    expert_share: float = Field(default=0.0, ge=0, le=1)
    """Share of steps that the expert takes at the start, random warm-up included; it falls to 0 (R8.3)."""

    expert_steps: int = Field(default=10_000, ge=1)
    """Environment steps until the expert has left; the imitation loss fades over the same."""

    imitation_weight: float = Field(default=0.0, ge=0)
    """Weight in the policy's loss of the relative squared distance to what the expert did, on its transitions; fades to
    0 within `expert_steps`."""

    averaged_policy: bool = True
    """Assess, keep and package the policy's slow copy (its target, an average over the newest 1 / target_update_rate
    policy updates) instead of the one that swings around it. SAC has no such copy."""

    alarm_memory_steps: int = Field(default=2_000, ge=1)
    """Environment steps that alarms are judged by (docs/diagnostics.md)."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        given = dict(values)
        for name, at_hand in (("potential", potential_at_hand), ("structures", source_at_hand)):
            if isinstance(given.get(name), str):
                given[name] = first_at_hand(given[name], at_hand)
        settings = super().read(given)
        settings._check_together()
        return settings

    def _check_together(self) -> None:
        reward_weights(self.reward)
        if self.fewest_atoms > self.most_atoms:
            raise SettingsError(f"fewest_atoms {self.fewest_atoms} is above most_atoms {self.most_atoms}")
        if self.imitation_weight > 0 and self.expert_share == 0:
            raise SettingsError("imitation_weight needs an expert to imitate: set expert_share above 0")


def reward_weights(text: str) -> dict[str, float]:
    """From `log_force_decrease:1+step:0.5`; a reward of the user's own is `module:function:1`."""
    weights: dict[str, float] = {}
    for part in text.split("+"):
        name, _, value = (word.strip() for word in part.partition(":"))
        if name not in (*REWARDS, BACK_OFF) and value:
            own, _, value = value.partition(":")
            name = f"{name}:{own}"
        if name != BACK_OFF:
            reward_named(name)
        try:
            weights[name] = float(value or 1)
        except ValueError as error:
            raise SettingsError(f"reward = '{text}': write {name}:NUMBER, got '{value}'") from error
    if not weights.keys() - {BACK_OFF}:
        raise SettingsError(f"reward = '{text}' rewards nothing: add one of {', '.join(REWARDS)}")
    return weights


@dataclass(frozen=True)
class RelaxRunSettings(AgentRunSettings):
    """An agent on atomic structures, its policy direct or of stiffness, and then it may be fitted before."""

    atoms: AtomTaskSettings
    environment: EnvironmentSettings
    networks: AtomNetworkSettings
    stiffness: StiffnessShape | None = None  # of a stiffness policy, as the next
    fit: LiveSettings | None = None  # to finished relaxations, before reinforcement learning

    @classmethod
    def parts(cls, values: Mapping[str, Any]) -> dict[str, type[Settings]]:
        parts: dict[str, type[Settings]] = {
            "training": TrainingSettings,
            "agent": AGENT_SETTINGS[values["agent"]],
            "atoms": AtomTaskSettings,
            "environment": EnvironmentSettings,
            "networks": AtomNetworkSettings,
        }
        return parts | (
            {"stiffness": StiffnessShape, "fit": LiveSettings} if values.get("policy") == "stiffness" else {}
        )

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """The policy relaxes alone here: without damping far starts fail (docs/how-it-works.md)."""
        policy = values.get("policy", "direct")
        if policy not in POLICIES:
            raise SettingsError(f"policy = {policy!r}: {nearest(str(policy), POLICIES)}")
        alone = {"damped": True} if policy == "stiffness" else {}
        return super().read({**alone, **values})

    @property
    def policy(self) -> AtomNetworkSettings | StiffnessSettings:
        """Of the policy's network; a stiffness network has its own shape, backbone and gate are the critics'."""
        if self.stiffness is None:
            return self.networks
        shared = {k: v for k, v in self.networks.model_dump().items() if k in StiffnessSettings.model_fields}
        own = {name: getattr(self.stiffness, name) for name in StiffnessShape.model_fields}
        return StiffnessSettings(**shared, **own)

    def check_together(self) -> None:
        super().check_together()
        networks = self.networks
        n_structures = self.environment.n_structures
        if (given := self.training.replay_capacity) is not None and given < n_structures:
            raise SettingsError(
                f"replay_capacity {given} is below n_structures {n_structures}: one step of all structures must fit"
            )
        if self.stiffness is not None and not networks.moves_follow_forces:
            raise SettingsError(
                "moves_follow_forces = false has no meaning for policy = stiffness, whose moves always do"
            )

    def trainer(self) -> RelaxTrainer:
        from relaxion.train.tasks.relax import RelaxTrainer
        from relaxion.train.tasks.relax_task import relax_task

        return RelaxTrainer(self, relax_task(self))

    def packed(self, stored: Stored, /) -> Packed:
        from relaxion.train.tasks.relax_task import packed

        return packed(self, stored)

    def assessed_on_validation(self) -> Self:
        """The same, for choosing settings: what is chosen must not have seen the structures of the results."""
        return replace(self, atoms=self.atoms.model_copy(update={"assess_on": "validation"}))
