"""Settings of training on atoms: which structures, which potential, what is rewarded, who teaches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field

from relaxion.errors import SettingsError
from relaxion.generators.sources import first_at_hand, potential_at_hand, source_at_hand
from relaxion.potentials.reward import REWARDS, RewardName
from relaxion.settings import Settings, nearest


class AtomTaskSettings(Settings):
    """What is relaxed and how it is taught. When a relaxation ends is in `EnvironmentSettings`.

    `potential` and `structures` may name alternatives, `first | second`: the first that is at hand is taken, and it
    alone is what the settings of a run say from then on.
    """

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
    """Rewards and their weights, joined by `+`: force, log_force, step, energy, log_force_decrease (R7.4)."""

    back_off_penalty: float = Field(default=0.5, ge=0)
    """Taken off the reward for a move wholly undone, in proportion for a part (R7.2)."""

    reward_force_floor_ev_per_angstrom: float = Field(default=1e-3, gt=0)
    """Rewards see no smaller force: what lies far below the tolerance is worth no effort."""

    deviation_penalty_per_angstrom2: float = Field(default=1.0, ge=0)
    """λ of R7.3: weight in the policy's loss of the mean squared distance between proposed and executed move."""

    replay_atom_capacity: int | None = Field(default=None, ge=1)
    """Atoms kept in replay, all states together; None: enough for `replay_capacity` transitions of the mean size."""

    updates_per_round: int = Field(default=16, ge=0)
    """Updates after each step of all structures side by side."""

    exploration_unit: Literal["forces", "bounds"] = "forces"
    """Noise of exploration and of TD3's smoothing is measured in F/k, the step the forces around an atom ask for, so
    that it shrinks on the way to the minimum; or in the greatest displacement allowed."""

    expert_share: float = Field(default=0.0, ge=0, le=1)
    """Share of steps that the expert takes at the start, random warm-up included (R8.3)."""

    expert_share_final: float = Field(default=0.0, ge=0, le=1)
    """Share at the end of the schedule."""

    expert_steps: int = Field(default=10_000, ge=1)
    """Environment steps until `expert_share_final` is reached; the imitation loss fades over the same."""

    imitation_weight: float = Field(default=0.0, ge=0)
    """Weight in the policy's loss of the relative squared distance to what the expert did, on its transitions; fades to
    0 within `expert_steps`."""

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


def reward_weights(text: str) -> dict[RewardName, float]:
    """From `log_force_decrease:1+step:0.5`."""
    weights: dict[RewardName, float] = {}
    for part in text.split("+"):
        name, _, value = (word.strip() for word in part.partition(":"))
        if name not in REWARDS:
            raise SettingsError(f"unknown reward '{name}': {nearest(name, REWARDS)}")
        try:
            weights[name] = float(value or 1)
        except ValueError as error:
            raise SettingsError(f"reward = '{text}': write {name}:NUMBER, got '{value}'") from error
    return weights
