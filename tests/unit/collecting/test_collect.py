"""`relaxion collect`: reproducible starts, relaxations in batches, stopped and continued without loss."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ase.build import bulk
from ase.filters import FrechetCellFilter

from relaxion.database import RelaxationDatabase, Trajectory
from relaxion.errors import FileError, PotentialError, RunError, SettingsError
from relaxion.optimizer.choice import new_stepper
from relaxion.potentials import potential
from relaxion.potentials.base import Potential
from relaxion.structures import Evaluation, Outcome, Structures
from relaxion.train.collecting.collect import collect, jobs, summary
from relaxion.train.collecting.relaxing import Pool, Skipped
from relaxion.train.collecting.starts import CollectSettings, Start, make_start
from relaxion.train.runs.recipe import find, read_toml

RECIPE = {
    "seed": 3,
    "kinds": {
        "alloy": {"make": "metal", "engine": "emt", "number": 12, "free_cell_share": 0.4},
        "other": {"make": "metal", "engine": "eam", "number": 6, "largest_n_atoms": 8},
    },
}


def settings(**given: object) -> CollectSettings:
    return CollectSettings.of(RECIPE, given)


def test_a_start_depends_on_seed_kind_and_number_only() -> None:
    first, again = make_start(settings(), "alloy", 5), make_start(settings(number=400), "alloy", 5)
    assert first.key == again.key
    assert torch.equal(first.structure().positions, again.structure().positions)
    assert make_start(settings(seed=4), "alloy", 5).key != first.key
    assert settings().key("alloy", 6) != first.key
    assert settings(largest_strain=0.02).key("alloy", 5) != first.key


def test_kinds_are_mixed_in_proportion() -> None:
    order = [job.kind for job in jobs(settings())]
    assert order.count("alloy") == 12
    for share in (0.25, 0.5, 0.75):
        part = order[: int(share * len(order))]
        assert part.count("other") == pytest.approx(share * 6, abs=1)


def test_settings_reach_one_kind_or_all() -> None:
    found = settings(**{"other.number": 9, "max_force_calls": 7})
    assert (found.kinds["other"].number, found.kinds["alloy"].number) == (9, 12)
    assert {kind.max_force_calls for kind in found.kinds.values()} == {7}
    with pytest.raises(SettingsError, match="no kind 'allo' in this recipe: did you mean 'alloy'"):
        settings(**{"allo.number": 9})
    with pytest.raises(SettingsError, match="unknown setting 'max_force_call': did you mean 'max_force_calls'"):
        settings(max_force_call=9)
    with pytest.raises(SettingsError, match="seed"):
        settings(seed=9000)  # belongs to benchmarks
    with pytest.raises(SettingsError, match="unknown maker 'metl': did you mean 'metal'"):
        settings(make="metl")
    with pytest.raises(SettingsError, match="section for each kind"):
        CollectSettings.of({"seed": 1}, {})


def test_the_shipped_recipe_is_read_and_makes_every_kind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # no files of ../shared here
    found = CollectSettings.of(read_toml(find("universal-data")), {})
    assert found.side == "training"
    for kind, own in found.kinds.items():
        if own.make != "file":
            start = make_start(found, kind, 0)
            assert own.smallest_n_atoms <= len(start.atoms) <= own.largest_n_atoms + 6  # adsorbates
            assert torch.isfinite(start.structure().positions).all()


def pool(starts: Sequence[Start], engine: str | Potential = "emt", **given: object) -> Pool:
    physics = potential(engine) if isinstance(engine, str) else engine
    return Pool(physics, physics.name, settings(**given), iter(starts), new_stepper)


def relaxed(*starts: Start, **given: Any) -> dict[str, Trajectory | Skipped]:
    found, relaxing = {}, pool(starts, **given)
    while not relaxing.done:
        found |= {one.key: one for one in relaxing.advance()}
    return found


def relaxed_one(start: Start, **given: Any) -> Trajectory | Skipped:
    return relaxed(start, **given)[start.key]


def test_free_cells_end_where_ase_finds_no_force() -> None:
    start = next(s for s in (make_start(settings(), "alloy", n) for n in range(12)) if s.strain is not None)
    found = relaxed_one(start)
    assert isinstance(found, Trajectory)
    assert found.outcome == Outcome.CONVERGED
    atoms = found.structures.to_ase()[-1]
    atoms.calc = potential("emt").as_calculator()
    forces = FrechetCellFilter(atoms).get_forces()
    assert np.linalg.norm(forces, axis=1).max() < 2.1e-3
    # symmetric all the way: nothing turns
    change = torch.linalg.solve(found.cells[:1].expand_as(found.cells), found.cells)
    assert torch.allclose(change, change.mT, atol=1e-10)
    assert not torch.allclose(change[-1], torch.eye(3, dtype=torch.float64), atol=1e-3)


def test_batches_relax_as_each_would_alone() -> None:
    starts = [make_start(settings(), "alloy", number) for number in range(6)]
    together = relaxed(*starts, batch_n_structures=4)
    assert len(together) == 6
    for start in starts:
        alone, found = relaxed_one(start), together[start.key]
        assert type(alone) is type(found)
        if isinstance(alone, Trajectory) and isinstance(found, Trajectory):
            assert torch.allclose(alone.positions, found.positions, atol=1e-6)


def test_exploding_starts_are_skipped_and_long_ones_kept() -> None:
    start = make_start(settings(), "alloy", 0)
    skipped = relaxed_one(start, largest_force_ev_per_angstrom=1e-6)
    assert isinstance(skipped, Skipped)
    assert skipped.reason == "too large a force"
    long = relaxed_one(start, max_force_calls=3)
    assert isinstance(long, Trajectory)
    assert (long.outcome, len(long)) == (Outcome.STEP_LIMIT, 3)


def test_the_volume_follows_the_pressure() -> None:
    """Copper made 25 % too large is at its own size before it is displaced."""
    crystal = bulk("Cu", a=3.61 * 1.25 ** (1 / 3))
    atoms = crystal * (2, 1, 1)
    sized = settings(sizing_force_calls=5, max_force_calls=2)
    start = Start("key", "alloy", 0, atoms, crystal, None, np.zeros((2, 3)))
    found = relaxed_one(start, sizing_force_calls=5, max_force_calls=2)
    assert sized.kinds["alloy"].sizing_force_calls == 5
    assert isinstance(found, Trajectory)
    assert float(torch.linalg.det(found.cells[0])) / 2 == pytest.approx(11.57, rel=0.01)  # EMT's own volume


class Failing(Potential):
    """EMT that fails for structures of some size, as an SCF does."""

    name = "failing"

    def __init__(self) -> None:
        super().__init__()
        self.emt = potential("emt")

    def evaluate(self, structures: Structures, stresses: bool) -> Evaluation:
        if (structures.counts == 4).any():
            raise PotentialError("no convergence")
        return self.emt(structures, stresses=stresses)


def test_a_structure_that_fails_does_not_take_its_batch_along() -> None:
    small, large = bulk("Cu"), bulk("Cu", cubic=True)
    cases = {"a": (small * (2, 1, 1), None), "b": (large, None), "c": (small * (3, 1, 1), small)}
    starts = [
        Start(name, "alloy", 0, atoms, crystal, None, 0.1 * np.arange(3 * len(atoms)).reshape(-1, 3) % 0.25)
        for name, (atoms, crystal) in cases.items()
    ]
    found = relaxed(*starts, engine=Failing())
    assert [type(found[name]) for name in "abc"] == [Trajectory, Skipped, Trajectory]
    sized = relaxed_one(replace(starts[0], crystal=large), engine=Failing(), sizing_force_calls=3)
    for skipped in (found["b"], sized):
        assert isinstance(skipped, Skipped)
        assert skipped.reason == "no answer"


def test_done_twice_is_done_once(tmp_path: Path) -> None:
    first = collect(settings(), tmp_path / "store")
    assert first.complete
    assert first.trajectories + sum(first.skipped.values()) == 18
    assert set(first.kinds) == {"alloy", "other"}
    assert first.force_calls >= first.structures
    assert first.cpu_seconds > 0
    assert collect(settings(), tmp_path / "store") == first
    more = collect(settings(**{"other.number": 8}), tmp_path / "store")
    assert more.trajectories + sum(more.skipped.values()) == 20
    with pytest.raises(RunError, match="holds structures for training"):
        collect(settings(side="assessment"), tmp_path / "store")


def test_killed_with_its_workers_left_behind_and_continued(tmp_path: Path) -> None:
    """SIGKILL for the parent of two workers; they notice, the next run completes, nothing is lost, double or other."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'seed = 3\nbatch_n_structures = 3\n[kinds.alloy]\nmake = "metal"\nengine = "emt"\nnumber = 200\n'
        "free_cell_share = 0.5\n"
    )
    store = tmp_path / "store"
    words = ["collect", str(recipe), "--out", str(store), "-q", "--workers", "2"]
    process = subprocess.Popen([sys.executable, "-c", "from relaxion.apps.cli.app import main; main()", *words])
    _wait_for(lambda: _n_kept(store) >= 6)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = RelaxationDatabase.open(store).keys()
    found = CollectSettings.of(read_toml(recipe), {"number": 40})
    assert collect(found, store).complete
    final = RelaxationDatabase.open(store)
    assert final.keys() >= kept
    with sqlite3.connect(final.files()[0]) as database:
        every = database.execute("SELECT key FROM relaxations UNION ALL SELECT key FROM skipped").fetchall()
    assert len(every) == len(set(every))
    collect(found, tmp_path / "straight")
    straight = {one.key: one for one in RelaxationDatabase.open(tmp_path / "straight")}
    shared = [one for one in final if one.key in straight]
    assert len(shared) == len(straight)
    assert all(torch.allclose(one.positions, straight[one.key].positions, atol=1e-6) for one in shared)


def _n_kept(store: Path) -> int:
    try:
        return len(RelaxationDatabase.open(store))
    except FileError:
        return 0


def _wait_for(condition: Callable[[], bool], seconds: float = 600.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_a_second_collection_into_the_same_store_waits_outside(tmp_path: Path) -> None:
    import fcntl

    collect(settings(number=1), tmp_path / "store")
    with (tmp_path / "store" / ".collecting").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="another 'relaxion collect' is busy"):
            collect(settings(number=2), tmp_path / "store")


def test_time_is_kept_and_the_summary_says_so(tmp_path: Path) -> None:
    found = collect(settings(number=4000), tmp_path / "store", limit_minutes=0.0)
    assert not found.complete
    assert "not complete: the same command continues" in found.lines()[0]
    assert summary(RelaxationDatabase.open(tmp_path / "store")).trajectories == found.trajectories
