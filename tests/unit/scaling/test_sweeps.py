"""Sweeps: what may be varied, what is proposed, what a folder remembers, and what happens when workers die."""

from __future__ import annotations

import csv
import math
import threading
from pathlib import Path
from typing import Any

import pytest
from inline_workers import InlinePool
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from relaxion.apps.tuning import Ended, Sweep, SweepPlan, read_space, run_trial, values_of
from relaxion.errors import FileError, RunError, SettingsError
from relaxion.train.tasks.relax_settings import RelaxRunSettings
from relaxion.train.tasks.settings import find, read_toml, settings_from_recipe

SMALL = {
    "steps": 120, "widths": [8, 8], "batch_size": 8, "warmup_steps": 40, "assessment_starts": 1,
    "assessment_interval_steps": 0, "checkpoint_interval_steps": 40,
}  # fmt: skip
PRESENT = settings_from_recipe(find("pendulum"), None, {}).flat()
VARY = ("policy_learning_rate=1e-4:1e-2:log", "batch_size=8:32")


def plan(*vary: str, **given: Any) -> SweepPlan:
    space = read_space(vary or VARY, PRESENT)
    rest = {key: value for key, value in SMALL.items() if key not in space}
    return SweepPlan(find("pendulum"), None, rest | given, space, seed=3)


class Bowl(InlinePool):
    """A worker without a process: the best batch size is 20, and the worker is lost on the way."""

    def __init__(self, lose: dict[int, int] | None = None, stop_after: int | None = None) -> None:
        self.lose, self.started = lose or {}, list[int]()
        self.stopped, self.stop_after = threading.Event(), stop_after
        super().__init__(lambda: bowl, self._fate)

    def _fate(self, trials: list[str]) -> bool:
        number = int(Path(trials[0]).name)
        self.started.append(number)
        if len(self.started) == self.stop_after:
            self.stopped.set()
        self.lose[number] = self.lose.get(number, 0) - 1
        return self.lose[number] >= 0


def bowl(trials: list[str]) -> list[dict[str, Any]]:
    (trial,) = map(Path, trials)
    tried = read_toml(trial.with_suffix(".toml"))
    value = -((tried["batch_size"] - 20) ** 2) - (math.log10(tried["policy_learning_rate"]) + 3) ** 2
    return [{"key": trial.name, "ended": Ended(value, None, "final_return_mean", 1.0)}]


def swept(out: Path, n_trials: int, workers: Bowl | None = None, what: SweepPlan | None = None) -> Sweep:
    workers = workers or Bowl()
    out.mkdir(exist_ok=True)
    sweep = Sweep(what or plan(), out)
    sweep.open()
    sweep.run(n_trials, workers, workers.stopped.is_set, lambda _: None)
    sweep.write_tables()
    return sweep


class TestSpace:
    def test_words(self) -> None:
        space = read_space([*VARY, "agent=td3|sac", "widths=[8, 8]|[64]"], PRESENT)
        assert space["policy_learning_rate"] == FloatDistribution(1e-4, 1e-2, log=True)
        assert space["batch_size"] == IntDistribution(8, 32)
        assert space["agent"] == CategoricalDistribution(('"td3"', '"sac"'))
        assert values_of(space, {"widths": "[64]", "batch_size": 9}) == {"widths": [64], "batch_size": 9}

    def test_whole_bounds_of_a_setting_that_is_no_whole_number(self) -> None:
        assert read_space(["discount_factor=0:1"], PRESENT)["discount_factor"] == FloatDistribution(0.0, 1.0)

    @pytest.mark.parametrize(
        ("words", "complaint"),
        [
            ("batch_size", "key=lo:hi"),
            ("batch_size=8", "expected lo:hi"),
            ("batch_size=8:high", "expected lo:hi"),
            ("batch_size=32:8", "first bound must be below"),
            ("batch_size=8.5:32", "batch_size is a whole number"),
            ("discount_factor=0:1:log", "above 0"),
            ("discount_factor=0.1:1:lin", "only ':log' may follow"),
            ("discount_factor=nan:1", "expected lo:hi"),
            ("agent=sac|sac", "two different values"),
        ],
    )
    def test_what_is_no_space(self, words: str, complaint: str) -> None:
        with pytest.raises(SettingsError, match=complaint):
            read_space([words], PRESENT)

    @pytest.mark.parametrize(
        ("what", "complaint"),
        [
            ({"vary": ["batch_sise=8:32"]}, r"batch_sise = 8 of the space is not valid: unknown setting.*'batch_size'"),
            ({"vary": ["discount_factor=0.5:2"]}, "discount_factor = 2.0 of the space is not valid"),
            ({"vary": ["batch_size=8:64"]}, "batch_size = 64 of the space is not valid: warmup_steps 40 is below"),
            ({"vary": ["seed=1:5"]}, "seed cannot be varied"),
            ({"vary": ["batch_size=8:16"], "batch_size": 8}, "batch_size is both set and varied"),
        ],
    )
    def test_ends_that_cannot_be_are_refused_before_anything_runs(self, what: dict[str, Any], complaint: str) -> None:
        vary = what.pop("vary")
        with pytest.raises(SettingsError, match=complaint):
            plan(*vary, **what).check()


