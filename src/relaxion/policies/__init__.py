"""Where bundles live: those shipped with the package, the user's own, or any file."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from relaxion.errors import PolicyError
from relaxion.model.policy_file import SUFFIX, PolicyFile
from relaxion.settings import nearest

SHIPPED = Path(__file__).parent
USER_FOLDER_VARIABLE = "RELAXION_POLICIES"


@dataclass(frozen=True, eq=False)
class KnownPolicy:
    """A bundle file that was found: readable, or with the sentence why it is not."""

    name: str
    path: Path
    shipped: bool
    bundle: PolicyFile | None = None
    error: str | None = None


def user_folder() -> Path:
    """$RELAXION_POLICIES, or ~/.local/share/relaxion/policies."""
    given = os.environ.get(USER_FOLDER_VARIABLE)
    return Path(given).expanduser() if given else Path.home() / ".local" / "share" / "relaxion" / "policies"


def shipped_names() -> list[str]:
    """Names nobody else can take."""
    return sorted(_files(SHIPPED))


def own_files() -> dict[str, Path]:
    """Bundles of the user's own folder by name; those that a shipped one hides are not among them."""
    return {name: file for name, file in sorted(_files(user_folder()).items()) if name not in _files(SHIPPED)}


def known_policies() -> list[KnownPolicy]:
    """All bundles by name, the shipped first. One that cannot be read does not hide the others."""
    found: list[KnownPolicy] = []
    for folder, shipped in [(SHIPPED, True), (user_folder(), False)]:
        for name, path in sorted(_files(folder).items()):
            try:
                found.append(KnownPolicy(name, path, shipped, bundle=PolicyFile.read(path)))
            except PolicyError as error:
                found.append(KnownPolicy(name, path, shipped, error=str(error)))
    return found


def find_policy(name_or_path: str | Path) -> PolicyFile:
    """A shipped bundle by name, then one of the user's, then a file by its path."""
    path = find_file(name_or_path)
    return PolicyFile.read(path)


def find_file(name_or_path: str | Path, words: Iterable[str] = ()) -> Path:
    """The file that `find_policy` would read. `words` may have been meant as well, where there is none."""
    named = _files(user_folder()) | _files(SHIPPED)  # the shipped win: a name means the same everywhere
    if isinstance(name_or_path, str) and name_or_path in named:
        return named[name_or_path]
    path = Path(name_or_path)
    if path.is_file():
        return path
    if path.suffix == SUFFIX:
        raise PolicyError(f"the policy {path} does not exist")
    known = [*named, *words]
    if not known:
        raise PolicyError(f"no policy named '{name_or_path}': {none_found()}")
    raise PolicyError(f"no policy named '{name_or_path}': {nearest(str(name_or_path), known)}")


def none_found() -> str:
    """Where there is not one policy."""
    return f"none ships with this relaxion and none is in {user_folder()}; 'relaxion package RUN NAME' makes one"


def _files(folder: Path) -> dict[str, Path]:
    try:
        return {file.name.removesuffix(SUFFIX): file for file in folder.glob(f"*{SUFFIX}") if file.name != SUFFIX}
    except OSError:  # a folder that may not be entered holds nothing for us
        return {}
