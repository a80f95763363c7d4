"""The one assessor: force calls as the relaxer needs them, kind by kind, beside baselines that are measured once."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from ase.filters import FrechetCellFilter

from relaxion import Relaxer, potential
from relaxion.errors import FileError
from relaxion.optimizer.choice import new_stepper
from relaxion.optimizer.step import Stepper
from relaxion.potentials.base import PotentialCalculator
from relaxion.structures import Evaluation, Move, Outcome, State, Structures
from relaxion.train.data.alloys import fcc_alloys
from relaxion.train.data.perturbations import perturbation
from relaxion.train.data.starts import PerturbedStarts
from relaxion.train.judge.assessment import (
    MOST_SHOTS,
    Assessed,
    AssessedRelaxation,
    AssessedStarts,
    AssessmentStopped,
    Assessor,
    Filming,
    film_of,
    read_baselines,
    shot,
    under_safeguard,
)

EMT, EAM = potential("emt"), potential("eam")


def alloys(seed: int, number: int, cell_free: bool = False) -> Structures:
    generator = torch.Generator().manual_seed(seed)
    pool = fcc_alloys(("Al", "Cu", "Pd"), number, generator, n_atoms=4, cell_free=cell_free)
    return PerturbedStarts(pool, [perturbation("strain:0.02+rattle:0.15")]).sample(generator, number)


STARTS = (
    AssessedStarts("bulk", EMT, alloys(1, 3)),
    AssessedStarts("eam", EAM, alloys(2, 2)),
    AssessedStarts("cell", EMT, alloys(3, 2, cell_free=True)),
    AssessedStarts("bulk", EAM, alloys(4, 1)),
)


def one_by_one(starts: AssessedStarts) -> list[int]:
    """What the relaxer needs."""
    found = []
    for atoms, free in zip(starts.structures.to_ase(), starts.structures.cell_free.tolist(), strict=True):
        atoms.calc = PotentialCalculator(starts.potential)
        relaxer = Relaxer(FrechetCellFilter(atoms) if free else atoms, policy=None, logfile=None)
        assert relaxer.run(fmax=0.05, steps=200)
        found.append(relaxer.force_calls)
    return found


def test_every_start_is_relaxed_as_the_relaxer_does_it_on_its_own_potential() -> None:
    assessed = Assessor(STARTS)(under_safeguard(new_stepper))
    assert assessed.force_calls.tolist() == [calls for group in STARTS for calls in one_by_one(group)]
    assert [one.label for one in assessed.relaxed] == ["bulk"] * 3 + ["eam"] * 2 + ["cell"] * 2 + ["bulk"]
    assert {kind: len(ones) for kind, ones in assessed.by_kind().items()} == {"bulk": 4, "eam": 2, "cell": 2}
    for one in assessed.relaxed:
        shots = one.shots
        assert [s.call for s in shots] == list(range(1, one.force_calls + 1))
        assert shots[-1].energy_ev == one.energy_ev
        assert shots[-1].fmax_ev_per_angstrom < 0.05 <= shots[0].fmax_ev_per_angstrom
    cells = [one.shots[-1].cell - one.shots[0].cell for one in assessed.by_kind()["cell"]]
    assert all(np.abs(change).max() > 1e-4 for change in cells)
    assert assessed.success_rate == 1


def test_what_does_not_converge_is_charged_the_cap() -> None:
    assessed = Assessor(STARTS[:1], cap=3)(under_safeguard(new_stepper, cap=3))
    assert assessed.force_calls.tolist() == [3, 3, 3]
    assert assessed.success_rate == 0
    assert assessed.calls.energies_ev == (None, None, None)
    assert assessed.record.as_plain()["structures"]["outcome"] == ["step_limit"] * 3


def test_each_relaxation_gets_a_stepper_of_its_own() -> None:
    made: list[Stepper] = []

    def make() -> Stepper:
        made.append(new_stepper())
        return made[-1]

    Assessor(STARTS[:2])(under_safeguard(make))
    assert len({id(stepper) for stepper in made}) == 5


def test_it_stops_when_asked() -> None:
    asked = count()
    with pytest.raises(AssessmentStopped):
        Assessor(STARTS[:1])(under_safeguard(new_stepper), stop=lambda: next(asked) > 1)
    assert next(asked) == 3


def test_starts_are_made_once_and_only_when_needed() -> None:
    made = count()

    def make() -> tuple[AssessedStarts, ...]:
        next(made)
        return STARTS[:1]

    assessor = Assessor(make)
    assert next(made) == 0
    assert assessor.n_starts == len(assessor.starts[0].structures) == 3
    assert next(made) == 2


def test_baselines_are_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assessor = Assessor(STARTS[:1])
    assessor.compare(tmp_path)
    kept = json.loads((tmp_path / "baselines.json").read_text())
    assert list(kept) == ["BFGS", "FIRE", "core"]
    assert kept["core"]["force_calls"] == one_by_one(STARTS[0])
    assert kept["BFGS"]["mean_force_calls"] == np.mean(kept["BFGS"]["force_calls"])
    again = Assessor(STARTS[:1])
    monkeypatch.setattr(again, "measure", lambda _name: pytest.fail("measured twice"))
    again.compare(tmp_path)
    assert again.baselines == assessor.baselines


def test_baselines_of_older_runs_are_read_and_damaged_ones_named(tmp_path: Path) -> None:
    file = tmp_path / "baselines.json"
    file.write_text('{"BFGS": {"mean_force_calls": 12.5, "median_force_calls": 11.0, "failures": 0}}')
    assert read_baselines(file) == {"BFGS": 12.5}
    file.write_text('{"BFGS": {}}')
    with pytest.raises(FileError, match="measures again"):
        read_baselines(file)


def test_ases_optimizers_are_counted_and_capped() -> None:
    free = Assessor(STARTS).measure("BFGS")
    capped = Assessor(STARTS, cap=4).measure("BFGS")
    assert min(free.force_calls) > 4
    assert capped.force_calls == (4,) * 8
    assert (free.failures, capped.failures) == (0, 8)


def relaxed(label: str, calls: int, outcome: str = "converged", **rewarded: float) -> AssessedRelaxation:
    film = film_of([shot(1, np.zeros((2, 3)), np.eye(3), 0.0, 1.0)], 2)
    energy = 0.5 if outcome == "converged" else None
    return AssessedRelaxation(np.array([13, 29]), True, outcome, calls, energy, film, label, **rewarded)  # pyright: ignore[reportArgumentType]


def test_scalars_have_the_names_that_logs_know() -> None:
    ways = [relaxed("bulk", 4), relaxed("bulk", 6), relaxed("slab", 20, "stalled")]
    scalars = Assessed(ways, {"BFGS": 12.0}, cap=20, extra={"eval/relative_error_crystals": 0.4}).scalars()
    assert scalars == {
        "eval/mean_reward": -10.0,
        "eval/force_calls_mean": 10.0,
        "eval/force_calls_median": 6.0,
        "eval/force_calls_p95": pytest.approx(18.6),
        "eval/success_rate": pytest.approx(2 / 3),
        "eval/force_calls_bulk": 5.0,
        "eval/force_calls_slab": 20.0,
        "eval/relative_error_crystals": 0.4,
        "eval/force_calls_bfgs": 12.0,
    }
    rewarded = [relaxed("", 4, reward=2.0, length=3), relaxed("", 6, reward=-1.0, length=5)]
    scalars = Assessed(rewarded, {}).scalars()
    assert (scalars["eval/mean_reward"], scalars["eval/worst_reward"], scalars["eval/mean_ep_length"]) == (0.5, -1, 4)
    assert "eval/force_calls_" not in scalars


def test_films_of_relaxations_side_by_side() -> None:
    structures = alloys(5, 3)
    forces = torch.zeros_like(structures.positions)
    forces[4:8, 0] = 0.3
    energies = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    move = Move.zero(structures)
    calls = torch.tensor([1, 2, 3])
    state = State(structures, Evaluation(energies, forces, None), None, move, forces, energies, calls)
    filming = Filming(structures)
    filming.shoot(torch.arange(3), state)
    filming.shoot(torch.tensor([2]), state.select(torch.tensor([1])))
    outcomes = torch.tensor([int(Outcome.CONVERGED), int(Outcome.STALLED), int(Outcome.STEP_LIMIT)])
    ended = filming.relaxed(outcomes, torch.tensor([1, 9, 9]), returns=energies, lengths=calls)
    assert [one.outcome for one in ended] == ["converged", "stalled", "step_limit"]
    assert [one.energy_ev for one in ended] == [1.0, None, None]
    assert [(one.reward, one.length) for one in ended] == [(1.0, 1), (2.0, 2), (3.0, 3)]
    assert [s.fmax_ev_per_angstrom for s in ended[2].shots] == [0.0, pytest.approx(0.3)]
    assert np.allclose(ended[1].shots[0].positions, structures.positions[4:8].numpy(), atol=1e-5)


@pytest.mark.parametrize("calls", [1, 2, MOST_SHOTS, MOST_SHOTS + 1, 1000])
def test_films_keep_first_and_newest_and_stay_small(calls: int) -> None:
    film = film_of((shot(call, np.zeros((2, 3)), np.eye(3), 0.0, 1.0) for call in range(1, calls + 1)), 2)
    kept = [frame.call for frame in film.frames]
    assert (kept[0], kept[-1]) == (1, calls)
    assert kept == sorted(set(kept))
    assert min(calls, MOST_SHOTS // 2) <= len(kept) <= MOST_SHOTS
