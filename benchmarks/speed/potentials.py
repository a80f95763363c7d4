"""How long 64 small alloys take: one batched call against one ASE call after the other. See README.md.

Energies, forces and stresses, neighbour search included, one thread. Rounds are interleaved (batched, ASE, batched,
ASE, ...) in one process, so that a busy machine slows both; positions change in every round, so that nothing is cached.
"""

from __future__ import annotations

import argparse
import gzip
import io
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import Calculator
from ase.calculators.eam import EAM
from ase.calculators.emt import EMT
from ase.calculators.lj import LennardJones as AseLennardJones
from ase.calculators.morse import MorsePotential

from relaxion.potentials import LennardJones, Morse, Potential, TabulatedEam, potential
from relaxion.potentials.eam import read_eam_tables
from relaxion.structures import Structures

METALS = ["Al", "Cu", "Ag", "Au", "Ni", "Pd", "Pt"]
VOLUME_PER_ATOM = 14.0  # Å³
NEAREST_DISTANCE = 1.8  # Å
RATTLE = 0.02  # Å, between rounds


def random_alloys(number: int, symbols: list[str], generator: np.random.Generator) -> list[Atoms]:
    """Periodic alloys of 2 to 16 atoms in skewed cells, no two atoms nearer than `NEAREST_DISTANCE` if possible."""
    images = []
    for _ in range(number):
        count = int(generator.integers(2, 17))
        cell = (VOLUME_PER_ATOM * count) ** (1 / 3) * (np.eye(3) + generator.normal(0, 0.1, (3, 3)))
        tries = [
            Atoms(generator.choice(symbols, count), generator.random((count, 3)) @ cell, cell=cell, pbc=True)
            for _ in range(30)
        ]
        images.append(max(tries, key=_nearest))
    return images


def _nearest(atoms: Atoms) -> float:
    distances = atoms.get_all_distances(mic=True)
    return min(NEAREST_DISTANCE, distances[np.triu_indices(len(atoms), 1)].min())


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def ask_ase(images: list[Atoms], calculator: Calculator) -> None:
    for atoms in images:
        atoms.calc = calculator
        atoms.get_potential_energy()
        atoms.get_forces()
        atoms.get_stress()


def compare(name: str, batched: Potential, calculator: Calculator | None, images: list[Atoms], rounds: int) -> None:
    """Print one row of the table."""
    generator = np.random.default_rng(0)
    ours, theirs = [], []
    for number in range(rounds + 1):
        for atoms in images:
            atoms.positions += generator.normal(0, RATTLE, atoms.positions.shape)
        structures = Structures.from_ase(images)
        times = [seconds(lambda: batched(structures, stresses=True))]  # noqa: B023  called at once
        if calculator is not None:
            times.append(seconds(lambda: ask_ase(images, calculator)))
        if number:  # the first round warms up
            ours.append(times[0])
            theirs += times[1:]
    row = f"| {name} | {len(images)} | {1e3 * statistics.median(ours):.1f} |"
    if theirs:
        ratios = [slow / fast for slow, fast in zip(theirs, ours, strict=True)]
        low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
        row += f" {1e3 * statistics.median(theirs):.0f} | **{middle:.0f}** ({low:.0f}–{high:.0f}) |"
    print(row if theirs else row + " – | – |", flush=True)


def compare_table(path: Path, generator: np.random.Generator, rounds: int) -> None:
    """The same for an EAM table; few structures, because ASE's EAM is slow."""
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    calculator = EAM(potential=io.StringIO(text), form="fs" if ".fs" in path.name else "alloy")
    symbols = read_eam_tables(path).elements
    batched = TabulatedEam.from_file(path)
    compare(f"EAM table {path.name}", batched, None, random_alloys(64, symbols, generator), rounds)
    compare(f"EAM table {path.name}", batched, calculator, random_alloys(4, symbols, generator), min(rounds, 3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--table", type=Path, action="append", default=[], help="EAM table to measure as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = np.random.default_rng(options.seed)
    images = random_alloys(64, METALS, generator)
    print(f"{len(images)} alloys, {sum(map(len, images))} atoms, {options.rounds} rounds, seed {options.seed}\n")
    print("| potential | structures | batched, ms | ASE one by one, ms | ratio: median (range) |")
    print("|---|---|---|---|---|")
    compare("EMT", potential("emt"), EMT(), images, options.rounds)
    lennard_jones, morse = {"sigma": 2.3, "epsilon": 0.3}, {"r0": 2.6, "epsilon": 0.4}
    compare(
        "Lennard-Jones",
        LennardJones(**lennard_jones),
        AseLennardJones(**lennard_jones),
        images,
        options.rounds,
    )
    compare("Morse", Morse(**morse), MorsePotential(**morse), images, options.rounds)
    compare("EAM, analytic (Zhou)", potential("eam"), None, images, options.rounds)
    for path in options.table:
        compare_table(path, generator, options.rounds)


if __name__ == "__main__":
    main()