class TestPlan:
    def test_structures_are_chosen_on_the_validation_side(self) -> None:
        recipe, space = find("emt-metals"), {"updates_per_round": IntDistribution(4, 16)}
        own = SweepPlan(recipe, None, {"n_pooled": 40}, space)
        trial, best = own.settings({"updates_per_round": 4}), own.plain_settings({"updates_per_round": 4})
        assert isinstance(trial, RelaxRunSettings)
        assert isinstance(best, RelaxRunSettings)
        assert (trial.atoms.assess_on, best.atoms.assess_on) == ("validation", "held_apart")
        assert not own.maximise


class TestProposals:
    def test_it_learns(self, tmp_path: Path) -> None:
        best = swept(tmp_path, 40).best()
        assert best is not None
        assert best.ended is not None
        assert best.ended.value is not None
        assert best.ended.value > -1.5


class TestFolder:
    def test_table_and_best_recipe(self, tmp_path: Path) -> None:
        sweep = swept(tmp_path, 4)
        with (tmp_path / "trials.csv").open() as file:
            rows = list(csv.DictReader(file))
        best = sweep.best()
        assert best is not None
        assert [row["trial"] for row in rows] == ["0", "1", "2", "3"]
        assert max(float(row["value"]) for row in rows) == float(rows[best.number]["value"])
        recipe = settings_from_recipe(tmp_path / "best.toml", None, {}).flat()
        assert recipe["batch_size"] == int(rows[best.number]["batch_size"])
        assert recipe["policy_learning_rate"] == float(rows[best.number]["policy_learning_rate"])

    def test_stopped_and_gone_on_with_it_is_the_straight_sweep(self, tmp_path: Path) -> None:
        straight = swept(tmp_path / "straight", 14)
        swept(tmp_path / "stopped", 14, Bowl(stop_after=6))
        goes_on = Bowl()
        resumed = swept(tmp_path / "stopped", 14, goes_on)
        assert resumed.trials == straight.trials
        assert goes_on.started == list(range(6, 14))  # what is done is not done again

    def test_an_unfinished_trial_comes_first(self, tmp_path: Path) -> None:
        swept(tmp_path, 3, Bowl(lose={1: 1}, stop_after=2))
        goes_on = Bowl()
        swept(tmp_path, 3, goes_on)
        assert goes_on.started == [1, 2]

    def test_a_lost_worker_is_asked_again_and_a_deadly_trial_set_aside(self, tmp_path: Path) -> None:
        workers = Bowl(lose={1: 1, 2: 99})
        sweep = swept(tmp_path, 4, workers)
        assert workers.started.count(1) == 2
        assert workers.started.count(2) == 2
        failed = sweep.trials[2].ended
        assert failed is not None
        assert failed.value is None
        assert "its worker died 2 times" in str(failed.reason)
        assert "failed" in (tmp_path / "trials.csv").read_text()

    def test_another_sweep_is_refused_by_name(self, tmp_path: Path) -> None:
        swept(tmp_path, 1)
        with pytest.raises(RunError, match=r"another sweep.*: batch_size \(was '8:32', now '8:30'\)"):
            swept(tmp_path, 2, what=plan("batch_size=8:30", VARY[0]))
        with pytest.raises(RunError, match=r"steps \(was 120, now 121\)"):
            swept(tmp_path, 2, what=plan(steps=121))

    def test_a_folder_of_something_else_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").touch()
        with pytest.raises(FileError, match="holds no sweep"):
            swept(tmp_path, 1)
        (tmp_path / "study.journal").write_text('{"op_code": "magic"}\nnonsense\n')
        with pytest.raises(FileError, match="is no journal of Optuna's"):
            swept(tmp_path, 1)


class TestTrial:
    def test_settings_that_diverge_are_a_result(self, tmp_path: Path) -> None:
        settings = plan().settings({"policy_learning_rate": 1e30, "critic_learning_rate": 1e30, "batch_size": 8})
        (tmp_path / "one.toml").write_text(settings.as_toml())
        ended = run_trial(tmp_path / "one")
        assert ended.value is None
        assert "not finite" in str(ended.reason)
