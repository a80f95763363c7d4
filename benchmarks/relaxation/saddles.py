"""Are the ends minima? Saddle points that `Relaxer(atoms, leave_saddles=True)` finds, and what it spends on that.

    python benchmarks/relaxation/saddles.py metals molecules perovskites prototypes [--seed 8510] [--number 24]

Symmetric starts, nothing displaced: adatoms on high-symmetry sites, flat clusters and chains, metals in foreign
lattices (EMT); flat, straight and eclipsed molecules beside ordinary ones (GFN2-xTB); cubic perovskites of one or two
cells, and unrelaxed prototypes (CHGNet). Both ends, without and with `leave_saddles`, are judged by the whole Hessian,
made by differences (0.015 Å, both ways) in what may move; a negative eigenvalue counts as far as differences along its
vector (0.04 Å, both ways) confirm it: CHGNet is rough. Fmax 0.05 eV/Å, at most 150 calls. At a saddle point the lowest
curvature is below -0.05 eV/Å², at a clear one below -0.2. Seeds below 9000 are for choices.
"""

from __future__ import annotations

import argparse
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from ase import Atoms
from ase.build import add_adsorbate, bulk, fcc100, fcc111, molecule
from ase.constraints import FixAtoms
from ase.filters import Filter, FrechetCellFilter

from relaxion import Relaxer
from relaxion.optimizer.point import place, read_point
from relaxion.optimizer.saddles import NEGATIVE, zero_modes
from relaxion.potentials import potential
from relaxion.potentials.counting import ase_calculator
from relaxion.train.data.prototypes import random_crystal, random_perovskite

ENGINES = {"metals": "emt", "molecules": "gfn2", "perovskites": "chgnet", "prototypes": "chgnet"}
FMAX, MOST_CALLS, DIFFERENCE = 0.05, 150, 0.015  # eV/Å; Å
CLEAR = -0.2  # eV/Å²
CONFIRMED = 0.04  # Å, along eigenvectors of negative curvature, as atoms feel it
METALS = {"Ni": 2.35, "Cu": 2.4, "Pd": 2.6, "Ag": 2.75, "Pt": 2.6, "Au": 2.75, "Al": 2.7}  # Å, bonds of clusters

Random = np.random.Generator


@dataclass(frozen=True)
class End:
    """Where one relaxation came to."""

    converged: bool
    calls: int
    check_calls: int
    energy_ev: float
    lowest_ev_per_angstrom2: float  # eigenvalue of the whole Hessian
    seen_ev_per_angstrom2: float | None  # by the check
    saddles_left: int
    first_check: float | None  # the lowest curvature seen at the first end
    note: str


def adatom(random: Random) -> Atoms:
    metal, other = random.choice(list(METALS), 2)
    make, sites = [(fcc100, ("bridge", "ontop", "hollow")), (fcc111, ("bridge", "ontop", "fcc"))][random.integers(2)]
    atoms = make(str(metal), (int(random.integers(2, 4)), 2, 3), vacuum=6.0)
    add_adsorbate(atoms, str(other), 1.9, str(random.choice(sites)))
    atoms.set_constraint(FixAtoms(np.flatnonzero(atoms.get_tags() == 3)))
    return atoms


def flat_cluster(random: Random) -> Atoms:
    metal, kind = str(random.choice(list(METALS))), random.integers(4)
    ring = [(np.cos(turn), np.sin(turn), 0) for turn in np.arange(6) * np.pi / 3]
    n, m = (int(number) for number in random.integers(2, 4, 2))
    places = {
        0: [(0, 0, 0), *ring],
        1: [(i, j, 0) for i in range(n) for j in range(2)],
        2: [(i, 0, 0) for i in range(n + 1)],
        3: [(i + j / 2, j * 3**0.5 / 2, 0) for i in range(n) for j in range(m)],
    }[int(kind)]
    return Atoms(metal * len(places), METALS[metal] * np.array(places, dtype=float))


def foreign_lattice(random: Random) -> Atoms:
    one, other = (str(metal) for metal in random.choice(list(METALS), 2))
    kind = int(random.integers(4))
    if kind == 0:
        return bulk(one, "bcc", a=3.0, cubic=True) * (2, 1, 1)
    if kind == 1:
        return bulk(one, "sc", a=2.6) * (2, 1, 1)
    if kind == 2:
        atoms = bulk(one, "fcc", a=4.0, cubic=True)
        atoms.symbols[0] = other
        return atoms
    places = [(0, 0, 0), (0.5, 0.5, 0.5)]
    return Atoms([one, other], scaled_positions=places, cell=np.eye(3) * 3.0, pbc=True) * (1, 1, 2)


def star(symbols: str, length: float) -> Atoms:
    """Three atoms around one, all in a plane."""
    turns = np.arange(3) * 2 * np.pi / 3
    return Atoms(symbols, [(0, 0, 0), *((length * np.cos(turn), length * np.sin(turn), 0) for turn in turns)])


