"""Potentials of the form E = Σ_pairs φ(r) + Σ_atoms F(ρ), ρ_i = Σ_j ρ_ij(r), with derivatives by hand.

Every pair is visited once and nothing is taped, which is several times faster than automatic derivatives.
The arithmetic is float64 always; the answer has the precision of the structures.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
import torch
from ase.data import atomic_numbers
from torch import Tensor

from relaxion.errors import SettingsError
from relaxion.potentials.base import Potential
from relaxion.structures import Evaluation, Structures
from relaxion.structures.state import Pairs
from relaxion.structures.structures import per_structure_sum

BondNetwork: TypeAlias = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Atomic numbers, ends of the pairs, their vectors -> energies of the atoms eV, and dE/dr of the pairs eV/Å."""


@dataclass(frozen=True, eq=False)
class PairTerms:
    """What the functions of distance say. Row 0 of a density is what atom i feels of j, row 1 the reverse."""

    energies: Tensor  # (n_pairs,) eV
    energy_slopes: Tensor  # (n_pairs,) eV/Å
    densities: Tensor | None = None  # (2, n_pairs), unit of the potential
    density_slopes: Tensor | None = None  # (2, n_pairs), per Å


class PairwisePotential(Potential):
    """A subclass gives a cutoff and `pair_terms`, and `embedding` if its atoms feel a density."""

    cutoff: float  # Å

    def cutoff_for(self, structures: Structures) -> float:  # noqa: ARG002  one for all
        """How far neighbours matter, Å; overridden where it depends on the structures."""
        return self.cutoff

    @abstractmethod
    def pair_terms(self, distances: Tensor, kinds: Tensor) -> PairTerms:
        """Functions of the distances (n_pairs,) Å between atoms of `kinds` (2, n_pairs)."""

    def embedding(self, densities: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
        """Energies (n_atoms,) eV of atoms in a density, and their derivatives by it."""
        raise NotImplementedError(f"{self.name} has pair densities but no embedding function")

    def kinds_of(self, atomic_numbers: Tensor) -> Tensor:
        """Numbers by which the subclass finds its parameters; here the atomic numbers."""
        return atomic_numbers

    @final
    def evaluate(self, structures: Structures, stresses: bool) -> Evaluation:
        pairs = Pairs.of(structures, self.cutoff_for(structures))
        kinds = self.kinds_of(structures.atomic_numbers)
        distances = torch.linalg.vector_norm(pairs.vectors, dim=1)  # (n_pairs,) Å
        terms = self.pair_terms(distances, pick(kinds, pairs.ends))
        atom_energies, slopes = self._embed(terms, pairs, kinds)
        pulls = pairs.vectors * (slopes / distances)[:, None]  # (n_pairs, 3) eV/Å, dE/dr towards j
        atom_energies.index_add_(0, pairs.ends[0], terms.energies)
        return evaluation_of_pairs(structures, pairs, atom_energies, pulls, stresses)

    def _embed(self, terms: PairTerms, pairs: Pairs, kinds: Tensor) -> tuple[Tensor, Tensor]:
        """Embedding energies of the atoms, and dE/dr of every pair, embedding included."""
        if terms.densities is None or terms.density_slopes is None:
            return torch.zeros(kinds.shape, dtype=torch.float64), terms.energy_slopes
        densities = torch.zeros(kinds.shape, dtype=torch.float64)
        densities.index_add_(0, pairs.ends.flatten(), terms.densities.flatten())
        energies, slopes = self.embedding(densities, kinds)
        through_density = (pick(slopes, pairs.ends) * terms.density_slopes).sum(dim=0)
        return energies, terms.energy_slopes + through_density


class ElementPotential(PairwisePotential):
    """A pairwise potential with parameters for some elements; the kind of an atom is their row."""

    def __init__(self, symbols: Sequence[str]) -> None:
        super().__init__()
        numbers = [atomic_numbers[symbol] for symbol in symbols]
        self._elements = frozenset(numbers)
        self._kind_of_number = torch.full((max(numbers) + 1,), -1)
        self._kind_of_number[numbers] = torch.arange(len(numbers))

    @property
    def elements(self) -> frozenset[int]:
        return self._elements

    def kinds_of(self, atomic_numbers: Tensor) -> Tensor:
        return pick(self._kind_of_number, atomic_numbers)


def pick(table: Tensor, index: Tensor) -> Tensor:
    """`table[index]` for an index of any shape; several times faster than writing it so."""
    return table.index_select(0, index.flatten()).view(index.shape + table.shape[1:])


def smooth_step(distances: Tensor, start: float | Tensor, end: float | Tensor) -> tuple[Tensor, Tensor]:
    """1 - 10t³ + 15t⁴ - 6t⁵, from 1 at `start` to 0 at `end`, twice differentiable; and its derivative."""
    t = ((distances - start) / (end - start)).clamp(0, 1)
    return 1 - t * t * t * (10 + t * (6 * t - 15)), -30 * (t * (1 - t)) ** 2 / (end - start)


def evaluation_of_pairs(
    structures: Structures, pairs: Pairs, atom_energies: Tensor, pulls: Tensor, stresses: bool
) -> Evaluation:
    """From energies of the atoms (n_atoms,) eV and dE/dr of every pair (n_pairs, 3) eV/Å."""
    energies = per_structure_sum(atom_energies, structures.structure_index, structures.n_structures)
    return Evaluation(
        energies=energies.to(structures.dtype),
        forces=forces_of_pairs(structures.n_atoms, pairs, pulls).to(structures.dtype),
        stresses=stresses_of_pairs(structures, pairs, pulls).to(structures.dtype) if stresses else None,
    )


def evaluated_in_portions(
    structures: Structures, pairs: Pairs, network: BondNetwork, pairs_at_once: int, stresses: bool
) -> Evaluation:
    """The answer of a network that is asked about some whole structures at a time: more fall out of the cache."""
    atom_energies = torch.empty(structures.n_atoms, dtype=torch.float64)
    slopes = torch.empty_like(pairs.vectors)  # (n_pairs, 3) eV/Å, dE/dr
    for atoms, bonds in portions(structures, pairs, pairs_at_once):
        atom_energies[atoms], slopes[bonds] = network(
            structures.atomic_numbers[atoms], pairs.ends[:, bonds] - atoms.start, pairs.vectors[bonds]
        )
    return evaluation_of_pairs(structures, pairs, atom_energies, slopes, stresses)


def on_device(network: BondNetwork, device: torch.device) -> BondNetwork:
    """The network as if it were on the CPU, where structures are: questions go to its device, answers return."""

    def moved(*questions: Tensor) -> tuple[Tensor, Tensor]:
        energies, slopes = network(*(question.to(device) for question in questions))
        return energies.cpu(), slopes.cpu()

    return moved


def forces_of_pairs(n_atoms: int, pairs: Pairs, pulls: Tensor) -> Tensor:
    """From dE/dr of every pair, (n_pairs, 3) eV/Å."""
    # two sums and one difference: index_add_ with alpha=-1 takes four times as long
    onto_first = pulls.new_zeros((n_atoms, 3)).index_add_(0, pairs.ends[0], pulls)
    onto_second = pulls.new_zeros((n_atoms, 3)).index_add_(0, pairs.ends[1], pulls)
    return onto_first - onto_second  # (n_atoms, 3) eV/Å


def portions(structures: Structures, pairs: Pairs, pairs_at_once: int) -> Iterator[tuple[slice, slice]]:
    """Atoms and pairs of as many whole structures as have no more than `pairs_at_once`, or of one."""
    first_atom = first_pair = atom = pair = 0
    for n_atoms, n_pairs in zip(structures.counts.tolist(), pairs.counts, strict=True):
        if pair > first_pair and pair + n_pairs - first_pair > pairs_at_once:
            yield slice(first_atom, atom), slice(first_pair, pair)
            first_atom = atom
            first_pair = pair
        atom = atom + n_atoms
        pair = pair + n_pairs
    yield slice(first_atom, atom), slice(first_pair, pair)


def stresses_of_pairs(structures: Structures, pairs: Pairs, pulls: Tensor) -> Tensor:
    """(1/V) Σ r ⊗ dE/dr, zero where there is no volume."""
    vectors = pairs.vectors.numpy()
    pulls_array = pulls.numpy()
    virials = np.empty((structures.n_structures, 3, 3))  # eV
    start = 0
    # small matrix products in a loop: five times faster than outer products summed by index
    for number, count in enumerate(pairs.counts):
        end = start + count
        np.matmul(vectors[start:end].T, pulls_array[start:end], out=virials[number])
        start = end
    volumes = structures.volumes.detach().to(torch.float64)[:, None, None]
    stresses = torch.from_numpy(virials) / volumes.clamp_min(1e-300)
    return torch.where(volumes > 0, (stresses + stresses.transpose(1, 2)) / 2, 0.0)  # eV/Å³


# ---- Lennard-Jones and Morse, with the defaults and the meaning of ASE's calculators, for any element.

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
        self.sigma = sigma
        self.epsilon = epsilon
        self.smooth = smooth
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
        square = distances**2
        end = self.cutoff**2
        start = self.onset**2
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
        self.epsilon = epsilon
        self.rho0 = rho0
        self.r0 = r0
        self.start = switch_start * r0
        self.cutoff = switch_end * r0
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
