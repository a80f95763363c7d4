"""Training with collectors on other cores or machines: workers step structures, one learner stores and updates."""

from __future__ import annotations

from relaxion.errors import SettingsError
from relaxion.train.runs.loop import MakeTrainer, enough_memory
from relaxion.train.tasks.progress import RunTrainer
from relaxion.train.tasks.relax_settings import RelaxRunSettings
from relaxion.train.tasks.settings import RunSettings
from relaxion.workers import WorkerPlace


def trainer_with(collectors: WorkerPlace) -> MakeTrainer:
    """As `relaxion.train.runs.loop.train` takes one in `make`."""

    def make(settings: RunSettings) -> RunTrainer:
        if not isinstance(settings, RelaxRunSettings):
            raise SettingsError(
                f'collectors are for task = "relax", where a step costs force calls; a step of '
                f"{settings.training.task} costs less than sending it: train without collectors"
            )
        from relaxion.train.collectors.trainer import DistributedRelaxTrainer
        from relaxion.train.tasks.relax_task import relax_task

        with enough_memory():
            return DistributedRelaxTrainer(settings, relax_task(settings), collectors)

    return make
