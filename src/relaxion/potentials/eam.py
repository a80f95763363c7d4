"""The embedded atom method: tables, and the analytic one of Zhou for 16 metals.

The embedded atom method from tables (`eam_tables`), through cubic splines as in `ase.calculators.eam.EAM`.

Like ASE: not-a-knot splines of F, ρ and φ = rφ/r, the first point of φ left out because rφ is 0 there. It
differs in two ways, both outside the tables:

- F beyond the last density goes on as a straight line, as in LAMMPS. ASE goes on with the last cubic, which
  can turn to either side; crowded random structures do get there.
- distances count up to one spacing after the last point, where a well made table has its cutoff, not further.

Finnis–Sinclair densities: ASE and LAMMPS agree (section: the source; table within it: the site).

The analytic alloy EAM of Zhou, Johnson and Wadley, Phys. Rev. B 69, 144113 (2004): 16 metals.

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

import gzip
import hashlib
import io
import math
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from ase.data import atomic_numbers
from scipy.interpolate import CubicSpline
from torch import Tensor

from relaxion.errors import FileError
from relaxion.files import check_regular
from relaxion.potentials.pairwise import ElementPotential, PairTerms, pick, smooth_step
from relaxion.structures import Structures

EXPECTED = "expected a LAMMPS setfl (.eam.alloy) or Finnis–Sinclair (.eam.fs) table"
COMMENT_LINES = 3
LARGEST_VALUE = 1e100  # no energy, density or product; splines through larger ones overflow
LARGEST_TABLE = 1 << 28  # bytes; the largest that are published have some ten million
WORDS_ABOUT_ELEMENT = 4  # atomic number, mass, lattice constant, lattice
FEWEST_POINTS = 4  # of a cubic spline


@dataclass(frozen=True, eq=False)
class EamTables:
    """The functions at equal spacing, from 0."""

    elements: list[str]
    density_spacing: float
    distance_spacing: float  # Å
    cutoff: float  # Å
    embedding: np.ndarray  # (n_elements, n_rho) eV
    densities: np.ndarray  # (n_elements, n_elements, n_r), [source, site]
    pair_products: np.ndarray  # (n_elements, n_elements, n_r) r·φ, eV·Å, symmetric

    @property
    def sha256(self) -> str:
        """Of all numbers."""
        scales = (self.density_spacing, self.distance_spacing, self.cutoff)
        hasher = hashlib.sha256(f"{self.elements} {scales}".encode())
        for table in (self.embedding, self.densities, self.pair_products):
            hasher.update(np.ascontiguousarray(table).tobytes())
        return hasher.hexdigest()


def read_eam_tables(path: str | Path) -> EamTables:
    """Tables from a file; `FileError` says what is wrong with it."""
    lines = _read_lines(Path(path))
    words = " ".join(lines[COMMENT_LINES:]).split()
    try:
        return _Reader(words).read()
    except (ValueError, IndexError) as error:
        raise FileError(f"{path} cannot be read: {EXPECTED}, but {str(error)[:300]}") from error


def _read_lines(path: Path) -> list[str]:
    try:
        check_regular(path)
        content = path.read_bytes()
        plain = _unpacked(content) if content[:2] == b"\x1f\x8b" else content
    except FileNotFoundError as error:
        raise FileError(f"there is no file {path}; {EXPECTED}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise FileError(f"{path} cannot be read ({error}); {EXPECTED}, plain or gzipped") from error
    # comments are in any encoding; bytes are split because str also splits at characters that only look like breaks
    return [line.decode("utf-8", errors="replace") for line in plain.splitlines()]


def _unpacked(content: bytes) -> bytes:
    """No more than tables have: a few kilobytes of gzip can stand for gigabytes."""
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        plain = file.read(LARGEST_TABLE + 1)
    if len(plain) > LARGEST_TABLE:
        raise OSError(f"unpacked it has more than {LARGEST_TABLE >> 20} MB")
    return plain


class _Reader:
    """Takes words from the front; a ValueError says what they should have been."""

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.at = 0

    def read(self) -> EamTables:
        elements = self._elements()
        n_rho = self._count("n_rho")
        density_spacing = self._positive("drho")
        n_r = self._count("n_r")
        distance_spacing = self._positive("dr")
        cutoff = self._positive("cutoff")
        per_section = self._densities_per_element(len(elements), n_rho, n_r)
        embedding = []
        densities = []
        for _ in elements:
            self.at += WORDS_ABOUT_ELEMENT
            embedding.append(self._numbers(n_rho))
            rows = self._numbers(per_section * n_r).reshape(per_section, n_r)
            densities.append(np.broadcast_to(rows, (len(elements), n_r)))
        products = np.zeros((len(elements), len(elements), n_r))
        for i in range(len(elements)):
            for j in range(i + 1):
                products[i, j] = products[j, i] = self._numbers(n_r)
        return EamTables(
            elements,
            density_spacing,
            distance_spacing,
            cutoff,
            np.stack(embedding),
            np.stack(densities),
            products,
        )

    def _elements(self) -> list[str]:
        count = self._whole("the number of elements on line 4")
        if count > len(self.words):
            raise ValueError(f"line 4 names {count} elements")
        elements = [self._word("an element") for _ in range(count)]
        strangers = [element for element in elements if element not in atomic_numbers]
        if count < 1 or strangers or len(set(elements)) < count:
            raise ValueError(f"line 4 names the elements {elements}")
        return elements

    def _densities_per_element(self, n_elements: int, n_rho: int, n_r: int) -> int:
        """1 in a setfl file, n_elements in a Finnis–Sinclair file, told by the number of values left."""
        found = len(self.words) - self.at
        pairs = n_elements * (n_elements + 1) // 2
        rest = n_elements * (WORDS_ABOUT_ELEMENT + n_rho) + pairs * n_r
        choices = {rest + n_elements * n_r: 1, rest + n_elements**2 * n_r: n_elements}
        fitting = [count for count in choices if count == found] or [
            count for count in choices if count < found and not _is_number(self.words[self.at + count])
        ]
        if not fitting:
            counts = " or ".join(str(count) for count in choices)
            raise ValueError(f"after its header it has {found} values where its sizes ask for {counts}")
        return choices[fitting[0]]

    def _numbers(self, count: int) -> np.ndarray:
        words = self.words[self.at : self.at + count]
        self.at += count
        values = np.array([_decimal(word) for word in words], dtype=np.float64)
        if not (np.abs(values) < LARGEST_VALUE).all():  # nor is NaN
            raise ValueError("a table holds values that are not finite, or far too large")
        return values

    def _word(self, what: str) -> str:
        if self.at >= len(self.words):
            raise ValueError(f"it ends before {what}")
        self.at += 1
        return self.words[self.at - 1]

    def _whole(self, what: str) -> int:
        word = self._word(what)
        if not word.isdigit():
            raise ValueError(f"{what} is '{word}', not a whole number")
        return int(word)

    def _count(self, what: str) -> int:
        count = self._whole(what)
        if count < FEWEST_POINTS:
            raise ValueError(f"{what} is {count}; a spline needs {FEWEST_POINTS} points")
        return count

    def _positive(self, what: str) -> float:
        word = self._word(what)
        value = float(_decimal(word))
        if not 0 < value < np.inf:
            raise ValueError(f"{what} is {word}, not above 0")
        return value


def _decimal(word: str) -> str:
    """Fortran writes 1.0D-3."""
    return word.replace("D", "E").replace("d", "e")


def _is_number(word: str) -> bool:
    try:
        float(_decimal(word))
    except ValueError:
        return False
    return True


class Splines:
    """Several cubic splines over one set of equally spaced points, evaluated together."""

    def __init__(self, start: float, spacing: float, values: np.ndarray) -> None:
        self.start = start
        self.spacing = spacing
        self.n_intervals = values.shape[1] - 1
        points = start + spacing * np.arange(values.shape[1])
        coefficients = CubicSpline(points, values, axis=1, bc_type="not-a-knot").c  # (4, n_intervals, n_splines)
        by_spline = np.ascontiguousarray(coefficients.transpose(2, 1, 0)).reshape(-1, 4)
        self.coefficients = torch.from_numpy(by_spline)  # (n_splines · n_intervals, 4), highest power first

    def __call__(self, which: Tensor, at: Tensor, *, straight_ends: bool = False) -> tuple[Tensor, Tensor]:
        """Values and derivatives of spline `which` at `at`, both of any one shape.

        Outside the points the outermost cubic goes on, or a straight line with its last slope.
        """
        inside = at
        if straight_ends:
            inside = at.clamp(self.start, self.start + self.spacing * self.n_intervals)
        interval = ((inside - self.start) / self.spacing).floor().clamp(0, self.n_intervals - 1)
        x = inside - (self.start + self.spacing * interval)
        rows = pick(self.coefficients, which * self.n_intervals + interval.long())
        a, b, c, d = rows.unbind(-1)
        slopes = (3 * a * x + 2 * b) * x + c
        values = ((a * x + b) * x + c) * x + d
        return values + slopes * (at - inside), slopes


class TabulatedEam(ElementPotential):
    """E = Σ_i F_i(Σ_j ρ_ji(r)) + Σ_pairs φ_ij(r), all from a file."""

    def __init__(self, tables: EamTables, name: str = "EAM") -> None:
        super().__init__(tables.elements)
        self.name = name
        self.tables_sha256 = tables.sha256
        self._n_kinds = len(tables.elements)
        spacing = tables.distance_spacing
        n_points = tables.densities.shape[2]
        self.cutoff = min(tables.cutoff, spacing * n_points)
        flat = self._n_kinds**2
        distances = spacing * np.arange(1, n_points)
        pair_energies = tables.pair_products[:, :, 1:] / distances
        self._embedding = Splines(0.0, tables.density_spacing, tables.embedding)
        self._densities = Splines(0.0, spacing, tables.densities.reshape(flat, n_points))
        self._pairs = Splines(spacing, spacing, pair_energies.reshape(flat, n_points - 1))

    @classmethod
    def from_file(cls, path: str | Path) -> TabulatedEam:
        """From a `.eam.alloy`, `.eam.fs` or `.fs` file, plain or gzipped."""
        return cls(read_eam_tables(path), name=f"EAM ({Path(path).name})")

    def pair_terms(self, distances: Tensor, kinds: Tensor) -> PairTerms:
        sources = kinds.flip(0)  # the other end makes the density this end feels
        pair_energies, pair_slopes = self._pairs(kinds[0] * self._n_kinds + kinds[1], distances)
        densities, density_slopes = self._densities(sources * self._n_kinds + kinds, distances.expand(kinds.shape))
        return PairTerms(pair_energies, pair_slopes, densities, density_slopes)

    def embedding(self, densities: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
        return self._embedding(kinds, densities, straight_ends=True)


# ---- The analytic alloy EAM of Zhou, Johnson and Wadley, Phys. Rev. B 69, 144113 (2004): 16 metals.

CUTOFF_FACTOR = math.sqrt(5)  # times the larger r_e
SWITCH_SHARE = 0.1  # of the cutoff, at its end
UPPER_JOINT = 1.15  # ρ_0/ρ_e; below it the polynomial, above it the logarithmic branch


def _table() -> tuple[tuple[str, ...], dict[str, tuple[float, ...]]]:
    lines = Path(__file__).with_name("eam_zhou.txt").read_text(encoding="utf-8").splitlines()
    (_, *columns), *rows = (line.split() for line in lines if not line.startswith("#"))
    return tuple(columns), {element: tuple(map(float, numbers)) for element, *numbers in rows}


COLUMNS, PARAMETERS = _table()


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
        is_thin = densities < joint
        is_dense = densities >= UPPER_JOINT * at["rho_e"]
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
