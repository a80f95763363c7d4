"""Lennard-Jones and Morse, with the defaults and the meaning of ASE's calculators, for any element."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from relaxion.errors import SettingsError
from relaxion.potentials.pairwise import PairTerms, PairwisePotential, smooth_step

ONSET_SHARE = 0.66  # of the cutoff, where smoothing starts (ASE's default)


class LennardJones(PairwisePotential):
    """4ε ((σ/r)¹² - (σ/r)⁶), equal to `ase.calculators.lj.LennardJones`.

    smooth=False, ASE's default, shifts the energy to 0 at the cutoff, where forces jump by 24ε/σ·(σ/r)⁷:
    0.01 ε/σ at the default 3σ. smooth=True multiplies by a polynomial from `onset` to `cutoff`: no jump.
    """

    name = "Lennard-Jones"

    def __init__(
        self,
        *,
        sigma: float = 1.0,
        epsilon: float = 1.0,
        cutoff: float | None = None,
        smooth: bool = False,
        onset: float | None = None,
    ) -> None:
        """Lengths in Å, `epsilon` in eV; cutoff 3σ and onset 0.66·cutoff unless given."""
        super().__init__()
        self.sigma, self.epsilon, self.smooth = sigma, epsilon, smooth
        self.cutoff = 3 * sigma if cutoff is None else cutoff
        self.onset = ONSET_SHARE * self.cutoff if onset is None else onset
        _check_lengths(self.name, sigma=sigma, onset=self.onset, cutoff=self.cutoff)

    def pair_terms(self, distances: Tensor, kinds: Tensor) -> PairTerms:  # noqa: ARG002  all kinds alike
        sixth = (self.sigma / distances) ** 6
        energies = 4 * self.epsilon * (sixth * sixth - sixth)
        slopes = -24 * self.epsilon * (2 * sixth * sixth - sixth) / distances
        if not self.smooth:
            at_cutoff = (self.sigma / self.cutoff) ** 6
            return PairTerms(energies - 4 * self.epsilon * (at_cutoff**2 - at_cutoff), slopes)
        switch, switch_slopes = self._switch(distances)
        return PairTerms(energies * switch, slopes * switch + energies * switch_slopes)

    def _switch(self, distances: Tensor) -> tuple[Tensor, Tensor]:
        """ASE's cubic in r², once differentiable at both ends."""
        square, end, start = distances**2, self.cutoff**2, self.onset**2
        inside = (square > start).to(square)
        t = (square.clamp(start, end) - start) / (end - start)
        return 1 - t * t * (3 - 2 * t), -12 * t * (1 - t) * distances / (end - start) * inside


class Morse(PairwisePotential):
    """ε (e^(-2ρ0(r/r0-1)) - 2 e^(-ρ0(r/r0-1))), equal to `ase.calculators.morse.MorsePotential`.

    A twice differentiable switch takes it to zero between `switch_start` and `switch_end`, in units of r0.
    """

    name = "Morse"

    def __init__(
        self,
        *,
        epsilon: float = 1.0,
        rho0: float = 6.0,
        r0: float = 1.0,
        switch_start: float = 1.9,
        switch_end: float = 2.7,
    ) -> None:
        """`epsilon` in eV, `r0` in Å; the others have no unit (ASE calls the last two rcut1 and rcut2)."""
        super().__init__()
        self.epsilon, self.rho0, self.r0 = epsilon, rho0, r0
        self.start, self.cutoff = switch_start * r0, switch_end * r0
        _check_lengths(self.name, r0=r0, switch_start=self.start, switch_end=self.cutoff)

    def pair_terms(self, distances: Tensor, kinds: Tensor) -> PairTerms:  # noqa: ARG002  all kinds alike
        decay = torch.exp(self.rho0 * (1 - distances / self.r0))
        energies = self.epsilon * decay * (decay - 2)
        slopes = -2 * self.epsilon * self.rho0 / self.r0 * decay * (decay - 1)
        switch, switch_slopes = smooth_step(distances, self.start, self.cutoff)
        return PairTerms(energies * switch, slopes * switch + energies * switch_slopes)


def _check_lengths(name: str, **lengths: float) -> None:
    """Each above zero, the last one above the last but one."""
    for key, value in lengths.items():
        if not (value > 0 and math.isfinite(value)):
            raise SettingsError(f"{name}: {key} must be a number above 0, got {value}")
    (before, start), (after, end) = list(lengths.items())[-2:]
    if not start < end:
        raise SettingsError(f"{name}: {before} ({start:g} Å) must be below {after} ({end:g} Å)")
