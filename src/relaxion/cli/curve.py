"""`relaxion curve`: learning curves of one run or several as a picture."""

from __future__ import annotations

from pathlib import Path

from relaxion.cli.progress import say, tell
from relaxion.errors import FileError, RelaxionError, SettingsError
from relaxion.training.curves import write_curve

DONE, ERROR, USAGE = 0, 1, 2


def curve(runs: list[Path], out: Path, *, force: bool) -> int:
    """Draw it and return the exit code."""
    try:
        if out.suffix.lower() != ".png":
            raise SettingsError(f"--out takes a PNG file, got {out}")
        if out.exists() and not force:
            raise FileError(f"{out} is there already; try another --out, or --force to replace it")
        write_curve(runs, out)
    except SettingsError as error:
        say(f"relaxion: {error}")
        return USAGE
    except ImportError as error:
        say(f"relaxion: a picture needs matplotlib ({error}); try: pip install matplotlib")
        return ERROR
    except RelaxionError as error:
        say(f"relaxion: {error}")
        return ERROR
    tell(f"{len(runs)} run{'' if len(runs) == 1 else 's'} -> {out}")
    return DONE
