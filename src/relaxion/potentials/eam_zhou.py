"""The analytic alloy EAM of Zhou, Johnson and Wadley, Phys. Rev. B 69, 144113 (2004): 16 metals.

Numbers: Zhou's own parameter file (`EAM_code`, distributed with LAMMPS), compared number by number with two
tables typed by others (OpenMD's, identical; one of the printed paper). Where the latter, called paper here, differs:

- Ni, densities above 1.15 ρ_e: paper ρ_s 27.93041, η 0.469, F_e -2.699486; file 27.562031, 0.44547, -2.7.
  Both join on smoothly (within 5e-7 eV), so continuity does not decide. Taken: the file, as LAMMPS users do.
- W: paper η -0.582714, file +0.582714. Taken: plus, which joins on (4e-8 eV; minus leaves a step of 2 meV).
- Pt: paper ρ_n = 0.85 ρ_e, file 0.25 ρ_e. Taken: 0.25, which joins on (6e-8 eV; 0.85 leaves 2.6 eV).

Cutoff: √5·max(r_e) of the two atoms, the fifth shell of fcc, as in Zhou's tabulation, but pair by pair, so
that a structure does not depend on what else is in the batch. The functions are not quite zero there, so a
C² switch takes them to zero over the last tenth, beyond four shells of fcc. Against functions followed to 3 r_e
this moves lattice constants by less than 1e-4 of their length and energies by 0.2 meV per atom at most (hcp;
0.04 meV in fcc). An isolated atom has 0 eV to the 1e-6 of the printed digits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from relaxion.potentials.pairwise import ElementPotential, PairTerms, pick, smooth_step
from relaxion.structures import Structures

CUTOFF_FACTOR = math.sqrt(5)  # times the larger r_e
SWITCH_SHARE = 0.1  # of the cutoff, at its end
UPPER_JOINT = 1.15  # ρ_0/ρ_e; below it the polynomial, above it the logarithmic branch

# F1 is zero for all. Units: r_e Å, energies eV, the rest none.
# fmt: off
COLUMNS: tuple[str, ...] = (
    "r_e", "f_e", "rho_e", "rho_s", "alpha", "beta", "A", "B", "kappa", "lambda",
    "Fn0", "Fn1", "Fn2", "Fn3", "F0", "F2", "F3", "eta", "Fe", "rho_n/rho_e",
)
PARAMETERS: dict[str, tuple[float, ...]] = {
    "Cu": (2.556162, 1.554485, 21.175871, 21.175395, 8.12762, 4.334731,
           0.39662, 0.548085, 0.308782, 0.756515, -2.170269, -0.263788, 1.088878, -0.817603,
           -2.19, 0.56183, -2.100595, 0.31049, -2.186568, 0.85),
    "Ag": (2.891814, 1.106232, 14.6041, 14.604144, 9.13201, 4.870405,
           0.277758, 0.419611, 0.33971, 0.750758, -1.729364, -0.255882, 0.91205, -0.561432,
           -1.75, 0.744561, -1.15065, 0.783924, -1.748423, 0.85),
    "Au": (2.885034, 1.529021, 19.991632, 19.991509, 9.516052, 5.075228,
           0.229762, 0.356666, 0.35657, 0.748798, -2.937772, -0.500288, 1.601954, -0.83553,
           -2.98, 1.706587, -1.134778, 1.021095, -2.978815, 0.85),
    "Ni": (2.488746, 2.007018, 27.562015, 27.562031, 8.383453, 4.471175,
           0.429046, 0.633531, 0.443599, 0.820658, -2.693513, -0.076445, 0.241442, -2.375626,
           -2.7, 0.26539, -0.152856, 0.44547, -2.7, 0.85),
    "Pd": (2.750897, 1.595417, 21.335246, 21.940073, 8.697397, 4.638612,
           0.406763, 0.59888, 0.397263, 0.754799, -2.321006, -0.473983, 1.615343, -0.231681,
           -2.36, 1.481742, -1.675615, 1.13, -2.352753, 0.85),
    "Pt": (2.771916, 2.336509, 33.367564, 35.205357, 7.105782, 3.78975,
           0.556398, 0.696037, 0.385255, 0.77051, -1.455568, -2.149952, 0.528491, 1.222875,
           -4.17, 3.010561, -2.420128, 1.45, -4.145597, 0.25),
    "Al": (2.863924, 1.403115, 20.418205, 23.19574, 6.613165, 3.527021,
           0.314873, 0.365551, 0.379846, 0.759692, -2.807602, -0.301435, 1.258562, -1.247604,
           -2.83, 0.622245, -2.488244, 0.785902, -2.824528, 0.85),
    "Pb": (3.499723, 0.647872, 8.450154, 8.450063, 9.121799, 5.212457,
           0.161219, 0.236884, 0.250805, 0.764955, -1.42237, -0.210107, 0.682886, -0.529378,
           -1.44, 0.702726, -0.538766, 0.93538, -1.439436, 0.85),
    "Fe": (2.481987, 1.885957, 20.041463, 20.041463, 9.81827, 5.236411,
           0.392811, 0.646243, 0.170306, 0.340613, -2.534992, -0.059605, 0.193065, -2.282322,
           -2.54, 0.200269, -0.14877, 0.39175, -2.539945, 0.85),
    "Mo": (2.7281, 2.72371, 29.354065, 29.354065, 8.393531, 4.47655,
           0.708787, 1.120373, 0.13764, 0.27528, -3.692913, -0.178812, 0.38045, -3.13365,
           -3.71, 0.875874, 0.776222, 0.790879, -3.712093, 0.85),
    "Ta": (2.860082, 3.086341, 33.787168, 33.787168, 8.489528, 4.527748,
           0.611679, 1.032101, 0.176977, 0.353954, -5.103845, -0.405524, 1.112997, -3.585325,
           -5.14, 1.640098, 0.221375, 0.848843, -5.141526, 0.85),
    "W": (2.74084, 3.48734, 37.234847, 37.234847, 8.900114, 4.746728,
          0.882435, 1.394592, 0.139209, 0.278417, -4.946281, -0.148818, 0.365057, -4.432406,
          -4.96, 0.661935, 0.348147, 0.582714, -4.961306, 0.85),
    "Mg": (3.196291, 0.544323, 7.1326, 7.1326, 10.228708, 5.455311,
           0.137518, 0.22593, 0.5, 1.0, -0.896473, -0.044291, 0.162232, -0.68995,
           -0.9, 0.122838, -0.22601, 0.431425, -0.899702, 0.85),
    "Co": (2.505979, 1.975299, 27.206789, 27.206789, 8.679625, 4.629134,
           0.421378, 0.640107, 0.5, 1.0, -2.541799, -0.219415, 0.733381, -1.589003,
           -2.56, 0.705845, -0.68714, 0.694608, -2.559307, 0.85),
    "Ti": (2.933872, 1.8632, 25.565138, 25.565138, 8.775431, 4.68023,
           0.373601, 0.570968, 0.5, 1.0, -3.203773, -0.198262, 0.683779, -2.321732,
           -3.22, 0.608587, -0.75071, 0.558572, -3.219176, 0.85),
    "Zr": (3.199978, 2.230909, 30.879991, 30.879991, 8.55919, 4.564902,
           0.424667, 0.640054, 0.5, 1.0, -4.485793, -0.293129, 0.990148, -3.202516,
           -4.51, 0.928602, -0.98187, 0.597133, -4.509025, 0.85),
}
# fmt: on


class ZhouEam(ElementPotential):
    """E = Σ_i F(Σ_j f_j(r)) + Σ_pairs φ(r); φ of unlike atoms is mixed from the pure metals by density."""

    name = "EAM (Zhou 2004)"

    def __init__(self) -> None:
        super().__init__(list(PARAMETERS))
        columns = torch.tensor(list(PARAMETERS.values()), dtype=torch.float64).T.contiguous()
        self._columns = dict(zip(COLUMNS, columns, strict=True))  # each (n_kinds,)

    def cutoff_for(self, structures: Structures) -> float:
        present = self.kinds_of(structures.atomic_numbers).unique()
        return CUTOFF_FACTOR * float(self._columns["r_e"][present].max())

    def pair_terms(self, distances: Tensor, kinds: Tensor) -> PairTerms:
        r_e = pick(self._columns["r_e"], kinds)  # (2, n_pairs) Å, row per end
        density, density_decay = self._cut_exponential(distances, kinds, r_e, "beta", "lambda")
        repulsion, repulsion_decay = self._cut_exponential(distances, kinds, r_e, "alpha", "kappa")
        repulsion = repulsion * pick(self._columns["A"], kinds)
        attraction = density * pick(self._columns["B"], kinds)
        density = density * pick(self._columns["f_e"], kinds)
        pure = repulsion - attraction  # φ of each end with its own kind, eV
        pure_slopes = attraction * density_decay - repulsion * repulsion_decay
        # φ_ab = ½ (f_b/f_a φ_aa + f_a/f_b φ_bb)
        ratios = density.flip(0) / density
        ratio_slopes = ratios * (density_decay - density_decay.flip(0))
        energies = (ratios * pure).sum(dim=0) / 2
        energy_slopes = (ratios * pure_slopes + ratio_slopes * pure).sum(dim=0) / 2
        cutoffs = CUTOFF_FACTOR * r_e.amax(dim=0)
        switch, switch_slopes = smooth_step(distances, (1 - SWITCH_SHARE) * cutoffs, cutoffs)
        felt, felt_decay = density.flip(0), density_decay.flip(0)  # an end feels the other
        return PairTerms(
            energies=energies * switch,
            energy_slopes=energy_slopes * switch + energies * switch_slopes,
            densities=felt * switch,
            density_slopes=felt * (switch_slopes - felt_decay * switch),
        )

    def _cut_exponential(
        self, distances: Tensor, kinds: Tensor, r_e: Tensor, decay_name: str, onset_name: str
    ) -> tuple[Tensor, Tensor]:
        """g = e^(-a(x-1)) / (1 + (x-b)²⁰) with x = r/r_e, and -g'/g in 1/Å; both (2, n_pairs)."""
        scaled = distances / r_e
        decay = pick(self._columns[decay_name], kinds)
        beyond = scaled - pick(self._columns[onset_name], kinds)
        square = beyond * beyond
        fourth = square * square
        sixteenth = fourth * fourth * fourth * fourth
        damping = 1 + sixteenth * fourth
        values = torch.exp(decay * (1 - scaled)) / damping
        return values, (decay + 20 * sixteenth * square * beyond / damping) / r_e

    def embedding(self, densities: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
        at = {name: column[kinds] for name, column in self._columns.items()}
        joint = at["rho_n/rho_e"] * at["rho_e"]
        zero = torch.zeros_like(joint)
        thin = _cubic(densities, joint, at["Fn0"], at["Fn1"], at["Fn2"], at["Fn3"])
        usual = _cubic(densities, at["rho_e"], at["F0"], zero, at["F2"], at["F3"])
        dense = _logarithmic(densities, at["rho_s"], at["eta"], at["Fe"])
        is_thin, is_dense = densities < joint, densities >= UPPER_JOINT * at["rho_e"]
        energies, slopes = (
            torch.where(is_thin, low, torch.where(is_dense, high, middle))
            for low, middle, high in zip(thin, usual, dense, strict=True)
        )
        return energies, slopes


def _cubic(density: Tensor, center: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_k c_k (ρ/center - 1)^k and its derivative."""
    x = density / center - 1
    return c0 + x * (c1 + x * (c2 + x * c3)), (c1 + x * (2 * c2 + x * 3 * c3)) / center


def _logarithmic(density: Tensor, rho_s: Tensor, eta: Tensor, energy: Tensor) -> tuple[Tensor, Tensor]:
    """F_e (1 - η ln y) y^η with y = ρ/ρ_s, and its derivative; used at high density only."""
    safe = density.clamp_min(1e-300)  # the branch is also computed where it is not used
    logarithm = torch.log(safe / rho_s)
    power = energy * torch.exp(eta * logarithm)
    return power * (1 - eta * logarithm), -power * eta * eta * logarithm / safe
