"""Steps along internal coordinates: what a step means to first order for bonds, bends and torsions is carried out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import scipy.sparse

from relaxion.optimizer.hessian.internal.coordinates import difference
from relaxion.optimizer.hessian.internal.model import Factor, Place
from relaxion.optimizer.hessian.internal.topology import Topology
from relaxion.optimizer.point import Array, Geometry, longest

WEIGHTS = (40.0, 4.0, 4.0, 0.5, 0.5)  # of bonds, bends, straight bends, torsions and wags
CARTESIAN_WEIGHT = 0.01  # of the straight step: where molecules turn or move as a whole
ITERATIONS = 5
GOOD = 1e-4  # Å, the last correction
LONGEST = 1.5  # times the straight step


def moved(geometry: Geometry, step: Array) -> Geometry:
    """The geometry after a step, cell included."""
    number = geometry.n_atoms
    if not geometry.cell_factor:
        return replace(geometry, positions=geometry.positions + step)
    growth = np.eye(3) + step[number:] / geometry.cell_factor
    positions = (geometry.positions + step[:number]) @ growth.T
    return replace(geometry, positions=positions, cell=geometry.cell @ growth.T)


def along_internals(place: Place, step: Array, largest: float, reach: Callable[[Array], float] = longest) -> Array:
    """The curved step whose internal coordinates change as the straight one says to first order.

    A few Gauss-Newton iterations on Σ w (q₀ + G·d - q(x))² + w_x |d - (x - x₀)|²; the straight step where that fails.
    `largest`: no atom goes farther, Å, measured by `reach`.
    """
    found = step
    for _ in range(ITERATIONS):
        correction = _correction(place, step, found)
        if correction is None:
            return step
        found = found + correction
        if not reach(found) < LONGEST * reach(step):  # not a number is not smaller
            return step
        if reach(correction) < GOOD:
            break
    return found * min(1.0, largest / max(reach(found), 1e-12))


def _correction(place: Place, step: Array, found: Array) -> Array | None:
    """One iteration; None where there is no answer."""
    topology, geometry = place.topology, place.geometry
    here = Place(topology, moved(geometry, found))
    missing = place.slopes @ step.ravel() - difference(topology, here.values.q, place.values.q)
    weighted = here.slopes.T @ scipy.sparse.diags_array(weights_of(topology))
    matrix = weighted @ here.slopes
    floor = CARTESIAN_WEIGHT * scipy.sparse.eye_array(matrix.shape[0])
    right = weighted @ missing + CARTESIAN_WEIGHT * (step - found).ravel()
    try:
        return Factor(matrix + floor).solve(right).reshape(step.shape) * geometry.free
    except (np.linalg.LinAlgError, RuntimeError):  # SuperLU's singular matrix
        return None


def weights_of(topology: Topology) -> Array:
    counts = (topology.n_bonds, len(topology.bends), 2 * len(topology.straight), len(topology.torsions))
    return np.repeat(WEIGHTS, (*counts, len(topology.wags)))
