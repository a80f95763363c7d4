"""How stiff a structure is against every small change of it: springs, collective coordinates, floors.

A change of atoms u (and of the cell, a symmetric strain ε) changes the vector of a link i→j by δr = u_j - u_i + r·ε.
To second order it costs

    ½ Σ_pairs δr·[k∥ r̂r̂ᵀ + k⊥ (1 - r̂r̂ᵀ)]·δr + ½ Σ_im (Σ_j a_ijm·δr_ij)² + ½ μ Σ_i |u_i|² + ½ κ |ε|²,

each pair once, self-images included. With k∥, k⊥ ≥ 0 and μ, κ > 0 its matrix B is symmetric positive definite whatever
the numbers are, so that B⁻¹F always goes downhill.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from relaxion.structures import Structures
from relaxion.structures.structures import atom_rows, per_structure_sum, rows_of


def strain_vectors(strains: Tensor) -> Tensor:
    """(n, 3, 3) symmetric -> (n, 6): xx, yy, zz, √2 yz, √2 xz, √2 xy."""
    diagonal = strains.diagonal(dim1=1, dim2=2)
    across = torch.stack([strains[:, 1, 2], strains[:, 0, 2], strains[:, 0, 1]], dim=1)
    return torch.cat([diagonal, math.sqrt(2) * across], dim=1)


def strain_matrices(vectors: Tensor) -> Tensor:
    """(n, 6) -> (n, 3, 3), the opposite of `strain_vectors`."""
    xx, yy, zz, yz, xz, xy = (vectors * vectors.new_tensor([1, 1, 1, *[math.sqrt(0.5)] * 3])).unbind(dim=1)
    return torch.stack([xx, xy, xz, xy, yy, yz, xz, yz, zz], dim=1).view(-1, 3, 3)


def symmetric_outer(one: Tensor, other: Tensor) -> Tensor:
    """Half of a⊗b + b⊗a over the last axis: trace (l = 0) and deviator (l = 2) of two vectors."""
    product = one[..., :, None] * other[..., None, :]
    return (product + product.transpose(-1, -2)) / 2


LEARNED = ("along", "across", "arms", "floors", "cell_floors")  # parts of a stiffness that a network says


@dataclass(frozen=True)
class SpringSettings:
    """Springs between neighbours: of the classical optimizer, and of a stiffness model before it has learned.

    Tuned on EMT alloys, clusters, slabs, GFN2 molecules and CHGNet crystals (docs/decisions.md).
    """

    stiffness: float = 4.0
    """k₀, eV/Å², of a bond as long as the sum of covalent radii."""
    decay: float = 7.0
    """a: how fast stiffness falls with reduced length."""
    across: float = 0.05
    """Stiffness across a bond as a share of that along it."""
    floor: float = 0.5
    """Stiffness of every atom against its place, eV/Å²: keeps soft modes from running away."""
    cell_floor: float = 0.1
    """Stiffness of the cell, eV/Å³, beside what the springs give."""


SPRINGS = SpringSettings()
LARGEST_EXPONENT = 3.0  # bonds pressed together are not stiffer than k₀·exp of this


@dataclass(frozen=True, eq=False)
class Unknowns:
    """What moves, or what pulls at it: a vector per atom, six orthonormal components per cell (`strains.py`)."""

    atoms: Tensor  # (n_atoms, 3)
    cells: Tensor  # (n_structures, 6)

    def masked(self, free: Unknowns) -> Unknowns:
        """Zero where `free` (booleans) is False."""
        return Unknowns(self.atoms * free.atoms, self.cells * free.cells)

    def __add__(self, other: Unknowns) -> Unknowns:
        return Unknowns(self.atoms + other.atoms, self.cells + other.cells)

    def __sub__(self, other: Unknowns) -> Unknowns:
        return Unknowns(self.atoms - other.atoms, self.cells - other.cells)

    def dot(self, other: Unknowns, structures: Structures) -> Tensor:
        """Scalar product of each structure's part, (n_structures,)."""
        of_atoms = (self.atoms * other.atoms).sum(dim=1)
        summed = per_structure_sum(of_atoms, structures.structure_index, structures.n_structures)
        return summed + (self.cells * other.cells).sum(dim=1)

    def select(self, counts: Tensor, which: Tensor) -> Unknowns:
        """Those of the chosen structures (`counts`: atoms of each structure)."""
        return Unknowns(self.atoms[atom_rows(counts, which)[0]], self.cells[which])

    def scaled(self, factors: Tensor, structures: Structures) -> Unknowns:
        """Each structure's part times its own factor."""
        return Unknowns(self.atoms * factors[structures.structure_index, None], self.cells * factors[:, None])


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the atoms of each structure stand in its matrix. Structures of one size stand together, none is padded."""

    sizes: list[tuple[int, int]]  # number of atoms, and of structures that have so many
    order: Tensor  # (n_structures,) int64, structures by size
    atoms: Tensor  # (n_atoms,) int64, their atoms
    places: Tensor  # (n_atoms,) int64, number of an atom within its structure
    rows: Tensor  # (n_atoms,) int64, where the blocks of an atom begin among those of all matrices
    has_cell: bool

    @classmethod
    def of(cls, structures: Structures) -> Layout:
        counts = structures.counts
        index = structures.structure_index
        order = counts.argsort(stable=True)
        sizes, numbers = counts[order].unique_consecutive(return_counts=True)
        squares = counts[order].square()
        first_blocks = torch.empty_like(counts)
        first_blocks[order] = squares.cumsum(0) - squares
        places = torch.arange(len(index)) - (counts.cumsum(0) - counts)[index]
        return cls(
            sizes=list(zip(sizes.tolist(), numbers.tolist(), strict=True)),
            order=order,
            atoms=atom_rows(counts, order)[0],
            places=places,
            rows=first_blocks[index] + counts[index] * places,
            has_cell=bool(structures.cell_free.any()),  # also where a mask fixes all strains
        )

    def of_structures(self, values: Tensor) -> Sequence[Tensor]:
        """For each size (n_alike, …)."""
        return values[self.order].split([number for _, number in self.sizes])

    def of_atoms(self, values: Tensor) -> list[Tensor]:
        """For each size (n_alike, n, …)."""
        parts = values[self.atoms].split([n * number for n, number in self.sizes])
        sizes = zip(parts, self.sizes, strict=True)
        return [part.view(number, n, *values.shape[1:]) for part, (n, number) in sizes]

    def gathered(self, centers: Tensor, neighbors: Tensor, values: Tensor) -> list[Tensor]:
        """Matrices of what links i→j say, (n_links, height, width): at the block ij, and minus it at the block ii.

        For each size (n_alike, n · height, n · width).
        """
        height, width = values.shape[1:]
        ends = [n * n * number for n, number in self.sizes]
        grid = values.new_zeros((sum(ends), height, width))
        grid.index_add_(0, self.rows[centers] + self.places[neighbors], values)
        own = values.new_zeros((len(self.rows), height, width)).index_add_(0, centers, values)
        grid.index_add_(0, self.rows + self.places, own.neg_())
        return [
            part.view(number, n, n, height, width).transpose(2, 3).reshape(number, n * height, n * width)
            for part, (n, number) in zip(grid.split(ends), self.sizes, strict=True)
        ]

    def packed(self, unknowns: Unknowns) -> list[Tensor]:
        """For each size (n_alike, n_rows)."""
        atoms = [part.flatten(1) for part in self.of_atoms(unknowns.atoms)]
        cells = self.of_structures(unknowns.cells[:, : 6 * self.has_cell])
        return [torch.cat(parts, dim=1) for parts in zip(atoms, cells, strict=True)]

    def unpacked(self, values: Sequence[Tensor]) -> Unknowns:
        """The opposite of `packed`."""
        parts = list(zip(self.sizes, values, strict=True))
        atoms = values[0].new_zeros((len(self.atoms), 3))
        atoms[self.atoms] = torch.cat([part[:, : 3 * n].reshape(-1, 3) for (n, _), part in parts])
        cells = values[0].new_zeros((len(self.order), 6))
        cells[self.order, : 6 * self.has_cell] = torch.cat([part[:, 3 * n :] for (n, _), part in parts])
        return Unknowns(atoms, cells)


@dataclass(frozen=True, eq=False)
class Stiffness:
    """B in parts. Links have every pair twice, i→j and j→i one after the other; springs have every pair once."""

    structures: Structures
    centers: Tensor  # (n_links,) int64, atom i
    neighbors: Tensor  # (n_links,) int64, atom j
    link_structure: Tensor  # (n_links,) int64
    vectors: Tensor  # (n_links, 3) Å, from i to the image of j
    along: Tensor  # (n_links / 2,) eV/Å², k∥ of the pairs
    across: Tensor  # (n_links / 2,) eV/Å², k⊥
    arms: Tensor  # (n_links, M, 3) √(eV/Å²), a_ijm
    floors: Tensor  # (n_structures,) eV/Å², μ
    cell_floors: Tensor  # (n_structures,) eV, κ
    free: Unknowns  # booleans: which coordinates may change

    @classmethod
    def all_free(cls, structures: Structures) -> Unknowns:
        """What a structure lets move: atoms that are movable, cells that are free."""
        return Unknowns(structures.movable[:, None].expand(-1, 3), structures.cell_free[:, None].expand(-1, 6))

    def restricted(self, atoms: Tensor | None = None, cells: Tensor | None = None) -> Stiffness:
        """The same with fewer free coordinates: booleans, (n_atoms, 3) and (n_structures, 6) for xx yy zz yz xz xy."""
        free = self.free
        if atoms is not None:
            free = replace(free, atoms=free.atoms & atoms)
        if cells is not None:
            free = replace(free, cells=free.cells & cells)
        same = torch.equal(free.atoms, self.free.atoms) and torch.equal(free.cells, self.free.cells)
        return self if same else replace(self, free=free)

    def select(self, which: Tensor) -> Stiffness:
        """That of the structures numbered by `which`, in that order."""
        counts = self.structures.counts
        (links, link_structure) = self.links_of(which)
        chosen = counts[which]
        moved = ((chosen.cumsum(0) - chosen) - (counts.cumsum(0) - counts)[which])[link_structure]  # of atom numbers
        return Stiffness(
            structures=self.structures.select(which),
            centers=self.centers[links] + moved,
            neighbors=self.neighbors[links] + moved,
            link_structure=link_structure,
            free=self.free.select(counts, which),
            **rows_of(self, ("vectors", "arms"), links),
            **rows_of(self, ("along", "across"), links[::2] // 2),
            **rows_of(self, ("floors", "cell_floors"), which),
        )

    def links_of(self, which: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the links of the chosen structures, and the structure of each. Every second, halved: the pairs."""
        return atom_rows(torch.bincount(self.link_structure, minlength=self.structures.n_structures), which)

    @property
    def has_free_cell(self) -> bool:
        return bool(self.free.cells.any())

    @cached_property
    def directions(self) -> Tensor:
        """(n_pairs, 3), of the springs."""
        vectors = self.vectors[::2]
        return vectors / torch.linalg.vector_norm(vectors, dim=1, keepdim=True).clamp_min(1e-9)

    @cached_property
    def _outer(self) -> Tensor:
        """r̂r̂ᵀ of every spring, (n_pairs, 9); by columns, because products of three by three numbers take long."""
        columns = self.directions.T.contiguous()
        return (columns[:, None] * columns).view(9, -1).T.contiguous()

    def blocks_of(self, along: Tensor, across: Tensor) -> Tensor:
        """k∥ r̂r̂ᵀ + k⊥ (1 - r̂r̂ᵀ) of every spring, (n_pairs, 3, 3) eV/Å²."""
        blocks = (along - across)[:, None] * self._outer
        blocks[:, ::4] += across[:, None]
        return blocks.view(-1, 3, 3)

    @cached_property
    def blocks(self) -> Tensor:
        """Of the pairs' own k∥ and k⊥."""
        return self.blocks_of(self.along, self.across)

    @cached_property
    def layout(self) -> Layout:
        """Where the rows of the matrices belong."""
        return Layout.of(self.structures)

    @cached_property
    def matrices(self) -> list[Tensor]:
        """B; for each size (n_alike, n_rows, n_rows). Without gradients."""
        layout = self.layout
        matrices = self.matrices_of(self.blocks)
        for matrix, rows in zip(matrices, self._collective(), strict=True):
            matrix.baddbmm_(rows.mT, rows)
        floors = Unknowns(
            self.floors[self.structures.structure_index, None].expand(-1, 3), self.cell_floors[:, None].expand(-1, 6)
        )
        for matrix, floor, free in zip(matrices, layout.packed(floors), layout.packed(self.free), strict=True):
            diagonal = matrix.diagonal(dim1=1, dim2=2)
            diagonal += floor
            if not free.all():
                matrix.mul_(free[:, :, None]).mul_(free[:, None, :])
                diagonal += ~free
        return matrices

    def with_matrices(self, matrices: list[Tensor]) -> Stiffness:
        """Itself, where somebody has made the matrices already; float64."""
        vars(self)["matrices"] = matrices
        return self

    def matrices_of(self, blocks: Tensor) -> list[Tensor]:
        """Of springs alone."""
        atoms = self.layout.gathered(self.centers, self.neighbors, -blocks.repeat_interleave(2, dim=0))
        if not self.layout.has_cell:
            return atoms
        felt, corners = self.cell_springs(blocks)
        result = []
        for matrix, rows, corner in zip(
            atoms, self.layout.of_atoms(felt), self.layout.of_structures(corners), strict=True
        ):
            border = rows.transpose(1, 2).flatten(2)  # (n_alike, 6, 3 · n)
            above = torch.cat([matrix, border.mT], dim=2)
            result.append(torch.cat([above, torch.cat([border, corner], dim=2)], dim=1))
        return result

    def _collective(self) -> list[Tensor]:
        """∂q_im/∂(u, ε), for each size (n_alike, n · M, n_rows)."""
        rows = self.layout.gathered(self.centers, self.neighbors, self.arms)
        if not self.layout.has_cell:
            return rows
        cells = [part.flatten(1, 2) for part in self.layout.of_atoms(self.cell_coordinates())]
        return [torch.cat(parts, dim=2) for parts in zip(rows, cells, strict=True)]

    def apply(self, change: Unknowns) -> Unknowns:
        """B·(u, ε), without building B. What is not free neither changes nor answers."""
        change = change.masked(self.free)
        shifts = self._link_changes(change)
        coordinates = (self.arms * shifts[:, None]).sum(dim=2)  # (n_links, M)
        summed = coordinates.new_zeros((len(change.atoms), coordinates.shape[1])).index_add(
            0, self.centers, coordinates
        )
        pulls = (self.arms * summed.index_select(0, self.centers)[:, :, None]).sum(dim=1)  # (n_links, 3) eV/Å
        pairs = shifts[::2]
        stretch = (pairs * self.directions).sum(dim=1, keepdim=True)
        springs = self.across[:, None] * pairs + (self.along - self.across)[:, None] * stretch * self.directions
        return self._gathered(pulls, springs, change)

    def _link_changes(self, change: Unknowns) -> Tensor:
        """δr = u_j - u_i + r·ε of every link, (n_links, 3)."""
        shifts = change.atoms.index_select(0, self.neighbors) - change.atoms.index_select(0, self.centers)
        if self.has_free_cell:
            strains = strain_matrices(change.cells).index_select(0, self.link_structure)
            shifts = shifts + torch.bmm(self.vectors[:, None], strains)[:, 0]
        return shifts

    def _gathered(self, pulls: Tensor, springs: Tensor, change: Unknowns) -> Unknowns:
        """What pulls at links and pairs, and the floors, do to atoms and cells."""
        index = self.structures.structure_index
        n_structures = self.structures.n_structures
        both = pulls.clone()
        both[::2] = both[::2] + springs
        atoms = self.floors.index_select(0, index)[:, None] * change.atoms
        atoms = atoms.index_add(0, self.neighbors, both).index_add(0, self.centers, -both)
        cells = self.cell_floors[:, None] * change.cells
        if self.has_free_cell:
            outer = self.vectors[:, :, None] * both[:, None, :]
            virials = per_structure_sum(outer, self.link_structure, n_structures)
            cells = cells + strain_vectors((virials + virials.mT) / 2)
        return Unknowns(atoms, cells).masked(self.free)

    def cell_springs(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Of unit strains through springs: pulls at atoms (n_atoms, 6, 3) eV/Å, and cells (n_structures, 6, 6) eV."""
        strains = strain_columns(self.vectors[::2])  # (n_pairs, 6, 3)
        felt = torch.bmm(strains, blocks)  # (n_pairs, 6, 3) eV/Å
        atoms = felt.new_zeros((self.structures.n_atoms, 6, 3))
        atoms.index_add_(0, self.neighbors[::2], felt).index_add_(0, self.centers[::2], -felt)
        cells = torch.bmm(felt, strains.mT)
        return atoms, per_structure_sum(cells, self.link_structure[::2], self.structures.n_structures)

    def cell_coordinates(self) -> Tensor:
        """∂q_im/∂ε of the collective coordinates, (n_atoms, M, 6)."""
        felt = torch.bmm(self.arms, strain_columns(self.vectors).mT)  # (n_links, M, 6)
        return felt.new_zeros((self.structures.n_atoms, *felt.shape[1:])).index_add_(0, self.centers, felt)

    def to(self, dtype: torch.dtype) -> Stiffness:
        """The same in another precision."""
        return self._carried(**{name: getattr(self, name).to(dtype) for name in ("vectors", *LEARNED)})

    def detached(self) -> Stiffness:
        """The same without gradients."""
        return self._carried(**{name: getattr(self, name).detach() for name in LEARNED})

    def _carried(self, **same: Tensor) -> Stiffness:
        """The same numbers as other tensors, with the matrices where they are known."""
        result = replace(self, **same)
        return result.with_matrices(self.matrices) if "matrices" in vars(self) else result

    @property
    def differentiable(self) -> bool:
        """Whether anything here carries gradients."""
        return torch.is_grad_enabled() and any(getattr(self, name).requires_grad for name in LEARNED)


def strain_columns(vectors: Tensor) -> Tensor:
    """r·ε for each of the six unit strains, (n, 6, 3)."""
    half = math.sqrt(0.5)
    x, y, z = vectors.unbind(dim=1)
    zero = torch.zeros_like(x)
    columns = [
        [x, zero, zero],
        [zero, y, zero],
        [zero, zero, z],
        [zero, half * z, half * y],
        [half * z, zero, half * x],
        [half * y, half * x, zero],
    ]
    return torch.stack([torch.stack(column, dim=1) for column in columns], dim=1)
