"""Minima that are minima: the lowest curvature at the end of a relaxation, from a few more force calls.

Forces vanish on saddle points too; symmetry keeps them zero along whatever would break it. Where forces are small
enough they are therefore asked for at up to four places close by. The steps s₁ … s₄ to these places and the drops of
the forces along them, H·s, give the lowest curvature in the space of the steps. The model B of the Hessian, corrected
by secants, makes the steps (Lanczos 1950, preconditioned): the first is B⁻¹·noise, which goes along what is soft and
has no symmetry, each further one B⁻¹·H·s of the one before; the last one improves the softest direction v found and
its curvature λ, by B⁻¹·(H·v - λ·v) (Davidson 1975). Each symmetry g of a crystal multiplies what a step tells,
since H·(g·s) = g·(H·s). What costs nothing is projected out: translations, rotations of isolated structures and of
cells, what is fixed.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import scipy.linalg
from ase import Atoms
from ase.filters import Filter
from numpy.typing import NDArray

from relaxion.optimizer.hessian.base import (
    POLICY,
    Hessian,
    Hessians,
    Identity,
    Solve,
    corrected,
    damped,
    hessians_at,
)
from relaxion.optimizer.hessian.springs import Bonds
from relaxion.optimizer.point import Array, Geometry, Point, Proposal, bare_atoms, dot, longest, rows_of_three
from relaxion.optimizer.step import Stepper
from relaxion.optimizer.trust_region import screened

logger = logging.getLogger(__name__)

CURVATURE = "curvature"  # the method of a look at a place near the end
SADDLE = "saddle"  # the method of the step that leaves a saddle point
MOST_CALLS = 4  # of one check
LOOK = 0.04  # Å, as atoms feel it: long enough to be seen above the noise of single precision
LEAST_LOOK = 0.1  # of that; where constraints leave less, nobody looks
NEGATIVE = -0.05  # eV/Å²; less is noise of forces, or gains less than a meV
PUSH = 0.2  # Å, away from a saddle point, if a parabola falls by less than
FALL = 0.1  # eV on the way: what is steeper turns up again sooner
SHORTER = 0.3  # of the last push, where that led uphill
TRIES = 3  # pushes from one saddle point
MOST_SADDLES = 6  # left in one run
SAME_PLACE = 1e-3  # Å
KEPT = ("atoms", "results", "last")  # by calculators, of their last answer
NO_STEPS = "no steps were left"
UNDONE = "constraints undo what the check tries"
MOST_UNDONE = 3  # looks that constraints undo, then the check ends
NEW_SHARE = 1e-3  # of a direction must be new, else another is drawn
APART = 0.1  # relative singular value of directions that symmetry adds; smaller ones multiply the noise of forces
SYMMETRIC = 0.01  # Å; so exact must symmetries be
LARGEST_SYMMETRIC = 100  # atoms; in larger structures nobody looks for symmetries


@dataclass(frozen=True)
class EndCheck:
    """What is known about the end of a relaxation: whether it is a minimum."""

    checked: bool = False
    lowest_curvature_ev_per_angstrom2: float | None = None
    """Found at the end; above 0 at a minimum. The true lowest one may be below."""
    calls: int = 0
    """Force calls of all checks, the steps from saddle points to minima not counted."""
    saddle_energies_ev: tuple[float, ...] = ()
    """Of the saddle points that were left (enthalpies under pressure)."""
    note: str = ""
    """Why there was no check, or why it could not be ended."""

    @property
    def is_saddle(self) -> bool:
        """Whether the end was seen to be a saddle point."""
        lowest = self.lowest_curvature_ev_per_angstrom2
        return lowest is not None and lowest < NEGATIVE

    def in_words(self) -> str:
        """For logs and people."""
        left = len(self.saddle_energies_ev)
        words = [f"{left} saddle point{'s' if left > 1 else ''} left"] if left else []
        if self.lowest_curvature_ev_per_angstrom2 is not None:
            kind = "a saddle point" if self.is_saddle else "a minimum as far as was seen"
            words.append(f"{kind}, lowest curvature {self.lowest_curvature_ev_per_angstrom2:+.2f} eV/Å²")
        else:
            words.append("nothing could change" if self.checked else "not checked for negative curvature")
        return "; ".join([*words, self.note] if self.note else words)


@dataclass(frozen=True)
class Symmetry:
    """A rotation, and which atom comes to the place of which."""

    rotation: Array  # (3, 3)
    places: NDArray[np.int64]  # (n_atoms,) where each atom goes

    def of(self, rows: Array) -> Array:
        """Steps or forces, turned with everything."""
        n_atoms = len(self.places)
        turned = np.empty_like(rows)
        turned[self.places] = rows[:n_atoms] @ self.rotation.T
        if len(rows) > n_atoms:
            turned[n_atoms:] = self.rotation @ rows[n_atoms:] @ self.rotation.T
        return turned


@dataclass
class CurvatureSearch:
    """The softest direction at one point, from the forces at places near it."""

    base: Point
    solve: Solve  # B⁻¹·f
    seed: int = 0
    symmetries: list[Symmetry] = field(default_factory=list)  # besides the identity
    steps: list[Array] = field(default_factory=list)  # Å, as they were executed
    drops: list[Array] = field(default_factory=list)  # of the forces along them, eV/Å

    def __post_init__(self) -> None:
        self._zero = zero_modes(self.base)
        self._random = np.random.default_rng(self.seed)
        self._asked: Array | None = None  # the last step that was asked for

    def next(self) -> Array | None:
        """The next step to look along, (n_rows, 3) Å; None where enough is known."""
        dimensions = int(self._mask().sum()) - self._zero.shape[1]
        if len(self.steps) >= min(MOST_CALLS, dimensions) or self.curvature < NEGATIVE:
            return None
        if not self.steps:
            return self._look(self.solve(self._noise()))
        drop = self.drops[-1]
        if len(self.steps) == MOST_CALLS - 1:
            curvature, direction, along = self._softest()
            drop = along - curvature * direction
        return self._look(self.solve(self._projected(drop)))

    def learn(self, point: Point) -> None:
        """What was found at the end of the last step, as far as constraints let it be executed."""
        executed = point.coordinates - self.base.coordinates
        self.steps.append(executed)
        self.drops.append(self.base.forces - point.forces)
        if self._asked is not None and longest(self._asked - executed) > LEAST_LOOK * LOOK:
            self.forbid(self._asked - executed)

    def forbid(self, rows: Array) -> None:
        """Constraints undo such a step."""
        self._zero = scipy.linalg.orth(np.column_stack([self._zero, self._projected(rows).ravel()]), rcond=1e-6)

    @property
    def curvature(self) -> float:
        """The lowest one so far, eV/Å²; infinite before anybody looked."""
        return self._softest()[0] if self.steps else math.inf

    def push(self, share: float) -> Array:
        """From the base along the softest direction, downhill where forces say which way that is.

        `share`: of the usual length.
        """
        curvature, direction, _ = self._softest()
        direction = self._projected(direction)
        length = np.linalg.norm(direction)
        longest_step = PUSH / max(self.base.reach(direction), 1e-12)
        step = direction * share * min(longest_step, math.sqrt(2 * FALL / abs(curvature)) / max(length, 1e-12))
        return step if dot(self.base.forces, step) >= 0 else -step

    def _softest(self) -> tuple[float, Array, Array]:
        """Lowest curvature in the space of the steps, its direction (of length 1) and the drop along it."""
        steps, drops = self._space()
        products = steps @ drops.T
        values, vectors = np.linalg.eigh((products + products.T) / 2)
        shape = self.base.coordinates.shape
        return float(values[0]), (vectors[:, 0] @ steps).reshape(shape), (vectors[:, 0] @ drops).reshape(shape)

    def _space(self) -> tuple[Array, Array]:
        """Orthonormal directions that steps and symmetries span, and the drops of the forces along them, as rows."""
        known = list[tuple[Array, Array]]()
        for step, drop in zip(self.steps, self.drops, strict=True):
            length = np.linalg.norm(step)
            known.append((step / length, drop / length))
            known += [(symmetry.of(step) / length, symmetry.of(drop) / length) for symmetry in self.symmetries]
        steps = np.array([step.ravel() for step, _ in known])
        drops = np.array([drop.ravel() for _, drop in known])
        mixing, sizes, directions = np.linalg.svd(steps, full_matrices=False)
        kept = sizes > APART * sizes[0]
        return directions[kept], (mixing[:, kept] / sizes[kept]).T @ drops

    def _look(self, direction: Array) -> Array | None:
        """As far as one looks, along what is new of the direction; None where nothing is."""
        for _ in range(3):
            new = self._new(direction)
            if np.isfinite(new).all() and np.linalg.norm(new) > NEW_SHARE * np.linalg.norm(direction):
                self._asked = new * (LOOK / max(self.base.reach(new), 1e-12))
                return self._asked
            direction = self.solve(self._noise())
        return None

    def _new(self, direction: Array) -> Array:
        new = self._projected(direction).ravel()
        if self.steps:
            known, _ = self._space()
            for _ in range(2):
                new = new - (new @ known.T) @ known
        return new.reshape(direction.shape)

    def _noise(self) -> Array:
        return self._projected(self._random.standard_normal(self.base.coordinates.shape))

    def _projected(self, rows: Array) -> Array:
        flat = rows.ravel() * self._mask()
        return (flat - self._zero @ (self._zero.T @ flat)).reshape(rows.shape)

    def _mask(self) -> Array:
        assert self.base.geometry is not None
        return self.base.geometry.free.ravel().astype(np.float64)

    def plain(self) -> dict[str, Any]:
        """For a restart file."""
        return {"at": self.base.coordinates, "seed": self.seed, "steps": self.steps, "drops": self.drops}


def undone(look: Proposal, coordinates: Array) -> str:
    """Why nobody asks about the place that constraints left of a look; empty where it is worth a call."""
    if look.base.reach(coordinates - look.base.coordinates) < LEAST_LOOK * LOOK:
        return UNDONE
    return ""


def failed(error: Exception) -> str:
    """What is said of a calculator that gave no answer; the end stands all the same."""
    logger.warning("the check for negative curvature failed: %s: %s", type(error).__name__, error)
    return f"the check failed ({type(error).__name__}: {error})"


def kinds_of(atoms: Atoms) -> Kinds | None:
    """Elements, told apart by the magnetic moments and charges that a calculator begins with; None: constraints act."""
    if atoms.constraints:
        return None
    told = [atoms.numbers, atoms.get_initial_magnetic_moments().reshape(len(atoms), -1).T, atoms.get_initial_charges()]
    rows = np.vstack(told).T.round(3)
    return np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1) + 1


def symmetries_of(point: Point, kinds: Kinds | None) -> list[Symmetry]:
    """Those of a crystal in which everything is free, without the identity."""
    geometry = point.geometry
    assert geometry is not None
    whole = bool(geometry.periodic.all() and geometry.free.all())
    if kinds is None or not whole or geometry.n_atoms > LARGEST_SYMMETRIC:
        return []
    import spglib  # loaded where it is needed: it takes its time

    inverse = np.linalg.inv(geometry.cell)
    fractions = geometry.positions @ inverse
    crystal: Any = (geometry.cell, fractions, kinds)
    found = spglib.get_symmetry(crystal, symprec=SYMMETRIC)
    result = list[Symmetry]()
    for turn, shift in zip(found["rotations"], found["translations"], strict=True) if found else ():
        gaps = (fractions @ turn.T + shift)[:, None] - fractions
        lengths = np.linalg.norm((gaps - gaps.round()) @ geometry.cell, axis=2)
        places = lengths.argmin(axis=1)
        if len(set(places.tolist())) == geometry.n_atoms:
            result.append(Symmetry(geometry.cell.T @ turn @ inverse.T, places))
    still = np.arange(geometry.n_atoms)
    return [one for one in result if not (np.array_equal(one.places, still) and np.allclose(one.rotation, np.eye(3)))]


def zero_modes(point: Point) -> Array:
    """Orthonormal directions along which nothing can change, (3·n_rows, n)."""
    geometry = point.geometry
    assert geometry is not None
    modes = [*_rigid_motions(geometry, len(point.coordinates)), *_cell_turns(geometry, len(point.coordinates))]
    if not modes:
        return np.zeros((point.coordinates.size, 0))
    return scipy.linalg.orth(np.array(modes).T, rcond=1e-6)


def _rigid_motions(geometry: Geometry, n_rows: int) -> list[Array]:
    """Those that move nothing that is fixed; what is periodic along any axis does not turn."""
    n_atoms = geometry.n_atoms
    axes = np.eye(3)
    motions = [np.tile(axis, (n_atoms, 1)) for axis in axes]
    if not geometry.periodic.any():
        centred = geometry.positions - geometry.positions.mean(axis=0)
        motions += [np.cross(axis, centred) for axis in axes]
    flat = np.array([motion.ravel() / max(np.linalg.norm(motion), 1e-12) for motion in motions])
    held = ~geometry.free[:n_atoms].ravel()
    allowed = scipy.linalg.null_space(flat[:, held].T) if held.any() else np.eye(len(flat))
    rest = np.zeros(3 * (n_rows - n_atoms))
    return [np.concatenate([mode, rest]) for mode in allowed.T @ flat]


def _cell_turns(geometry: Geometry, n_rows: int) -> list[Array]:
    """Antisymmetric changes of a free cell turn everything."""
    found = []
    for one, other in ((0, 1), (0, 2), (1, 2)) if geometry.cell_factor else ():
        free = geometry.free[geometry.n_atoms :]
        if free[one, other] and free[other, one]:
            rows = np.zeros((n_rows, 3))
            rows[geometry.n_atoms + one, other] = 1.0
            rows[geometry.n_atoms + other, one] = -1.0
            found.append(rows.ravel())
    return found


Kinds: TypeAlias = NDArray[np.int64]
Check: TypeAlias = Generator[Proposal, Point | str, Proposal | None]


class SaddleSearch:
    """The checks of one relaxation, and the saddle points it has left."""

    def __init__(self, kinds: Kinds | None) -> None:
        """`kinds`: of the atoms; symmetries exchange those of one kind only. None: there is no symmetry."""
        self.kinds = kinds
        self.found = EndCheck()
        self.search: CurvatureSearch | None = None  # while a check goes on
        self.saddles: list[tuple[Array, float]] = []  # coordinates and energies
        self.calls = 0
        self._saved: Mapping[str, Any] | None = None  # a check that another run has begun

    def check(self, point: Point, stepper: Stepper, most: int) -> Check:
        """Yields places to look at, is sent what was found there or why nothing was; returns the step from a saddle.

        Args:
            point: the end of a relaxation.
            stepper: who came there; it judges the end, and the next point as one of its own.
            most: so many force calls may be made, the one after the step included.
        """
        if reason := _unfit(point):
            self.found = EndCheck(note=reason)
            return None
        hessians = _hessians(point, stepper)
        self.search = self._begin(point, _solver(hessians, stepper), symmetries_of(point, self.kinds))
        note = yield from self._look_around(self.search, most)
        search = self.search
        self.search = None
        curvature = search.curvature if search.steps else None
        energies = tuple(dict.fromkeys(energy for _, energy in self.saddles))  # once where it was tried again
        self.found = EndCheck(not note, curvature, self.calls, energies, note)
        if not self.found.is_saddle:
            return None
        if note := self._cannot_leave(point, most - len(search.steps)):
            self.found = replace(self.found, note=note)
            return None
        share = SHORTER ** self._times(point)
        self.saddles.append((point.coordinates, point.energy))
        return _away(point, search, stepper, hessians.bonds, share)

    def _look_around(self, search: CurvatureSearch, most: int) -> Generator[Proposal, Point | str, str]:
        """Until enough is known; or why it is not."""
        known = len(search.steps)
        undone_looks = 0
        while (step := search.next()) is not None:
            if len(search.steps) - known >= most:
                return NO_STEPS
            reason = "first look" if not search.steps else f"lowest curvature so far {search.curvature:+.2f} eV/Å²"
            found = yield Proposal(search.base, step, -1e-16, CURVATURE, reason, trust=LOOK)
            if found == UNDONE and undone_looks < MOST_UNDONE:
                undone_looks += 1
                search.forbid(step)
                continue
            if isinstance(found, str):
                return found
            self.calls += 1
            if not found.finite:
                return f"the check failed, not finite: {found.not_finite}"
            search.learn(found)
        return ""

    def _begin(self, point: Point, solve: Solve, symmetries: list[Symmetry]) -> CurvatureSearch:
        """A new check, or the one that an earlier run began here."""
        search = CurvatureSearch(point, solve, len(self.saddles), symmetries)
        saved = self._saved
        self._saved = None
        if saved is not None and longest(saved["at"] - point.coordinates) < SAME_PLACE:
            search.steps = list(saved["steps"])
            search.drops = list(saved["drops"])
        return search

    def _cannot_leave(self, point: Point, most: int) -> str:
        """Why the saddle point is the end all the same."""
        if self._times(point) >= TRIES:
            return "no way down was found"
        if len(self.saddles) >= MOST_SADDLES:
            return f"{MOST_SADDLES} saddle points were left before"
        return NO_STEPS if most < 1 else ""

    def _times(self, point: Point) -> int:
        """How often this saddle point was left before; steps that led uphill come back to it."""
        return sum(longest(place - point.coordinates) < SAME_PLACE for place, _ in self.saddles)

    def plain(self) -> dict[str, Any]:
        """For a restart file."""
        search = None if self.search is None else self.search.plain()
        return {"search": search, "saddles": self.saddles, "calls": self.calls}

    def restore(self, plain: Mapping[str, Any], n_rows: int) -> None:
        """The opposite. KeyError, TypeError or ValueError where the content is foreign."""
        self.calls = int(plain["calls"])
        self.saddles = [(rows_of_three(place), float(energy)) for place, energy in plain["saddles"]]
        arrays = [place for place, _ in self.saddles]
        if (saved := plain["search"]) is not None:
            parts = {name: [rows_of_three(rows) for rows in saved[name]] for name in ("steps", "drops")}
            self._saved = {"at": rows_of_three(saved["at"]), **parts}
            arrays += [self._saved["at"], *parts["steps"], *parts["drops"]]
            if len(parts["steps"]) != len(parts["drops"]):
                raise ValueError("steps and drops of the forces do not belong together")
        if any(len(rows) != n_rows or not np.isfinite(rows).all() for rows in arrays):
            raise ValueError(f"{n_rows} rows of finite numbers were expected")


def _unfit(point: Point) -> str:
    """Why curvatures cannot be looked for there; empty where they can."""
    if point.geometry is None or not point.geometry.drawn:
        return "only atoms and free cells are checked, not what this filter moves"
    return ""


def _hessians(point: Point, stepper: Stepper) -> Hessians:
    """Those of the stepper where it has made them there."""
    if stepper.known is not None and stepper.known[0] is point:
        return stepper.known[1]
    models = stepper.safeguard.models
    if models.policy is not None and models.policy.method != POLICY:  # a cheaper potential would plan a step
        models = replace(models, policy=None)
    return hessians_at([stepper.base(point, None)], [models])[0]


def _solver(hessians: Hessians, stepper: Stepper) -> Solve:
    """B⁻¹, corrected by what the last steps met."""
    learned = hessians.learned if hessians.learned is not None and hessians.learned.has_curvature else None
    model: Hessian = learned or hessians.internal or hessians.springs or Identity()
    secants = damped(stepper.secants.recent, model.apply)
    return lambda forces: corrected(forces, secants, model.solve)


def _away(point: Point, search: CurvatureSearch, stepper: Stepper, bonds: Bonds | None, share: float) -> Proposal:
    """The step from a saddle point; the stepper judges where it leads like any other, and begins afresh there."""
    base, by_fire = stepper.judge(point)
    if by_fire or base is not point:
        stepper.reset()
        stepper.region.begin(point)
    stepper.safeguard.reset()
    stepper.region.radius = min(stepper.settings.region.first, stepper.settings.region.largest)
    step = search.push(share)
    step *= min(1.0, stepper.settings.region.largest / PUSH)
    expected = search.curvature * dot(step, step) / 2 - dot(point.forces, step)
    reason = f"a saddle point, curvature {search.curvature:+.2f} eV/Å²"
    proposal = Proposal(point, step, min(expected, -1e-16), SADDLE, reason, trust=stepper.region.radius)
    stepper.last = screened(proposal, bonds)
    return stepper.last


@contextmanager
def back_afterwards(target: Atoms | Filter) -> Iterator[None]:
    """Atoms and calculator as they were, whatever is asked meanwhile: what is known there costs no call again."""
    atoms = bare_atoms(target)
    positions = atoms.positions.copy()
    cell = atoms.cell.array.copy()
    known = {name: _copied(getattr(atoms.calc, name)) for name in KEPT if hasattr(atoms.calc, name)}
    try:
        yield
    finally:
        atoms.set_cell(cell, scale_atoms=False, apply_constraint=False)
        atoms.positions[:] = positions
        for name, value in known.items():
            setattr(atoms.calc, name, value)


def _copied(value: Any) -> Any:
    """Answers are kept as they are now: calculators may write the next ones into the same arrays."""
    return copy.deepcopy(value) if isinstance(value, dict) else copy.copy(value)
