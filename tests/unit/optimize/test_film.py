"""The film of a relaxation: every force call, what led there, and never more memory than allowed."""

from __future__ import annotations

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.constraints import FixBondLength
from ase.filters import FrechetCellFilter, UnitCellFilter

from relaxion import Relaxer
from relaxion.optimizer.point import Film, Frame, Proposal, frame_of, place, proposal_in_space, read_point


def frame(call: int, n_atoms: int = 10) -> Frame:
    return Frame(call, np.zeros((n_atoms, 3), np.float32), np.eye(3))


def rattled(size: float = 0.2) -> Atoms:
    atoms = bulk("Cu", a=3.7, cubic=True) * (2, 1, 1)
    atoms.positions += np.random.default_rng(3).normal(0, size, atoms.positions.shape)
    atoms.calc = EMT()
    return atoms


def test_one_frame_per_force_call_and_each_move_begins_at_an_accepted_point():
    atoms = rattled()
    opt = Relaxer(atoms, logfile=None)
    opt.run(fmax=0.01)
    frames = opt.film.frames
    assert [one.call for one in frames] == list(range(1, opt.force_calls + 1))
    assert np.allclose(frames[-1].positions, atoms.positions, atol=1e-5)
    assert frames[0].base_call is None
    for entry, one in zip(opt.history[1:], frames[1:], strict=True):
        base = frames[one.base_call - 1]
        assert opt.history[one.base_call - 1].accepted
        longest = np.linalg.norm(one.positions - base.positions, axis=1).max()
        assert longest == pytest.approx(entry.step_length_angstrom, abs=1e-5)


def test_a_shortened_step_keeps_what_was_proposed():
    opt = Relaxer(rattled(), logfile=None, maxstep=0.02)
    opt.run(fmax=0.01, steps=3)
    for before, after in zip(opt.film.frames, opt.film.frames[1:], strict=False):
        executed = after.positions - before.positions
        assert after.proposed is not None
        share = np.linalg.norm(executed) / np.linalg.norm(after.proposed)
        assert share < 0.9
        assert np.allclose(executed, share * after.proposed, atol=1e-4)


def test_a_constraint_shows_as_a_difference():
    atoms = rattled()
    atoms.set_constraint(FixBondLength(0, 1))
    opt = Relaxer(atoms, logfile=None, maxstep=5.0)  # nothing else shortens the step
    opt.run(fmax=0.05, steps=1)
    start, after = opt.film.frames
    assert after.proposed is not None
    executed = after.positions - start.positions
    assert np.abs(executed - after.proposed)[:2].max() > 1e-3
    assert np.allclose(executed[2:], after.proposed[2:], atol=1e-5)


@pytest.mark.parametrize("kind", [UnitCellFilter, FrechetCellFilter])
def test_places_of_a_cell_filter_are_where_ase_puts_the_atoms(kind):
    atoms = rattled()
    target = kind(atoms)
    rng = np.random.default_rng(0)
    for _ in range(2):  # the second time from a cell that is not the reference any more
        base = read_point(target)
        wanted = rng.normal(0, 0.05, base.coordinates.shape)
        found = proposal_in_space(target, Proposal(base, 0.5 * wanted, -1.0, "springs", wanted=wanted))
        assert found is not None
        assert np.allclose(found[0], atoms.positions)
        place(target, base.coordinates + wanted)
        assert np.allclose(found[1], atoms.positions, atol=1e-10)


def test_as_executed_needs_no_memory():
    atoms = Atoms("Cu2", positions=[[0, 0, 0], [2, 0, 0]])
    here = atoms.positions
    assert frame_of(atoms, 2, 1, (here - 0.1, here)).proposed is None
    differs = frame_of(atoms, 2, 1, (here - 0.1, here + 0.1)).proposed
    assert differs == pytest.approx(0.2)


def test_memory_is_bounded_and_the_newest_frame_is_always_there():
    film = Film(largest_bytes=20 * frame(1).size)
    for call in range(1, 1001):
        film.add(frame(call))
        assert len(film.frames) <= 20
        assert film.frames[0].call == 1
        assert film.frames[-1].call == call
    calls = [one.call for one in film.frames]
    assert len(calls) >= 9
    assert len(set(np.diff(calls[:-1]))) == 1, "what is kept is evenly spaced"


def test_a_wild_proposal_is_cut_and_stays_a_number():
    atoms = bulk("Cu", cubic=True)
    wild = atoms.positions + np.array([1e45, 0, 0])
    frame = frame_of(atoms, 2, 1, (atoms.positions, wild))
    assert frame.proposed is not None
    assert np.isfinite(frame.proposed).all()
