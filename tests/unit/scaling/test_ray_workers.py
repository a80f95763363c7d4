"""Workers as Ray actors, on a cluster of this machine's own."""

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from ase.io import write
from inline_workers import InlineWorkers, alloy

from relaxion.apps.relax_many.learning import Learner, read_fit
from relaxion.apps.relax_many.results import ResultFolder, read_rows, results
from relaxion.apps.relax_many.run import ManyRun, RelaxWorker
from relaxion.apps.relax_many.settings import ManySettings
from relaxion.train.supervised.fine_tune import FineTune
from relaxion.train.supervised.fit import FitSettings
from relaxion.workers.pool import MakeWork

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray warns of its own future


@pytest.fixture(scope="module")
def ray_of_two():
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


def test_actors_relax_and_killed_ones_are_replaced(tmp_path, settings, ray_of_two):
    from relaxion.workers.on_ray import RayPool

    write(tmp_path / "in.extxyz", [alloy(seed) for seed in range(60)])
    worker = partial(RelaxWorker, settings, batch_size=8, folder=str(tmp_path))
    killed = []

    def disturb(workers: RayPool) -> None:
        for number in range(2):
            while not workers.known[number].ready:
                time.sleep(0.05)
            pid = ray_of_two.get(workers.known[number].handle.__ray_call__.remote(lambda _: os.getpid()))
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    with (
        ResultFolder(tmp_path / "out", settings, [tmp_path / "in.extxyz"]) as folder,
        RayPool(None, "auto", worker) as workers,
    ):
        assert workers.n_workers == 2
        thread = threading.Thread(target=disturb, args=(workers,), daemon=True)
        thread.start()
        tally = ManyRun(folder, workers, settings, [tmp_path / "in.extxyz"], 8).run()
        thread.join(timeout=600)
    assert tally.relaxed == 60
    assert len(killed) == 2
    assert len({found["key"] for found in results(tmp_path / "out")}) == 60


def test_learning_on_ray_stopped_and_resumed_is_as_in_one_process(tmp_path, ray_of_two):
    """Weights go to actors with the tasks, and what they relaxed comes back to the fit: nothing depends on where."""
    from relaxion.workers.on_ray import RayPool

    del ray_of_two
    write(tmp_path / "in.extxyz", [alloy(seed) for seed in range(12)])
    many = ManySettings(policy="metals", fmax_ev_per_angstrom=0.02, learn_every=3)
    quick = partial(
        FineTune,
        settings=FitSettings(fit_updates=2, examples_per_update=4, fit_learning_rate=2e-3),
        validation_one_in=2,
        least_validation=2,
    )

    def learn(out: Path, workers, most: int) -> tuple[list[int], dict[str, torch.Tensor]]:
        worker = partial(RelaxWorker, many, database=str(out / "memory"))
        with ResultFolder(out, many, [tmp_path / "in.extxyz"]) as folder, workers(worker) as at_work:
            learner = Learner(out, out / "memory", 3, {"metals": "metals"}, quick)
            driver = ManyRun(folder, at_work, many, [tmp_path / "in.extxyz"], 1, learner=learner)
            driver.stop = lambda: driver.tally.relaxed >= most
            driver.run()
        last = out / "learned" / "00003-metals.safetensors"
        return [row.force_calls for row in read_rows(out)], dict(read_fit(last).tensors) if last.exists() else {}

    def on_ray(worker: MakeWork) -> RayPool:
        return RayPool(None, "auto", worker)

    began, _ = learn(tmp_path / "ray", on_ray, most=5)
    assert 5 <= len(began) < 12
    calls, weights = learn(tmp_path / "ray", on_ray, most=100)
    straight, expected = learn(tmp_path / "here", InlineWorkers, most=100)
    assert calls == straight
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
