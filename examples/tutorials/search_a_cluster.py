"""Search for the lowest minimum of a gold–copper cluster of 19 atoms."""

import argparse

from ase.cluster import Octahedron
from ase.io import write

import relaxion


def cluster():
    """An octahedron with gold on every second atom, displaced by 0.2 Å."""
    atoms = Octahedron("Cu", 3)
    atoms.symbols[::2] = "Au"
    atoms.rattle(0.2, seed=1)
    return atoms


def search(calls):
    """The calls are a budget: the search never makes more."""
    result = relaxion.search(cluster(), "emt", calls=calls, seed=0)
    print(f"{result.force_calls} force calls, {len(result.history)} hops, {len(result.minima)} distinct minima")
    for found in result.found[:3]:
        print(f"  {found.energy_ev:.3f} eV, found {found.times_found} times, first after {found.found_at_call} calls")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=600)
    write("cluster.xyz", cluster())
    write("lowest.xyz", search(parser.parse_args().calls).minima[0])
