"""Settings of the gate that old runs of the task `metals` may name; none is trained any more."""

from __future__ import annotations

from pydantic import Field

from relaxion.settings import Settings


class GateTaskSettings(Settings):
    """What a relaxation is for the gate."""

    lowest_tolerance_ev_per_angstrom: float = Field(default=0.01, gt=0)
    """Tolerances are drawn anew for each relaxation, evenly in the logarithm, from here …"""

    highest_tolerance_ev_per_angstrom: float = Field(default=0.05, gt=0)
    """… to here: the range that users ask for."""

    gate_max_force_calls: int = Field(default=100, ge=2)
    """Relaxations are cut after so many."""

    shaping: float = Field(default=1.0, ge=0)
    """Reward for each decade by which the largest force falls, beside -1 for every force call."""

    discount_factor: float = Field(default=0.99, ge=0, le=1)
    """γ of the agent; shaping by it leaves the best policy what it is (Ng et al. 1999)."""

    departure_penalty: float = Field(default=0.5, ge=0)
    """Weight in the policy's loss, in force calls, of the summed squares of the action: critics that know little must
    not drive the gate away from the hand-made rule. With 0 gates came out worse than the rule (docs/metals.md)."""

    gate_start_force_limit_ev_per_angstrom: float = Field(default=1e3, gt=0)
    """Starts with a larger force are drawn again."""
