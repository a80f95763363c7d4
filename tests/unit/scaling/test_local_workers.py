"""Workers as processes: killed, hanging and hostile ones."""

import os
import signal
import time
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
from ase.io import read, write
from inline_workers import alloy

from relaxion.apps.relax_many.results import ResultFolder, failures, results
from relaxion.apps.relax_many.run import ManyRun, RelaxWorker
from relaxion.apps.relax_many.settings import ManySettings
from relaxion.errors import RunError, SettingsError
from relaxion.workers import LocalPool, WorkerPlace

HERE = Path(__file__).parent


def run(folder: Path, settings: ManySettings, file: Path, *, chunk_size: int, time_limit=None, make=LocalPool):
    worker = partial(RelaxWorker, settings, time_limit_seconds=time_limit, batch_size=8, folder=str(HERE))
    with ResultFolder(folder, settings, [file]) as opened, make(2, worker) as workers:
        return ManyRun(opened, workers, settings, [file], chunk_size, time_limit).run()


class DisturbedWorkers(LocalPool):
    """Three workers killed right after they were given work, and their parent too."""

    given = 0

    def give(self, worker, task):
        super().give(worker, task)
        self.given += 1
        if self.given in (1, 3, 4):
            self.kill(worker)
        if self.given == 3:
            os.kill(_parent(self.known[0].process.pid), signal.SIGKILL)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def test_killed_workers_lose_and_double_nothing(tmp_path, settings):
    write(tmp_path / "in.extxyz", [alloy(seed) for seed in range(60)])
    calm = run(tmp_path / "calm", settings, tmp_path / "in.extxyz", chunk_size=16)
    tally = run(tmp_path / "out", settings, tmp_path / "in.extxyz", chunk_size=16, make=DisturbedWorkers)
    assert calm.relaxed == tally.relaxed == 60
    assert tally.worker_deaths >= 2  # one may be done before it is killed
    wanted = {found["key"]: found for found in results(tmp_path / "calm")}
    found = list(results(tmp_path / "out"))
    assert len(found) == 60
    for frame in found:
        assert frame["force_calls"] == wanted[frame["key"]]["force_calls"]
        assert frame["energy_ev"] == pytest.approx(wanted[frame["key"]]["energy_ev"], abs=1e-6)


@pytest.mark.parametrize(("calculator", "chunk_size"), [("HostileEMT", 1), ("HostileBatch", 16)])
def test_hostile_calculators_are_survived(tmp_path, settings, calculator, chunk_size):
    """Raises (H), hangs (O), kills its process (Pd); of ASE calculators also NaN (C) and wrong shapes (N)."""
    trouble = {"H": "licence server", "O": "time limit", "Pd": "died 2 times"}
    if calculator == "HostileEMT":
        trouble |= {"C": "not finite", "N": "forces of shape"}
    structures = [alloy(seed) for seed in range(9)] + [alloy(20, extra=element) for element in trouble]
    write(tmp_path / "in.extxyz", structures)
    hostile = settings.model_copy(update={"calculator": f"hostile_calculators:{calculator}"})
    tally = run(tmp_path / "out", hostile, tmp_path / "in.extxyz", chunk_size=chunk_size, time_limit=2.5)
    assert (tally.relaxed, tally.failed) == (9, len(trouble))
    said = {
        read(StringIO(reason["input"]), format="extxyz").symbols[0]: reason["reason"]
        for reason in failures(tmp_path / "out")
    }
    assert said.keys() == trouble.keys()
    for element, words in trouble.items():
        assert words in said[element]


def test_a_calculator_that_cannot_be_made_ends_the_run_with_a_sentence(tmp_path, settings):
    write(tmp_path / "in.extxyz", alloy(0))
    broken = settings.model_copy(update={"calculator": "hostile_calculators:NoSuchThing"})
    with pytest.raises(RunError, match="NoSuchThing"):
        run(tmp_path / "out", broken, tmp_path / "in.extxyz", chunk_size=4)


def test_workers_do_not_outlive_their_crew(settings):
    workers = LocalPool(1, partial(RelaxWorker, settings, folder=str(HERE)))
    pid = workers.known[0].process.pid
    workers.close()
    until = time.monotonic() + 600
    while time.monotonic() < until and Path(f"/proc/{pid}/stat").exists():
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}/stat").exists()


WRONG = (
    "", "local", "local:0", "local:x", "local:2@auto", "ray", "ray:", "ray:0", "ray:-1", "ray:4@", "ray:x@auto",
    "dask:3", "local:99999", "ray:99999",
)  # fmt: skip


def test_words_for_workers():
    assert WorkerPlace.read("2") == WorkerPlace.read("local:2") == WorkerPlace("local", 2)
    assert WorkerPlace.read("ray:auto") == WorkerPlace("ray", None, "auto")
    assert WorkerPlace.read("ray:local") == WorkerPlace("ray")
    assert WorkerPlace.read("ray:4") == WorkerPlace("ray", 4)
    assert WorkerPlace.read("ray:10.0.0.1:6379") == WorkerPlace("ray", None, "10.0.0.1:6379")
    assert WorkerPlace.read("ray:16@10.0.0.1:6379") == WorkerPlace("ray", 16, "10.0.0.1:6379")


@pytest.mark.parametrize("word", WRONG)
def test_words_for_workers_are_checked(word):
    with pytest.raises(SettingsError, match="local:2"):
        WorkerPlace.read(word)


class Moody:
    """Raises, saves when it is asked to stop, answers; on demand."""

    def __init__(self, folder):
        if not folder.is_dir():
            raise RunError(f"no folder {folder}")
        self.folder = folder
        signal.signal(signal.SIGTERM, self.save)
        self.stopped = False

    def save(self, *_):
        (self.folder / "saved").touch()
        self.stopped = True

    def __call__(self, task):
        if task == "raise":
            raise KeyError("what went wrong over there")
        yield None
        yield task
        while task == "long" and not self.stopped:
            time.sleep(0.01)


def heard(pool, condition):
    found = []
    until = time.monotonic() + 600
    while time.monotonic() < until:
        found += pool.hear(0.5)
        if any(condition(news) for news in found):
            return found
    raise AssertionError("waited in vain")


def test_what_a_worker_raises_is_raised_here_and_it_goes_on(tmp_path):
    with LocalPool(1, partial(Moody, tmp_path)) as pool:
        while not pool.idle():
            pool.hear(0.5)
        pool.give(0, "raise")
        with pytest.raises(KeyError, match="over there"):
            heard(pool, lambda news: news.done)
        pool.give(0, "answer")
        news = heard(pool, lambda news: news.done)
        assert [result for one in news for result in one.results] == ["answer"]


def test_who_is_asked_to_stop_may_save(tmp_path):
    pool = LocalPool(2, partial(Moody, tmp_path))
    while not pool.idle():
        pool.hear(0.5)
    pool.give(pool.idle()[0], "long")
    heard(pool, lambda news: bool(news.results))
    pool.stop()
    assert (tmp_path / "saved").exists()


def test_a_worker_that_cannot_begin_says_why(tmp_path):
    with LocalPool(1, partial(Moody, tmp_path / "nowhere")) as pool, pytest.raises(RunError, match="no folder"):
        heard(pool, lambda news: news.lost)
