"""`relaxion train`: a recipe, some overrides, a run folder; progress on stderr, the result on stdout."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from relaxion.cli.progress import say, tell
from relaxion.cli.train_progress import alarms_as_sentences, progress, warnings_as_sentences
from relaxion.errors import FileError, RelaxionError, SettingsError
from relaxion.scaling.collectors.places import Collectors
from relaxion.training.loop import Interrupted, train
from relaxion.training.recipe import find, overrides, run_folder, settings_from_recipe
from relaxion.training.settings import RunSettings

DONE, ERROR, USAGE, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143


@dataclass(frozen=True)
class TrainRequest:
    """What the user asked for."""

    recipe: str
    out: Path | None
    agent: str | None
    seed: int | None
    steps: int | None
    assignments: tuple[str, ...]
    resume: bool
    from_weights: Path | None
    force: bool
    as_json: bool
    quiet: bool
    collectors: str | None = None


def run(request: TrainRequest) -> int:
    """Do it and return the exit code."""
    _one_thread()
    try:
        settings = _settings(request)
        collectors = None if request.collectors is None else Collectors.read(request.collectors)
    except (SettingsError, FileError) as error:
        say(f"relaxion: {error}")
        return USAGE
    out = request.out or _default_out(request, settings)
    with first_signal() as first_of_signals:
        return _run(request, settings, collectors, out, first_of_signals)


def _run(
    request: TrainRequest,
    settings: RunSettings,
    collectors: Collectors | None,
    out: Path,
    first_of_signals: Callable[[], int | None],
) -> int:
    try:
        with warnings_as_sentences(), alarms_as_sentences(), progress(settings, out, request.quiet) as on_progress:
            result = train(
                settings,
                out,
                resume=request.resume,
                from_weights=request.from_weights,
                force=request.force,
                on_progress=on_progress,
                make=None if collectors is None else collectors.trainer,
            )
    except Interrupted as stop:
        say(f"relaxion: {stop}; the same command with --resume goes on")
        return TERMINATED if first_of_signals() == signal.SIGTERM else INTERRUPTED
    except KeyboardInterrupt:
        say(f"relaxion: stopped at once; --resume goes on from the last checkpoint, if there is one in {out}")
        return INTERRUPTED
    except SettingsError as error:
        say(f"relaxion: {error}")
        return USAGE
    except (RelaxionError, OSError) as error:
        say(f"relaxion: {error}")
        return ERROR
    tell(json.dumps(asdict(result)) if request.as_json else f"{result.sentence()} -> {out}{os.sep}")
    return DONE


def _settings(request: TrainRequest) -> RunSettings:
    given = overrides(request.assignments)
    options = {"seed": request.seed, "steps": request.steps}
    given |= {name: value for name, value in options.items() if value is not None}
    return settings_from_recipe(find(request.recipe), request.agent, given)


def _default_out(request: TrainRequest, settings: RunSettings) -> Path:
    earlier = run_folder(request.recipe)
    if earlier is not None:
        return earlier
    return Path("runs") / f"{Path(request.recipe).stem}-{settings.agent_name}-{settings.training.seed}"


def _one_thread() -> None:
    """Small networks gain nothing from more threads and lose much when runs share the cores; OMP_NUM_THREADS rules."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


@contextmanager
def first_signal() -> Iterator[Callable[[], int | None]]:
    """Which of Ctrl-C and SIGTERM came first, asked after a run that listened to both: their exit codes differ."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None  # only the main thread hears of signals
        return
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def first() -> int | None:
        try:
            return os.read(reading, 1)[0]
        except BlockingIOError:
            return None

    try:
        yield first
    finally:
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)
