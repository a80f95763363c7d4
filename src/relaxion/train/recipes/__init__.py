"""Recipes: TOML files that say what to train or to collect, found by name or path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relaxion.errors import FileError, SettingsError
from relaxion.files import toml_of
from relaxion.settings import nearest

SHIPPED = Path(__file__).parent
SETTINGS = "settings.toml"  # in the folder of a run


def find(name_or_path: str) -> Path:
    """A shipped recipe by name, or a file, or the settings of an earlier run by its folder."""
    shipped = _shipped()
    if name_or_path in shipped:  # ./pendulum and pendulum/ are paths, pendulum is not
        return shipped[name_or_path]
    path = Path(name_or_path)
    if path.is_file():
        return path
    if (folder := run_folder(name_or_path)) is not None:
        return folder / SETTINGS
    if path.is_dir():
        raise FileError(f"the folder '{name_or_path}' holds no run: it has no {SETTINGS} with an agent and a task")
    longer = [f"'{name}'" for name in sorted(shipped) if name_or_path and name.startswith(name_or_path)]
    meant = f"did you mean {' or '.join(longer)}?" if longer else nearest(name_or_path, shipped)
    raise FileError(f"no recipe '{name_or_path}', neither shipped nor a file: {meant}")


def run_folder(name_or_path: str) -> Path | None:
    """The folder, if this names one of an earlier run; no other folder is ever taken for one."""
    folder = Path(name_or_path)
    if name_or_path in _shipped() or not (folder / SETTINGS).is_file():
        return None
    values = read_toml(folder / SETTINGS)
    return folder if isinstance(values.get("agent"), str) and isinstance(values.get("task"), str) else None


def _shipped() -> dict[str, Path]:
    return {file.stem: file for file in SHIPPED.glob("*.toml")}


def read_toml(path: Path) -> dict[str, Any]:
    """A recipe; a sentence where it is none."""
    try:
        return toml_of(path)
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise SettingsError(f"{path} is not valid TOML: {str(error)[:200]}") from error
