"""Training with collectors on other cores or machines: Ray actors step structures, one learner stores and updates."""

from relaxion.scaling.collectors.places import Collectors

__all__ = ["Collectors"]
