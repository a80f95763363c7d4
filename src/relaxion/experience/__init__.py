"""Transitions and where they come from: environment, starts, exploration, expert, replay, normaliser."""

from relaxion.experience.environment import Environment, EnvironmentSettings
from relaxion.experience.starts import MixedStarts, PackedStarts, PerturbedStarts, Starts, fcc_alloys
from relaxion.experience.transition import Source, Transition

__all__ = [
    "Environment", "EnvironmentSettings", "MixedStarts", "PackedStarts", "PerturbedStarts", "Source",
    "Starts", "Transition", "fcc_alloys",
]  # fmt: skip
