"""Structures, folders, a run in this process."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from ase import Atoms
from ase.io import write
from inline_workers import InlineWorkers, alloy

from relaxion.apps.relax_many.results import ResultFolder
from relaxion.apps.relax_many.run import ManyRun, RelaxWorker
from relaxion.apps.relax_many.settings import ManySettings


@pytest.fixture
def settings() -> ManySettings:
    return ManySettings(policy="none")


@pytest.fixture
def structures() -> list[Atoms]:
    return [alloy(seed) for seed in range(12)]


@pytest.fixture
def input_file(tmp_path: Path, structures: list[Atoms]) -> Path:
    write(tmp_path / "input.extxyz", structures)
    return tmp_path / "input.extxyz"


@pytest.fixture
def drive(tmp_path: Path, settings: ManySettings):
    """`drive(files)`: one run to its end in this process."""

    def run(files, *, out="out", chunk_size=8, workers=None, **more):
        worker = partial(RelaxWorker, settings, folder=str(Path.cwd()))
        with ResultFolder(tmp_path / out, settings, list(files)) as folder:
            workers = workers or InlineWorkers(worker)
            return ManyRun(folder, workers, settings, list(files), chunk_size, **more).run()

    return run
