"""`relaxion report`: a page of what an earlier relaxation, or a training run, left on disk."""

from __future__ import annotations

from pathlib import Path

from relaxion.bench.result_folder import PAGE, stem
from relaxion.cli.progress import say, tell
from relaxion.errors import FileError, RelaxionError
from relaxion.web.view import report as page_of

DONE, ERROR = 0, 1


def report(path: Path, out: Path | None, *, force: bool) -> int:
    """Write it and return the exit code."""
    try:
        page = out or (path / PAGE if path.is_dir() else Path(f"{stem(path)}.html"))
        if page.is_dir():
            raise FileError(f"--out {page} is a folder; name a file, such as --out {page / PAGE}")
        tell(f"{path}: written to {page_of(path).save(page, force=force)}")
    except (RelaxionError, OSError) as error:
        say(f"relaxion: {error}")
        return ERROR
    return DONE
