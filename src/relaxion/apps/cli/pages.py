"""`relaxion report`, `watch` and `curve`: pages and pictures of what lies on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from relaxion.apps.cli.command import DONE, ERROR
from relaxion.apps.cli.inputs import refuse_folder
from relaxion.apps.cli.progress import counted, say, tell
from relaxion.apps.compare.result_folder import PAGE, stem
from relaxion.apps.relax_many.results import MANIFEST
from relaxion.apps.report.many import ManyFolder, many_page
from relaxion.apps.report.run import watched
from relaxion.apps.report.training import MOST_RUNS, TrainingRuns
from relaxion.apps.report.view import report
from relaxion.errors import FileError, SettingsError
from relaxion.train.runs.curves import write_curve


def write_report(path: Path, out: Path | None, against: Sequence[Path], *, force: bool) -> int:
    page = out or (path / PAGE if path.is_dir() else Path(f"{stem(path)}.html"))
    refuse_folder("--out", page, PAGE)
    if against and not (path / MANIFEST).exists():
        raise SettingsError(f"--against compares folders of 'relax-many', and {path} is not one")
    made = many_page(path, against) if (path / MANIFEST).exists() else report(path)
    tell(f"{path}: written to {made.save(page, force=force)}")
    return DONE


def watch_runs(runs: Sequence[Path], port: int, save: Path | None, *, force: bool) -> int:
    """Serve until interrupted, or write the page."""
    if len(runs) > MOST_RUNS:
        raise SettingsError(f"{len(runs)} runs are more than a page can show; name up to {MOST_RUNS}")
    twice = [run for place, run in enumerate(runs) if run.absolute() in [r.absolute() for r in runs[:place]]]
    if twice:
        raise SettingsError(f"{twice[0]} is given twice; name each run once")
    if not 0 <= port <= 65535:
        raise SettingsError(f"--port is a number from 0 (any) to 65535, got {port}")
    many = (runs[0] / MANIFEST).exists()
    shown = ManyFolder(runs[0], runs[1:]) if many else TrainingRuns(watched(runs))
    if save is None:
        return _serve(shown, counted(len(runs), "run"), port)
    refuse_folder("--save", save, "page.html")
    shown.poll(seconds=600.0)
    tell(f"{counted(len(runs), 'run')} -> {shown.page().save(save, force=force)}")
    return DONE


def _serve(shown: ManyFolder | TrainingRuns, words: str, port: int) -> int:
    try:
        from relaxion.apps.report.live import Board, free_socket, server
    except ImportError as error:
        say(f"relaxion: a live page needs starlette and uvicorn ({error}); try: pip install 'relaxion[live]'")
        return ERROR
    board = Board(shown)
    with free_socket(port) as bound:
        taken = bound.getsockname()[1]
        if port not in (0, taken):
            say(f"relaxion: port {port} is taken, so the page is at {taken}")
        running = server(board, bound)
        tell(f"{words}: http://127.0.0.1:{taken}/ (Ctrl-C ends it)")
        running.run(sockets=[bound])
    return DONE


def draw_curve(runs: list[Path], out: Path, *, force: bool) -> int:
    if out.suffix.lower() != ".png":
        raise SettingsError(f"--out takes a PNG file, got {out}")
    if out.exists() and not force:
        raise FileError(f"{out} exists; try another --out, or --force to replace it")
    try:
        write_curve(runs, out)
    except ImportError as error:
        say(f"relaxion: a picture needs matplotlib ({error}); try: pip install matplotlib")
        return ERROR
    tell(f"{counted(len(runs), 'run')} -> {out}")
    return DONE
