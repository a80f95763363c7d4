"""What the policy `metals` is trained on."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from relaxion.settings import Settings


class MetalsSettings(Settings):
    """Kinds of structures, and how much of each."""

    emt_share: float = Field(default=0.5, ge=0, le=1)
    """Of the structures, those judged by EMT (7 metals); the rest by the analytic EAM (16 metals)."""

    smallest_n_atoms: int = Field(default=2, ge=1)
    """Atoms of the smallest structure."""

    largest_n_atoms: int = Field(default=16, ge=2)
    """Atoms of the largest one."""

    alloy_share: float = Field(default=0.5, ge=0)
    """Weight of random alloys on lattices among the kinds of starts."""

    vacancy_share: float = Field(default=0.1, ge=0)
    """Weight of alloys with a vacancy."""

    slab_share: float = Field(default=0.35, ge=0)
    """Weight of slabs, many with atoms on top, many with a fixed layer: the kind that is hardest to learn."""

    largest_slab_n_atoms: int = Field(default=27, ge=4)
    """Atoms of the largest slab, atoms on top not counted; the smallest has at least 4."""

    cluster_share: float = Field(default=0.1, ge=0)
    """Weight of random clusters, far from any minimum."""

    packing_share: float = Field(default=0.1, ge=0)
    """Weight of random packings in periodic cells, far from any minimum."""

    free_cell_share: float = Field(default=0.4, ge=0, le=1)
    """Of the crystals, those that are strained and relax with their cell."""

    largest_rattle_angstrom: float = Field(default=0.3, gt=0)
    """Widest Gaussian by which atoms are displaced."""

    gate_cluster_share: float = Field(default=0.25, ge=0)
    """Weight of random clusters for the gate, which has most to learn far from minima."""

    gate_packing_share: float = Field(default=0.25, ge=0)
    """Weight of random packings for the gate."""

    @model_validator(mode="after")
    def _something_to_learn(self) -> Self:
        if self.smallest_n_atoms > self.largest_n_atoms:
            raise ValueError(
                f"smallest_n_atoms {self.smallest_n_atoms} is above largest_n_atoms {self.largest_n_atoms}"
            )
        if not self.shares or not self.gate_shares:
            raise ValueError("all shares of the kinds of starts are 0; give at least one of them a weight")
        return self

    @property
    def shares(self) -> dict[str, float]:
        """By the names of `metric_starts.KINDS`, those that occur."""
        every = {
            "alloy": self.alloy_share,
            "vacancy": self.vacancy_share,
            "slab": self.slab_share,
            "cluster": self.cluster_share,
            "packing": self.packing_share,
        }
        return {name: share for name, share in every.items() if share > 0}

    @property
    def gate_shares(self) -> dict[str, float]:
        """The same with more far starts."""
        far = {"cluster": self.gate_cluster_share, "packing": self.gate_packing_share}
        return {name: share for name, share in (self.shares | far).items() if share > 0}
