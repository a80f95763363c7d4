"""Workers as Ray actors, on a cluster of this machine's own."""

import os
import signal
import threading
import time

import pytest
from ase.io import write
from inline_workers import alloy

from relaxion.scaling.relax_many.driver import Driver
from relaxion.scaling.relax_many.folder import Folder, results
from relaxion.scaling.relax_many.settings import WorkerSettings

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray warns of its own future


@pytest.fixture
def ray_of_two():
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


def test_actors_relax_and_killed_ones_are_replaced(tmp_path, settings, ray_of_two):
    from relaxion.scaling.relax_many.ray_workers import RayWorkers

    write(tmp_path / "in.extxyz", [alloy(seed) for seed in range(60)])
    worker = WorkerSettings(many=settings, batch_size=8, folder=str(tmp_path))
    killed = []

    def disturb(workers: RayWorkers) -> None:
        for number in range(2):
            while not workers.known[number].ready:
                time.sleep(0.05)
            pid = ray_of_two.get(workers.known[number].handle.__ray_call__.remote(lambda _: os.getpid()))
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    with Folder(tmp_path / "out", settings, [tmp_path / "in.extxyz"]) as folder, RayWorkers("auto", worker) as workers:
        assert workers.n_workers == 2
        thread = threading.Thread(target=disturb, args=(workers,), daemon=True)
        thread.start()
        tally = Driver(folder, workers, settings, [tmp_path / "in.extxyz"], 8).run()
        thread.join(timeout=600)
    assert tally.relaxed == 60
    assert len(killed) == 2
    assert len({found.key for found in results(tmp_path / "out")}) == 60
