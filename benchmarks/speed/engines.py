"""Structures evaluated per second: our batched engines beside the packages' own ASE calculators, one thread.

    OMP_NUM_THREADS=1 python benchmarks/speed/engines.py chgnet [FILE.extxyz.gz]

Crystals of 2 to 16 atoms, rattled by 0.05 Å; energies, forces, stresses; processor time, so that others on the machine
matter less. The best of three rounds.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ase import Atoms
from ase.build import bulk

from relaxion.potentials.registry import potential
from relaxion.structures import Structures
from relaxion.train.data.dataset import read

ROUNDS = 3
CRYSTALS = (
    ("NaCl", "rocksalt", 5.6), ("MgO", "rocksalt", 4.25), ("ZnS", "zincblende", 5.4), ("GaAs", "zincblende", 5.7),
    ("CsCl", "cesiumchloride", 4.1), ("CaF2", "fluorite", 5.5), ("C", "diamond", 3.57), ("Si", "diamond", 5.45),
    ("Cu", "fcc", 3.6), ("Al", "fcc", 4.05), ("Fe", "bcc", 2.87), ("W", "bcc", 3.17),
)  # fmt: skip


def crystals() -> list[Atoms]:
    images = []
    for symbols, kind, a in CRYSTALS:
        cubic = bulk(symbols, kind, a=a, cubic=True)
        images += [bulk(symbols, kind, a=a) * (2, 1, 1), cubic, cubic * (2, 1, 1)]
    images = [atoms for atoms in images if 2 <= len(atoms) <= 16]
    for seed, atoms in enumerate(images):
        atoms.rattle(0.05, seed=seed)
    return images


def crystals_of(file: str) -> list[Atoms]:
    """The first 64 with 2 to 16 atoms."""
    images = [atoms for atoms in read(Path(file)) if 2 <= len(atoms) <= 16][:64]
    for seed, atoms in enumerate(images):
        atoms.rattle(0.05, seed=seed)
    return images


def own_calculator(name: str) -> Any:
    if name == "chgnet":
        from chgnet.model.dynamics import CHGNetCalculator

        return CHGNetCalculator(use_device="cpu")
    raise SystemExit(f"{name} is not one of our batched engines: chgnet is")


def milliseconds(work: Callable[[], None], n_structures: int) -> float:
    """Of processor time per structure; the first round, in which things are compiled, does not count."""
    times = []
    for _ in range(ROUNDS + 1):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times[1:]) / n_structures * 1000


def main(words: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    files = [word for word in words if Path(word).exists()]
    names = [word for word in words if word not in files] or ["chgnet"]
    images = crystals_of(files[0]) if files else crystals()
    structures = Structures.from_ase(images)
    print(f"{len(images)} crystals, {structures.n_atoms} atoms")
    for name in names:
        engine, calculator = potential(name), own_calculator(name)

        def by_ase(calculator: Any = calculator) -> None:
            for atoms in images:
                calculator.reset()
                calculator.calculate(atoms, ["energy", "forces", "stress"])

        def one_by_one(engine: Any = engine) -> None:
            for number in range(len(images)):
                engine(structures.select(torch.tensor([number])), stresses=True)

        rows = {"its own ASE calculator": by_ase, "ours, one by one": one_by_one}
        rows["ours, all at once"] = lambda engine=engine: engine(structures, stresses=True)
        for label, work in rows.items():
            cost = milliseconds(work, len(images))
            print(f"{name:10s} {label:24s} {cost:7.1f} ms per structure, {1000 / cost:6.0f} per second", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
