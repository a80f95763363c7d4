"""Nobody can cheat: calls are counted, and convergence is judged, inside the calculator."""

from __future__ import annotations

import time
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.optimize import BFGS, BFGSLineSearch, GPMin

import relaxion
from relaxion.apps.comparison import SETS
from relaxion.train.judge.runs import (
    Conditions,
    Contestant,
    classical_contestants,
    contest,
    fell_apart,
    largest_force,
    our_contestants,
    pieces,
    relax_one,
)


@pytest.fixture
def start() -> Atoms:
    atoms = bulk("Cu", cubic=True)
    atoms.positions += np.random.default_rng(2).normal(0, 0.15, atoms.positions.shape)
    return atoms


def conditions(**changes) -> Conditions:
    return Conditions(relaxion.potential("emt"), **changes)


def contestant(kind: type) -> Contestant:
    return Contestant(kind.__name__, partial(kind, logfile=None))


class SeenEmt(EMT):
    """ASE's EMT with a count of its own."""

    seen = 0

    def calculate(self, *args, **kwargs):
        type(self).seen += 1
        super().calculate(*args, **kwargs)


class Looking(BFGS):
    """Says it made one call, and looks at four other places in every step by ways of its own."""

    force_calls = 1

    def step(self, *args):
        aside = self.atoms.copy()
        for way in (self.atoms.calc, deepcopy(self.atoms.calc)):  # the same counter, a copy of it
            aside.calc = way
            aside.rattle(0.01, seed=self.nsteps + 7)
            aside.get_forces()
        inner = self.atoms.calc.inner  # around the counter
        for place in range(2):
            aside.rattle(0.01, seed=place)
            inner.get_forces(aside)
        super().step(*args)

    def get_number_of_steps(self):
        return 0


class Boasting(BFGS):
    """Says it is done, without having moved."""

    def run(self, *_args, **_kwargs):
        self.atoms.get_forces()
        return True


class Leaving(BFGS):
    """Converges, then leaves the atoms somewhere nobody has looked at."""

    def run(self, *args, **kwargs):
        done = super().run(*args, **kwargs)
        self.atoms.rattle(0.2, seed=1)
        return done


def test_an_optimizer_that_lies_about_its_calls_is_charged_them_all(start):
    honest = relax_one(contestant(BFGS), start, conditions())
    lying = relax_one(contestant(Looking), start, conditions())
    assert honest.converged
    assert lying.converged
    steps = honest.spent - 1  # the first point is not a step
    # four looks aside, and one more call for the present point, which the counter no longer remembers
    assert lying.spent == honest.spent + 5 * steps


def test_the_count_is_that_of_the_physics_itself(start):
    for one in (
        *our_contestants("auto"),
        *classical_contestants("BFGS,BFGSLineSearch,GPMin,CG", without_gpmin=False, free_cell=False),
    ):
        SeenEmt.seen = 0
        score = relax_one(one, start, Conditions(relaxion.potential(SeenEmt())))
        assert (score.converged, score.spent) == (True, SeenEmt.seen), one.name


def test_forces_decide_not_words(start):
    boasting = relax_one(contestant(Boasting), start, conditions(cap=50))
    assert (boasting.converged, boasting.charged, boasting.energy_ev) == (False, 50, None)
    leaving = relax_one(contestant(Leaving), start, conditions(cap=50))
    assert (leaving.converged, leaving.charged) == (False, 50)


def test_the_calculator_answers_no_more_than_the_cap(start):
    line_search = relax_one(contestant(BFGSLineSearch), start, conditions(fmax=1e-6, cap=4))
    assert (line_search.converged, line_search.spent, line_search.charged, line_search.error) == (False, 4, 4, None)
    enough = relax_one(contestant(BFGSLineSearch), start, conditions(fmax=1e-6, cap=500))
    exactly = relax_one(contestant(BFGSLineSearch), start, conditions(fmax=1e-6, cap=enough.spent))
    assert enough.converged
    assert exactly.converged, "the last call granted may be the one that converges"


def test_all_begin_at_the_same_place_and_the_start_is_not_touched(start):
    before = start.positions.copy()
    ours, core = our_contestants("auto")
    (scores,) = contest([ours, core, contestant(BFGS)], [start], conditions())
    assert np.array_equal(start.positions, before)
    assert scores["relaxion"].energy_ev == pytest.approx(scores["BFGS"].energy_ev, abs=4e-3)


