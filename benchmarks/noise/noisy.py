"""Controlled noise on top of a potential: what self-consistent calculations do to energies and forces, made repeatable.

For tests and benchmarks of optimizers. The noise of a geometry is drawn from the geometry, so asking twice gives the
same answer, and nothing is smooth: as with a code that starts each calculation from other electrons.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np
import torch
from relaxion.potentials.base import Potential

from relaxion.structures import Evaluation, Structures


@dataclass(frozen=True)
class Noise:
    """Standard deviations."""

    force: float = 0.0  # eV/Å, of each component
    energy: float = 0.0  # eV, of a structure
    stress: float = 0.0  # eV/Å³, of each component
    jump: float = 0.0  # eV; the energy is shifted by so much whenever the volume has changed by `jump_volume`
    jump_volume: float = 0.01  # relative: plane waves come and go with the cell


class Noisy(Potential):
    """A potential that errs."""

    def __init__(self, inner: Potential, noise: Noise, seed: int = 0) -> None:
        super().__init__()
        self.inner, self.noise, self.seed = inner, noise, seed
        self.name, self.has_stress = f"noisy {inner.name}", inner.has_stress

    @property
    def elements(self) -> frozenset[int] | None:
        return self.inner.elements

    def evaluate(self, structures: Structures, stresses: bool) -> Evaluation:
        exact = self.inner.evaluate(structures, stresses)
        energies, forces = exact.energies.clone(), exact.forces.clone()
        tensors = None if exact.stresses is None else exact.stresses.clone()
        start = 0
        for number, end in enumerate(structures.counts.cumsum(0).tolist()):
            random = self._random(structures.positions[start:end].numpy(), structures.cells[number].numpy())
            energies[number] += self.noise.energy * random.standard_normal() + self._jump(structures, number)
            forces[start:end] += torch.from_numpy(self.noise.force * random.standard_normal((end - start, 3)))
            if tensors is not None:
                error = self.noise.stress * random.standard_normal((3, 3))
                tensors[number] += torch.from_numpy((error + error.T) / 2)
            start = end
        return replace(exact, energies=energies, forces=forces, stresses=tensors)

    def _jump(self, structures: Structures, number: int) -> float:
        if self.noise.jump == 0.0:
            return 0.0
        basis = int(np.log(max(float(structures.volumes[number]), 1e-300)) / self.noise.jump_volume)
        return self.noise.jump * float(np.random.default_rng([self.seed, basis % 2**31]).standard_normal())

    def _random(self, *arrays: np.ndarray) -> np.random.Generator:
        code = hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)).digest()
        return np.random.default_rng([self.seed, *code[:8]])
