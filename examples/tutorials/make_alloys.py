"""Write 10 000 small alloys of copper, gold and palladium into one file."""

import argparse

import numpy as np
from ase.build import bulk
from ase.io import write


def alloys(number):
    """Four atoms each: random elements, displaced by 0.1 Å."""
    random = np.random.default_rng(0)
    for place in range(number):
        atoms = bulk("Cu", a=3.8, cubic=True)
        atoms.symbols = random.choice(["Cu", "Au", "Pd"], size=4)
        atoms.rattle(0.1, rng=random)
        atoms.info["id"] = f"alloy-{place}"
        yield atoms


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=10_000)
    structures = list(alloys(parser.parse_args().number))
    write("alloys.extxyz", structures)
    print(f"{len(structures)} structures in alloys.extxyz")
