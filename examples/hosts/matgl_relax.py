"""matgl's `Relaxer` with relaxion's: `optimizer=relaxion.Relaxer`. Give the name of a matgl model to download it."""

import sys

import matgl
import torch
from comparison import FMAX, alloy, compare
from matgl.apps.pes import Potential
from matgl.ext.ase import PESCalculator
from matgl.ext.ase import Relaxer as MatglRelaxer


class Morse(torch.nn.Module):
    """A pair potential in the form of a matgl model, for machines that cannot download weights."""

    element_types, cutoff = ("Cu", "Au"), 6.0  # Å

    def forward(self, g, **_):
        lengths = (g.pos[g.edge_index[1]] + g.pbc_offshift - g.pos[g.edge_index[0]]).norm(dim=1)
        decay = torch.exp(-1.4 * (lengths - 2.75))
        return 0.5 * (0.35 * (decay**2 - 2 * decay) * (1 - (lengths / self.cutoff) ** 2) ** 2).sum()


potential = matgl.load_model(sys.argv[1]) if len(sys.argv) > 1 else Potential(Morse())


def relax(optimizer, cell):
    answer = MatglRelaxer(potential, optimizer=optimizer, relax_cell=cell).relax(alloy(), fmax=FMAX)
    return answer["trajectory"].energies[-1]


if __name__ == "__main__":
    compare(relax, PESCalculator, "FIRE")
