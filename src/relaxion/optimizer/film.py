"""The way of a relaxation, for looking at: where the atoms were at each force call, and what had been proposed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from ase import Atoms
from ase.filters import Filter, FrechetCellFilter, UnitCellFilter
from numpy.typing import NDArray

from relaxion.optimizer.point import Array, Proposal, cell_ratio

LARGEST_BYTES = 64_000_000  # then every second frame goes: a film must never be what fills the memory
FARTHEST = 1e6  # Å; of an arrow
SAME_PLACE = 5e-4  # Å; a proposal that ended so near was executed as it was


@dataclass(frozen=True, eq=False)
class Frame:
    """One force call."""

    call: int  # from 1
    positions: NDArray[np.float32]  # (n_atoms, 3) Å
    cell: NDArray[np.float64]  # (3, 3) Å, rows are lattice vectors
    base_call: int | None = None  # where the move that led here began; None: at the start, or not known
    proposed: NDArray[np.float32] | None = None  # (n_atoms, 3) Å, from the base; None: as executed, or not known

    @property
    def size(self) -> int:
        return self.positions.nbytes + (0 if self.proposed is None else self.proposed.nbytes)


@dataclass
class Film:
    """Frames in order; thinned out by halves where they would need too much memory."""

    largest_bytes: int = LARGEST_BYTES
    frames: list[Frame] = field(default_factory=list)
    _every: int = 1  # only these calls are kept, and the newest
    _bytes: int = 0

    def add(self, frame: Frame) -> None:
        """Keep the newest in any case."""
        if self.frames and (self.frames[-1].call - 1) % self._every:
            self._bytes -= self.frames.pop().size
        self.frames.append(frame)
        self._bytes += frame.size
        while self._bytes > self.largest_bytes and len(self.frames) > 2:
            self._every *= 2
            *earlier, newest = self.frames
            self.frames = [*(kept for kept in earlier if (kept.call - 1) % self._every == 0), newest]
            self._bytes = sum(kept.size for kept in self.frames)


def frame_of(
    atoms: Atoms, call: int, base_call: int | None = None, proposed: tuple[Array, Array] | None = None
) -> Frame:
    """The atoms as they are now; `proposed`: from where to where they would have gone, Å."""
    positions = np.array(atoms.positions, dtype=np.float32)
    differs = proposed is not None and float(np.abs(proposed[1] - positions).max()) > SAME_PLACE
    wanted = None
    if proposed is not None and differs:  # a wild proposal is cut, not infinite: arrows of a film are drawn from it
        wanted = np.clip(proposed[1] - proposed[0], -FARTHEST, FARTHEST).astype(np.float32)
    return Frame(call, positions, np.array(atoms.cell), base_call, wanted)


def proposal_in_space(target: Atoms | Filter, proposal: Proposal) -> tuple[Array, Array] | None:
    """From where to where the atoms would go, Å, before limits and constraints; None where we cannot tell."""
    base = proposal.base.coordinates.copy()
    wanted = base + (proposal.step if proposal.wanted is None else proposal.wanted)
    for rows in (base, wanted):
        rows[-3:] /= cell_ratio(target)
    if isinstance(target, Atoms):
        return base, wanted
    geometry = proposal.base.geometry
    if geometry is None or not isinstance(target, UnitCellFilter):
        return None
    # ASE's two cell filters differ in a constant factor from release to release: the known cell of the base tells it
    known = np.linalg.solve(np.asarray(target.orig_cell), geometry.cell).T
    factor = np.cbrt(np.linalg.det(known) / np.linalg.det(_deformation(target, base)))
    return geometry.positions, wanted[:-3] @ (factor * _deformation(target, wanted)).T


def _deformation(target: UnitCellFilter, coordinates: Array) -> Array:
    """Of the cell at these coordinates of the filter, up to a factor."""
    if not isinstance(target, FrechetCellFilter):
        return coordinates[-3:]
    from scipy.linalg import expm

    return np.asarray(expm(coordinates[-3:] / target.exp_cell_factor), dtype=np.float64)
