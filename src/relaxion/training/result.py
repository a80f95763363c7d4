"""What a finished run says of itself, in result.json and in a sentence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """What result.json says. Returns are of the final assessment, undiscounted."""

    agent: str
    task: str
    seed: int
    steps: int
    final_return_mean: float
    final_return_worst: float
    episodes: int
    wall_time_seconds: float
    weights_sha256: str

    def sentence(self) -> str:
        """For the command line."""
        return (
            f"{self.agent} on {self.task}, seed {self.seed}: mean return {self.final_return_mean:.1f}, "
            f"worst {self.final_return_worst:.1f} after {self.steps} steps in {self.wall_time_seconds:.0f} s"
        )


@dataclass(frozen=True)
class RelaxationResult(Result):
    """On atoms, force calls per relaxation besides; failures are charged the cap."""

    final_force_calls_mean: float
    final_force_calls_median: float
    final_success_rate: float
    force_calls_bfgs: float
    force_calls_fire: float
    training_force_calls: int
    potential: str
    structures: str

    def sentence(self) -> str:
        return (
            f"{self.agent} on {self.structures} with {self.potential}, seed {self.seed}: "
            f"{self.final_force_calls_mean:.1f} force calls, {self.final_success_rate:.0%} converged "
            f"(BFGS {self.force_calls_bfgs:.1f}, FIRE {self.force_calls_fire:.1f}) "
            f"after {self.steps} steps in {self.wall_time_seconds:.0f} s"
        )
