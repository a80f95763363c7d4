"""Generators make the structures that they made before they were written once: every set, kind and source, by hash.

Coordinates are rounded to 1e-4 Å, because processors differ in the last bits.
`python tests/regression/test_generated_structures.py` prints what is made now, with --bits to the last bit.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms

from relaxion import potential
from relaxion.apps import comparison as sets
from relaxion.structures import Structures
from relaxion.train.data.alloys import EAM_METALS, EMT_METALS, fcc_alloys
from relaxion.train.data.kinds import CollectSettings, make_start
from relaxion.train.data.perturbations import perturbation
from relaxion.train.data.slabs import ADSORBATES
from relaxion.train.data.starts import KINDS, MetalStarts, PerturbedStarts, structure_source

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "relaxation"))  # last: `tables` is PyTables too

from molecular_sets import MOLECULAR_SETS

SETS = sets.SETS | MOLECULAR_SETS

RECORDED = Path(__file__).with_name("structures.json")
MIXTURE = {"alloy": 3.0, "vacancy": 1.0, "slab": 1.0, "cluster": 0.5, "packing": 0.5}
WORLDS = {"emt": (EMT_METALS, ADSORBATES), "eam": (EAM_METALS, ())}
SOURCES = ("alloys:Al-Cu-Ni:2-16", "packings:Al-Cu:2-8", "b2:AlCu", "alloys:Al-Cu:2-6 + packings:Al-Cu:2-8")
PERTURBATIONS = ("rattle:0.1", "uniform:0.3", "strain:0.05", "vacancy:1+strain:0.05+rattle:0.2")
MAKERS = ("prototype", "element", "perovskite", "packing", "surface", "molecule", "metal")


def digest(images: Sequence[Atoms], *, bits: bool = False) -> str:
    """Of numbers, axes, coordinates and fixed atoms."""
    own = hashlib.sha256()
    for atoms in images:
        own.update(atoms.numbers.astype(np.int64).tobytes())
        own.update(np.asarray(atoms.pbc, dtype=bool).tobytes())
        for values in (_positions(atoms), atoms.cell.array):
            own.update(((values if bits else np.round(values, 4)) + 0.0).tobytes())
        own.update(str(sorted(int(k) for fixed in atoms.constraints for k in fixed.index)).encode())
    return own.hexdigest()[:16]


def _positions(atoms: Atoms) -> np.ndarray:
    """In the cell. At its border the processor decides on which side ASE's `surface` puts an atom."""
    cell = atoms.cell.complete()
    places = cell.scaled_positions(atoms.positions)
    places -= np.where(atoms.pbc, np.floor(places + 1e-6), 0.0)
    return places @ cell.array


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def metals(world: str, kind: str, free_share: float, bits: bool) -> str:
    elements, adsorbates = WORLDS[world]
    starts = MetalStarts(elements, (4, 20), {kind: 1.0}, free_share=free_share, adsorbates=adsorbates, largest_slab=30)
    found = starts.sample(seeded(8500), 6)
    return digest(found.to_ase(), bits=bits) + "".join("01"[free] for free in found.cell_free.tolist())


def collected(side: str, make: str, bits: bool) -> str:
    kind = {"make": make, "engine": "emt", "free_cell_share": 0.5, "largest_n_atoms": 20}
    settings = CollectSettings.of({"kinds": {make: {**kind, "smallest_n_atoms": 3}}, "side": side}, {})
    starts = [make_start(settings, make, number) for number in range(6)]
    return digest([start.structure(1.02).to_ase()[0] for start in starts], bits=bits) + starts[0].key


def bench(name: str, bits: bool) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sets, "equilibrium", lambda atoms: atoms)  # an engine's numbers are another test's business
        return digest(SETS[name].starts(6, 9000), bits=bits)


def pool() -> Structures:
    return fcc_alloys(("Al", "Cu", "Pt"), 5, seeded(1), n_atoms=8, cell_free=True)


def sampled(starts: Callable[[], PerturbedStarts | MetalStarts], bits: bool) -> str:
    return digest(starts().sample(seeded(2), 7).to_ase(), bits=bits)


def source(text: str, bits: bool) -> str:
    return digest(structure_source(text)(6, seeded(5), potential("emt")), bits=bits)


Make = Callable[..., str]
CASES: dict[str, Make] = {f"bench/{name}": partial(bench, name) for name in SETS}
CASES |= {
    f"training/{world}/{kind}/{share}": partial(metals, world, kind, share)
    for kind in KINDS
    for world in WORLDS
    for share in (0.0, 0.5)
}
CASES["training/mixed"] = partial(sampled, lambda: MetalStarts(shares=MIXTURE))
CASES |= {f"sources/{text}": partial(source, text) for text in SOURCES}
CASES |= {
    f"perturbed/{word}": partial(sampled, partial(lambda w: PerturbedStarts(pool(), [perturbation(w)]), word))
    for word in PERTURBATIONS
}
CASES["starts/fcc_alloys"] = lambda bits: digest(pool().to_ase(), bits=bits)
CASES |= {
    f"collecting/{side}/{make}": partial(collected, side, make)
    for make in MAKERS
    for side in ("training", "assessment")
    if (make, side) != ("metal", "assessment")  # no metal of EMT is held out
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_seeds_still_make_the_same_structures(name: str) -> None:
    if name.startswith(("bench/crystals", "bench/new", "bench/perov", "bench/carbon", "bench/mp-", "collecting/")):
        pytest.importorskip("pymatgen.core")
    assert CASES[name](bits=False) == json.loads(RECORDED.read_text())[name]


def test_every_recorded_case_is_looked_at() -> None:
    assert set(json.loads(RECORDED.read_text())) == set(CASES)


if __name__ == "__main__":
    made = {name: make(bits="--bits" in sys.argv) for name, make in CASES.items()}
    sys.stdout.write(json.dumps(made, indent=1) + "\n")
