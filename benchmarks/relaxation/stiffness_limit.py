"""How few force calls could a better stiffness need? The Hessian of the potential itself in place of the network.

    python benchmarks/relaxation/stiffness_limit.py universal [--number 4] [--floors 0.5]

The starts are those of `own_kinds.py` (validation seed). At every base the Hessian is made by differences; its calls
are not counted. Negative eigenvalues are taken by their size and small ones are lifted to a floor. Everything else, the
guard, the trust radius and the counting, is as in use. Printed: mean calls, geometric mean of calls over the core's.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from own_kinds import ENGINE, calls, metric_calls, starts

from relaxion.networks.metric.network import pulls_of
from relaxion.networks.strains import strain_matrices
from relaxion.optimize.learned import Asked, DenseMetric, Metric, states_at
from relaxion.optimize.point import Array, Geometry
from relaxion.potentials import potential
from relaxion.potentials.potential import Potential
from relaxion.structures import Move, Structures

SHIFT, STRAIN = 0.01, 0.002  # Å, of the differences; and of strains
TOGETHER = 64  # structures evaluated at once


class HessianMetrics:
    """The stiffness that the potential has, positive by force."""

    def __init__(self, engine: Potential, floor: float) -> None:
        self.engine, self.floor = engine, floor

    def covers(self, geometry: Geometry) -> bool:
        return len(geometry.numbers) > 0

    def at(self, asked: Sequence[Asked], structures: Structures) -> Sequence[Metric]:
        return [self._at(one, structures.select(torch.tensor([place]))) for place, one in enumerate(asked)]

    def _at(self, asked: Asked, structure: Structures) -> Metric:
        geometry = asked.geometry
        n_atoms, free_cell = geometry.n_atoms, bool(geometry.cell_factor)
        number = 3 * n_atoms + 6 * free_cell
        steps = np.full(number, SHIFT)
        steps[3 * n_atoms :] = STRAIN
        moves = np.concatenate([np.diag(steps), -np.diag(steps)])
        pulls = self._pulls(asked, structure, moves)
        hessian = -(pulls[:number] - pulls[number:]) / (2 * steps[:, None])
        weights = np.ones(number)
        weights[3 * n_atoms :] = 1 / geometry.cell_factor if free_cell else 1.0
        scaled = weights[:, None] * (hessian + hessian.T) / 2 * weights
        values, vectors = np.linalg.eigh(scaled)
        positive = (vectors * np.maximum(np.abs(values), self.floor)) @ vectors.T
        free = np.concatenate([geometry.free[:n_atoms].ravel(), np.ones(6 * free_cell)]).astype(float)
        return DenseMetric(geometry, free, positive / weights[:, None] / weights)

    def _pulls(self, asked: Asked, structure: Structures, moves: Array) -> Array:
        n_atoms, rows = asked.geometry.n_atoms, list[Array]()
        state = states_at([asked.point], structure)
        for first in range(0, len(moves), TOGETHER):
            some = torch.from_numpy(moves[first : first + TOGETHER])
            copies = state.structures.select(torch.zeros(len(some), dtype=torch.int64))
            strains = torch.zeros((len(some), 3, 3), dtype=torch.float64)
            if moves.shape[1] > 3 * n_atoms:
                strains = strain_matrices(some[:, 3 * n_atoms :])
            moved = copies.moved(Move(some[:, : 3 * n_atoms].reshape(-1, 3), strains))
            evaluation = self.engine(moved, stresses=True)
            chosen = replace(state.select(torch.zeros(len(some), dtype=torch.int64)), structures=moved)
            found = pulls_of(replace(chosen, evaluation=evaluation))
            atoms = found.atoms.reshape(len(some), -1).numpy()
            own = [atoms, found.cells.numpy()] if moves.shape[1] > 3 * n_atoms else [atoms]
            rows.append(np.concatenate(own, axis=1))
        return np.concatenate(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("policies", nargs="*", help="names or files")
    parser.add_argument("--number", type=int, default=4, help="starts of each kind")
    parser.add_argument("--floors", type=float, nargs="+", default=[0.5], help="smallest stiffness, eV/Å²")
    parser.add_argument("--most-atoms", type=int, default=16)
    given = parser.parse_args()
    torch.set_num_threads(1)
    chgnet = potential(ENGINE)
    begun = [one for one in starts(chgnet, given.number) if len(one[0]) <= given.most_atoms]
    core = calls(None, begun, chgnet)
    free = np.array([cell for _, cell in begun])
    print(f"| {len(begun)} starts | mean calls | of the core's, fixed cell | free cell | median |\n{5 * '|---'}|")
    rows = {"core": core} | {name: calls(name, begun, chgnet) for name in given.policies}
    for name, own in rows.items():
        show(name, own, core, free)
    for floor in given.floors:
        show(
            f"Hessian, floor {floor:g}",
            metric_calls(HessianMetrics(potential(ENGINE), floor), begun, chgnet),
            core,
            free,
        )


def show(name: str, own: Array, core: Array, free: Array) -> None:
    logs = np.log(own / core)
    fixed, cell = np.exp(logs[free == 0].mean()), np.exp(logs[free == 1].mean())
    print(f"| {name} | {own.mean():.1f} | {fixed:.2f} | {cell:.2f} | {np.median(own):.0f} |", flush=True)


if __name__ == "__main__":
    main()