def test_free_cell(start):
    start.set_cell(start.cell * 1.02, scale_atoms=True)
    cell_aware = classical_contestants("CellAwareBFGS", without_gpmin=False, free_cell=True)
    (scores,) = contest([*our_contestants(None), contestant(BFGS), *cell_aware], [start], conditions(free_cell=True))
    fixed = relax_one(contestant(BFGS), start, conditions())
    assert all(score.converged for score in scores.values())
    assert scores["core"].energy_ev < fixed.energy_ev - 0.01, "the cell was relaxed too"


def test_atoms_that_have_flown_apart_are_no_minimum():
    """ASE's FIRE2 does this to squeezed Lennard-Jones clusters: a gas has small forces too."""

    class Exploding(BFGS):
        def run(self, *_args, **_kwargs):
            self.atoms.positions *= 100
            return True

    start = SETS["lj38"].starts(1, 9000)[0]
    score = relax_one(contestant(Exploding), start, Conditions(SETS["lj38"].make_potential(), cap=50))
    assert (score.converged, score.charged) == (False, 50)
    assert score.error == "the structure fell apart into 38 pieces"


def test_pieces_through_periodic_images():
    chain = Atoms("Cu2", [[0, 0, 0], [9.0, 0, 0]], cell=[11.5, 0, 0], pbc=[True, False, False])
    assert pieces(chain) == 1, "2.5 Å through the border"
    chain.pbc = False
    assert pieces(chain) == 2
    assert fell_apart(chain, chain) is None, "it was in pieces already"
    assert pieces(bulk("Cu", a=30.0)) == 1


def test_errors_of_an_optimizer_are_its_own_failure(start):
    class Broken(BFGS):
        def step(self, *_args):
            raise ValueError("no way")

    score = relax_one(contestant(Broken), start, conditions(cap=30))
    assert (score.converged, score.charged, score.error) == (False, 30, "ValueError: no way")


def test_time_is_split_into_calculator_and_overhead(start):
    class Slow(EMT):
        def calculate(self, *args, **kwargs):
            time.sleep(0.2)
            super().calculate(*args, **kwargs)

    class Pondering(BFGS):
        def step(self, *args):
            end = time.process_time() + 0.03
            while time.process_time() < end:
                pass
            super().step(*args)

    score = relax_one(contestant(Pondering), start, Conditions(relaxion.potential(Slow())))
    steps = score.spent - 1
    assert score.calculator_seconds >= 0.2 * score.spent
    assert score.seconds >= score.calculator_seconds + 0.03 * steps
    assert 0.03 * steps <= score.overhead_seconds < 0.2 * score.spent, "sleeping in the calculator is no overhead"


def test_who_is_measured():
    fixed = [one.name for one in classical_contestants("", without_gpmin=True, free_cell=False)]
    assert "GPMin" not in fixed
    assert "CellAwareBFGS" not in fixed
    free = [one.name for one in classical_contestants("", without_gpmin=False, free_cell=True)]
    assert {"GPMin", "CellAwareBFGS", "BFGSLineSearch"} <= set(free)
    everybody = [one.name for one in classical_contestants("all", without_gpmin=False, free_cell=False)]
    assert {"PreconLBFGS", "ODE12r", *fixed} <= set(everybody)
    assert "QuasiNewton" not in everybody, "an alias"
    asked = [one.name for one in classical_contestants("gpmin, BFGS", without_gpmin=True, free_cell=False)]
    assert asked == ["GPMin", "BFGS"], "who is asked for by name takes part"
    assert classical_contestants("none", without_gpmin=False, free_cell=False) == []


def test_gpmin_gives_up_before_its_matrix_fills_the_memory():
    gpmin = contestant(GPMin)
    assert gpmin.steps(10, 500) == 6000 // 31
    assert gpmin.steps(1, 500) == 500
    assert contestant(BFGS).steps(1000, 500) == 500


def test_where_the_start_is_converged_one_call_is_enough():
    atoms = bulk("Cu")
    for one in (*our_contestants(None), contestant(BFGS)):
        score = relax_one(one, atoms, conditions())
        assert (score.converged, score.spent) == (True, 1)
    atoms.calc = EMT()
    assert largest_force(atoms) < 0.05