def ring(n_carbon: int) -> Atoms:
    """A flat ring of CH₂."""
    radius = 1.54 / (2 * np.sin(np.pi / n_carbon))
    turns = 2 * np.pi * np.arange(n_carbon) / n_carbon
    carbon = [(radius * np.cos(turn), radius * np.sin(turn), 0) for turn in turns]
    out = radius + 0.6
    hydrogen = [(out * np.cos(turn), out * np.sin(turn), z) for turn in turns for z in (0.88, -0.88)]
    return Atoms(f"C{n_carbon}H{2 * n_carbon}", carbon + hydrogen)


def eclipsed_ethane() -> Atoms:
    turns = np.arange(3) * 2 * np.pi / 3
    ends = [(x, 1.02 * np.cos(turn), 1.02 * np.sin(turn)) for x in (-0.4, 1.93) for turn in turns]
    return Atoms("C2H6", [(0, 0, 0), (1.53, 0, 0), *ends])


def eclipsed_butane() -> Atoms:
    """With both ends on the same side."""
    atoms = molecule("trans-butane")
    carbon = [atom.index for atom in atoms if atom.symbol == "C"]
    distances = atoms.get_all_distances()
    bonded = {i: [j for j in carbon if j != i and distances[i, j] < 1.7] for i in carbon}
    first, second = (i for i in carbon if len(bonded[i]) == 2)
    ends = [next(j for j in bonded[i] if len(bonded[j]) == 1) for i in (first, second)]
    axis = atoms.positions[second] - atoms.positions[first]
    middle = (atoms.positions[second] + atoms.positions[first]) / 2
    half = [i for i in range(len(atoms)) if i != second and np.dot(atoms.positions[i] - middle, axis) > 0]
    atoms.set_dihedral(ends[0], first, second, ends[1], 0.0, indices=half)
    return atoms


def shapes() -> list[Atoms]:
    """Flat, straight and eclipsed molecules, and ordinary ones."""
    hydrogens = [(-0.5, 0.87, 0), (-0.5, -0.87, 0), (1.9, 0.87, 0), (1.9, -0.87, 0)]
    methyl = [(-0.4, 1.02, 0), (-0.4, -0.5, 0.89), (-0.4, -0.5, -0.89), (1.95, 0.87, 0), (1.95, -0.87, 0)]
    twisted = [(-0.55, 0.93, 0), (-0.55, -0.93, 0), (1.95, 0, 0.93), (1.95, 0, -0.93)]
    return [
        Atoms("OH2", [(0, 0, 0), (0, 0, 0.95), (0, 0, -0.95)]),
        Atoms("SH2", [(0, 0, 0), (0, 0, 1.33), (0, 0, -1.33)]),
        star("NH3", 1.0),
        star("PH3", 1.38),
        Atoms("O2H2", [(0, 0, 0), (1.45, 0, 0), (-0.2, 0.95, 0), (1.65, -0.95, 0)]),
        Atoms("O2H2", [(0, 0, 0), (1.45, 0, 0), (-0.2, 0.95, 0), (1.65, 0.95, 0)]),
        eclipsed_ethane(),
        Atoms("N2H4", [(0, 0, 0), (1.4, 0, 0), *hydrogens]),
        Atoms("CNH5", [(0, 0, 0), (1.45, 0, 0), *methyl]),
        eclipsed_butane(),
        ring(6),
        ring(4),
        ring(5),
        Atoms("C2H4", [(0, 0, 0), (1.4, 0, 0), *twisted]),
        *(molecule(name) for name in ("CH3OH", "HCOOH", "C6H6", "CH3CHO", "C2H6", "CO2", "C2H4", "H2CO")),
    ]


def start_of(family: str, seed: int, number: int) -> tuple[Atoms, bool]:
    """A start, and whether its cell is free."""
    random = np.random.default_rng([seed, number])
    if family == "metals":
        kind = (adatom, flat_cluster, foreign_lattice)[number % 3]
        return kind(random), kind is foreign_lattice
    if family == "molecules":
        every = shapes()
        atoms = every[number % len(every)]
        atoms.set_cell(np.zeros((3, 3)))
        atoms.pbc = False
        atoms.positions *= random.uniform(0.97, 1.03)
        return atoms, False
    if family == "perovskites":
        atoms = random_perovskite(random, side="assessment" if seed >= 9000 else "training")
        free = bool(random.random() < 0.5)
    else:
        atoms, free = random_crystal(random, side="assessment" if seed >= 9000 else "training", sizes=(2, 12)), True
    atoms = Atoms(atoms.numbers, atoms.positions, cell=atoms.cell, pbc=True)
    return atoms * ((2, 1, 1) if family == "perovskites" and number % 2 else (1, 1, 1)), free


