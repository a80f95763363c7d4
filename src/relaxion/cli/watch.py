"""`relaxion watch`: runs as a page that follows them, served to this machine's browser; or frozen as a file."""

from __future__ import annotations

from pathlib import Path

from relaxion.cli.progress import say, tell
from relaxion.errors import FileError, RelaxionError, SettingsError
from relaxion.web.run import watched
from relaxion.web.training import MOST_RUNS, training_page

DONE, ERROR, USAGE, INTERRUPTED = 0, 1, 2, 130


def watch(runs: list[Path], port: int, save: Path | None, *, force: bool) -> int:
    """Serve until interrupted, or write the page; return the exit code."""
    try:
        _check(runs, port)
        return _serve(runs, port) if save is None else _save(runs, save, force=force)
    except SettingsError as error:
        say(f"relaxion: {error}")
        return USAGE
    except (RelaxionError, OSError) as error:
        say(f"relaxion: {error}")
        return ERROR
    except KeyboardInterrupt:
        return INTERRUPTED


def _check(runs: list[Path], port: int) -> None:
    if len(runs) > MOST_RUNS:
        raise SettingsError(f"{len(runs)} runs are more than a page can show; name up to {MOST_RUNS}")
    twice = [run for place, run in enumerate(runs) if run.absolute() in [r.absolute() for r in runs[:place]]]
    if twice:
        raise SettingsError(f"{twice[0]} is given twice; name each run once")
    if not 0 <= port <= 65535:
        raise SettingsError(f"--port is a number from 0 (any) to 65535, got {port}")


def _save(runs: list[Path], save: Path, *, force: bool) -> int:
    if save.is_dir():
        raise FileError(f"--save {save} is a folder; name a file, such as --save {save / 'page.html'}")
    shown = watched(runs)
    for run in shown:
        run.poll(seconds=600.0)
    tell(f"{_number(runs)} -> {training_page(shown).save(save, force=force)}")
    return DONE


def _serve(runs: list[Path], port: int) -> int:
    try:
        from relaxion.web.live import Board, free_socket, server
    except ImportError as error:
        say(f"relaxion: a live page needs starlette and uvicorn ({error}); try: pip install 'relaxion[live]'")
        return ERROR
    board = Board(watched(runs))
    bound = free_socket(port)
    with bound:
        taken = bound.getsockname()[1]
        if port not in (0, taken):
            say(f"relaxion: port {port} is taken, so the page is at {taken}")
        running = server(board, bound)
        tell(f"{_number(runs)}: http://127.0.0.1:{taken}/ (Ctrl-C ends it)")
        running.run(sockets=[bound])
    return DONE


def _number(runs: list[Path]) -> str:
    return f"{len(runs)} run{'' if len(runs) == 1 else 's'}"
