"""The embedded atom method from tables (`eam_tables`), through cubic splines as in `ase.calculators.eam.EAM`.

Like ASE: not-a-knot splines of F, ρ and φ = rφ/r, the first point of φ left out because rφ is 0 there. It
differs in two ways, both outside the tables:

- F beyond the last density goes on as a straight line, as in LAMMPS. ASE goes on with the last cubic, which
  can turn to either side; crowded random structures do get there.
- distances count up to one spacing after the last point, where a well made table has its cutoff, not further.

Finnis–Sinclair densities: ASE and LAMMPS agree (section: the source; table within it: the site).
"""

from __future__ import annotations

import gzip
import hashlib
import io
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
from relaxion.potentials.pairwise import ElementPotential, PairTerms, pick

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
        n_rho, density_spacing = self._count("n_rho"), self._positive("drho")
        n_r, distance_spacing = self._count("n_r"), self._positive("dr")
        cutoff = self._positive("cutoff")
        per_section = self._densities_per_element(len(elements), n_rho, n_r)
        embedding, densities = [], []
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
        self.start, self.spacing = start, spacing
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
        self.name, self.tables_sha256 = name, tables.sha256
        self._n_kinds = len(tables.elements)
        spacing, n_points = tables.distance_spacing, tables.densities.shape[2]
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