def lowest(target: Atoms | Filter) -> float:
    """Lowest eigenvalue of the whole Hessian, eV/Å²; where it is below the bound, what is met along its vector.

    The atoms are left where they were.
    """
    point = read_point(target)
    assert point.geometry is not None
    size, shape = point.coordinates.size, point.coordinates.shape

    def product(direction: np.ndarray, length: float) -> np.ndarray:
        found = []
        for sign in (1, -1):
            place(target, point.coordinates + sign * length * direction.reshape(shape))
            found.append(read_point(target).forces.ravel())
        return (found[1] - found[0]) / (2 * length)

    free = np.flatnonzero(point.geometry.free.ravel())
    columns = np.array([product(np.eye(size)[which], DIFFERENCE) for which in free])[:, free]
    zero = zero_modes(point)[free]
    inside = np.eye(len(free)) - zero @ zero.T
    values, vectors = np.linalg.eigh(inside @ (columns + columns.T) @ inside / 2 + 1e3 * zero @ zero.T)
    met = [float(values[0])]
    if (
        values[0] < NEGATIVE
    ):  # rough potentials, and coordinates of strained cells, have Hessians that are not symmetric
        met = []
        for vector in vectors.T[values < NEGATIVE][:3]:
            direction = np.zeros(size)
            direction[free] = vector
            met.append(float(direction @ product(direction, CONFIRMED / point.reach(direction.reshape(shape)))))
    place(target, point.coordinates)
    return min(met) if len(free) > zero.shape[1] else np.inf


def ended(start: Atoms, free: bool, engine: str, *, leave: bool) -> End:
    atoms = start.copy()
    atoms.calc = ase_calculator(potential(engine))
    target = FrechetCellFilter(atoms) if free else atoms
    relaxer = Relaxer(target, logfile=None, leave_saddles=leave)
    converged = relaxer.run(FMAX, MOST_CALLS)
    check = relaxer.end_check
    firsts = [entry.reason for entry in relaxer.history if entry.method == "saddle"]
    first = float(firsts[0].split()[-2]) if firsts else check.lowest_curvature_ev_per_angstrom2
    return End(
        converged,
        relaxer.force_calls,
        check.calls,
        atoms.get_potential_energy(),
        lowest(target) if converged else np.nan,
        check.lowest_curvature_ev_per_angstrom2,
        len(check.saddle_energies_ev),
        first,
        check.note,
    )


def run(family: str, seed: int, number: int, out: Path | None) -> list[tuple[End, End]]:
    found = list[tuple[End, End]]()
    done = [json.loads(line) for line in out.read_text().splitlines()] if out is not None and out.exists() else []
    known = {(one["family"], one["seed"], one["number"]): one for one in done}
    for place_of in range(number):
        if one := known.get((family, seed, place_of)):
            found.append((End(**one["without"]), End(**one["with"])))
            continue
        start, free = start_of(family, seed, place_of)
        pair = tuple(ended(start, free, ENGINES[family], leave=leave) for leave in (False, True))
        found.append((pair[0], pair[1]))
        line = {"family": family, "seed": seed, "number": place_of, "formula": str(start.symbols), "free": free}
        if out is not None:
            with out.open("a") as file:
                file.write(json.dumps(line | {"without": asdict(pair[0]), "with": asdict(pair[1])}) + "\n")
    return found


def show(family: str, found: list[tuple[End, End]]) -> None:
    both = [(plain, left) for plain, left in found if plain.converged and left.converged]
    saddles = [pair for pair in both if pair[0].lowest_ev_per_angstrom2 < NEGATIVE]
    clear = [pair for pair in both if pair[0].lowest_ev_per_angstrom2 < CLEAR]
    seen = [sum(left.saddles_left > 0 for _, left in some) for some in (saddles, clear)]
    wrong = sum(plain.lowest_ev_per_angstrom2 > NEGATIVE and left.saddles_left > 0 for plain, left in both)
    still = [sum(left.lowest_ev_per_angstrom2 < bound for _, left in both) for bound in (NEGATIVE, CLEAR)]
    checks = np.mean([left.check_calls / (1 + left.saddles_left) for _, left in both])
    gain = [plain.energy_ev - left.energy_ev for plain, left in saddles]
    cells = [
        f"{len(both)} ({len(found) - len(both)} not converged)",
        f"{len(saddles)} ({len(clear)} clear)",
        f"{seen[0]} ({seen[1]} clear; {wrong} elsewhere)",
        f"{still[0]} ({still[1]} clear)",
        f"{np.mean([plain.calls for plain, _ in both]):.1f}",
        f"{np.mean([left.calls for _, left in both]):.1f}",
        f"{checks:.1f}",
        f"{np.median(gain):.3f}" if gain else "",
    ]
    print(f"| {family} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="+", choices=list(ENGINES))
    parser.add_argument("--seed", type=int, default=8510)
    parser.add_argument("--number", type=int, default=24, help="starts of each family")
    parser.add_argument("--out", type=Path, help="one JSON line per start; those that are there are not done again")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    heads = "family | starts | ends at saddle points | left | saddle points after | calls | with `leave_saddles` | "
    print(f"| {heads}calls of a check | median gain, eV |\n{'|---' * 9}|")
    for family in given.families:
        show(family, run(family, given.seed, given.number, given.out))


if __name__ == "__main__":
    main()
