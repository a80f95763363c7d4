"""`relaxion package`: the policy of a run as a bundle with its model card, under a name."""

from __future__ import annotations

import re
from pathlib import Path

from relaxion.bundles import PolicyBundle, user_folder
from relaxion.bundles.bundle import SUFFIX
from relaxion.bundles.card import POLICY
from relaxion.bundles.library import shipped_names
from relaxion.cli.ending import DONE, Interrupts
from relaxion.cli.progress import tell
from relaxion.cli.showing_requests import PackageRequest
from relaxion.errors import FileError, SettingsError
from relaxion.files import replace_file
from relaxion.training.packaging import bundle_from_run

RESERVED = ("auto", "none", "classical", "remove")  # words of --policy and of 'policies'


def package(request: PackageRequest, _: Interrupts) -> int:
    file = target_of(request.name, request.out)
    if not request.force:
        refuse_to_overwrite(file)
    bundle = bundle_from_run(request.run, request.name)
    write_bundle(bundle, file)
    tell(_sentence(bundle, file, found_by_name=request.out is None))
    return DONE


def target_of(name: str, out: Path | None) -> Path:
    """Where the bundle goes; names that would mean something else are refused."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
        raise SettingsError(
            f"'{name}' is not a valid name for a policy: letters, digits, - and _ only, as in my-metals"
        )
    if name in RESERVED:
        raise SettingsError(f"'{name}' has a special meaning for --policy; choose another name")
    if out is not None:
        if out.suffix != SUFFIX:
            raise SettingsError(f"--out takes the file of a bundle, NAME{SUFFIX}, got {out}")
        return out
    if name in shipped_names():
        raise SettingsError(
            f"a policy named '{name}' ships with relaxion so yours would not be found; choose another name"
        )
    return user_folder() / f"{name}{SUFFIX}"


def _card_file(file: Path) -> Path:
    return file.with_suffix(".md")


def refuse_to_overwrite(file: Path) -> None:
    """Neither a bundle nor its card."""
    for path in (file, _card_file(file)):
        if path.exists():
            raise FileError(f"{path} exists; choose another name, or --force to replace it")


def write_bundle(bundle: PolicyBundle, file: Path) -> None:
    """With its card beside it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        bundle.write(file)
        replace_file(_card_file(file), bundle.card_text().encode())
    except OSError as error:
        raise FileError(f"{file} cannot be written: {error}") from error


def _sentence(bundle: PolicyBundle, file: Path, *, found_by_name: bool) -> str:
    calls = {result.optimizer: result.mean_force_calls for result in bundle.card.results}
    beside = ", ".join(f"{name} {number:.1f}" for name, number in calls.items() if name != POLICY)
    return (
        f"{bundle.name}: {bundle.kind} policy for {' '.join(bundle.card.elements)}, {calls[POLICY]:.1f} force calls "
        f"({beside}), {file.stat().st_size / 1000:.0f} kB -> {file}; "
        f"'relaxion policies {bundle.name if found_by_name else file}' shows its card"
    )
