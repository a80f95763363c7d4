"""Where collectors run, from words: `ray:4`, `ray:ADDRESS`, `ray:4@ADDRESS`."""

from __future__ import annotations

from dataclasses import dataclass

from relaxion.errors import SettingsError
from relaxion.training.loop import RunTrainer
from relaxion.training.relax_settings import RelaxRunSettings
from relaxion.training.settings import RunSettings

MOST = 10_000  # more is a slip of the finger


@dataclass(frozen=True)
class Collectors:
    """So many Ray actors, on a Ray of our own or on a cluster that is there."""

    number: int | None  # None: as many as the cluster has cores
    address: str | None = None  # None: Ray is started on this machine and ends with the run

    @classmethod
    def read(cls, words: str) -> Collectors:
        """A SettingsError when the words say nothing of the kind."""
        engine, _, place = words.partition(":")
        number, _, address = place.rpartition("@") if "@" in place else (place, "", "")
        if engine != "ray" or not place:
            raise SettingsError(f"collectors '{words}': expected ray:N, ray:ADDRESS or ray:N@ADDRESS, like ray:4")
        if "@" not in place and not place.lstrip("-").isdecimal():
            return cls(None, place)
        if not number.isdecimal() or not 1 <= int(number) <= MOST or ("@" in place and not address):
            raise SettingsError(f"collectors '{words}': expected a number from 1 to {MOST}, like ray:4 or ray:4@auto")
        return cls(int(number), address or None)

    def trainer(self, settings: RunSettings) -> RunTrainer:
        """As `relaxion.training.loop.train` takes one in `make`."""
        if not isinstance(settings, RelaxRunSettings):
            raise SettingsError(
                f'collectors are for task = "relax", where a step costs force calls; a step of '
                f"{settings.training.task} costs less than sending it: train without collectors"
            )
        from relaxion.scaling.collectors.trainer import DistributedRelaxTrainer
        from relaxion.training.loop import enough_memory
        from relaxion.training.relax_task import relax_task

        with enough_memory():
            return DistributedRelaxTrainer(settings, relax_task(settings), self)
