"""The embedded atom method from tables (`eam_tables`), through cubic splines as in `ase.calculators.eam.EAM`.

Like ASE: not-a-knot splines of F, ρ and φ = rφ/r, the first point of φ left out because rφ is 0 there. It
differs in two ways, both outside the tables:

- F beyond the last density goes on as a straight line, as in LAMMPS. ASE goes on with the last cubic, which
  can turn to either side; crowded random structures do get there.
- distances count up to one spacing after the last point, where a well made table has its cutoff, not further.

Finnis–Sinclair densities: ASE and LAMMPS agree (section: the source; table within it: the site).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from scipy.interpolate import CubicSpline
from torch import Tensor

from relaxion.potentials.eam import EamTables, read_eam_tables
from relaxion.potentials.pairwise import ElementPotential, PairTerms, pick


class Splines:
    """Several cubic splines over one set of equally spaced points, evaluated together."""

    def __init__(self, start: float, spacing: float, values: np.ndarray) -> None:
        self.start, self.spacing = start, spacing
        self.n_intervals = values.shape[1] - 1
        points = start + spacing * np.arange(values.shape[1])
        coefficients = CubicSpline(points, values, axis=1, bc_type="not-a-knot").c  # (4, n_intervals, n_splines)
        by_spline = np.ascontiguousarray(coefficients.transpose(2, 1, 0)).reshape(-1, 4)
        self.coefficients = torch.from_numpy(by_spline)  # (n_splines · n_intervals, 4), highest power first

    def __call__(self, which: Tensor, at: Tensor, *, straight_ends: bool = False) -> tuple[Tensor, Tensor]:
        """Values and derivatives of spline `which` at `at`, both of any one shape.

        Outside the points the outermost cubic goes on, or a straight line with its last slope.
        """
        inside = at
        if straight_ends:
            inside = at.clamp(self.start, self.start + self.spacing * self.n_intervals)
        interval = ((inside - self.start) / self.spacing).floor().clamp(0, self.n_intervals - 1)
        x = inside - (self.start + self.spacing * interval)
        rows = pick(self.coefficients, which * self.n_intervals + interval.long())
        a, b, c, d = rows.unbind(-1)
        slopes = (3 * a * x + 2 * b) * x + c
        values = ((a * x + b) * x + c) * x + d
        return values + slopes * (at - inside), slopes


class TabulatedEam(ElementPotential):
    """E = Σ_i F_i(Σ_j ρ_ji(r)) + Σ_pairs φ_ij(r), all from a file."""

    def __init__(self, tables: EamTables, name: str = "EAM") -> None:
        super().__init__(tables.elements)
        self.name, self.tables_sha256 = name, tables.sha256
        self._n_kinds = len(tables.elements)
        spacing, n_points = tables.distance_spacing, tables.densities.shape[2]
        self.cutoff = min(tables.cutoff, spacing * n_points)
        flat = self._n_kinds**2
        distances = spacing * np.arange(1, n_points)
        pair_energies = tables.pair_products[:, :, 1:] / distances
        self._embedding = Splines(0.0, tables.density_spacing, tables.embedding)
        self._densities = Splines(0.0, spacing, tables.densities.reshape(flat, n_points))
        self._pairs = Splines(spacing, spacing, pair_energies.reshape(flat, n_points - 1))

    @classmethod
    def from_file(cls, path: str | Path) -> TabulatedEam:
        """From a `.eam.alloy`, `.eam.fs` or `.fs` file, plain or gzipped."""
        return cls(read_eam_tables(path), name=f"EAM ({Path(path).name})")

    def pair_terms(self, distances: Tensor, kinds: Tensor) -> PairTerms:
        sources = kinds.flip(0)  # the other end makes the density this end feels
        pair_energies, pair_slopes = self._pairs(kinds[0] * self._n_kinds + kinds[1], distances)
        densities, density_slopes = self._densities(sources * self._n_kinds + kinds, distances.expand(kinds.shape))
        return PairTerms(pair_energies, pair_slopes, densities, density_slopes)

    def embedding(self, densities: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
        return self._embedding(kinds, densities, straight_ends=True)
