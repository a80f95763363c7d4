"""What is there: `relaxion policies`, `package`, `calculators`, and `doctor`, which looks whether it works."""

from __future__ import annotations

import json
import platform
import re
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from relaxion import __version__
from relaxion.apps.cli.command import DONE, ERROR
from relaxion.apps.cli.progress import print_table, say, tell
from relaxion.errors import FileError, RunError, SettingsError
from relaxion.files import replace_file
from relaxion.model.card import POLICY, percent
from relaxion.model.policy_file import SUFFIX, PolicyFile
from relaxion.policies import (
    KnownPolicy,
    find_policy,
    known_policies,
    none_found,
    own_files,
    shipped_names,
    user_folder,
)
from relaxion.potentials.counting import error_in_words
from relaxion.potentials.registry import PotentialEntry, known_potentials
from relaxion.train.runs.packaging import bundle_from_run

REMOVE = "remove"
RESERVED = ("auto", "none", "classical", REMOVE)  # words of --policy and of 'policies'


def package_run(run: Path, name: str, out: Path | None, *, force: bool) -> int:
    file = target_of(name, out)
    if not force:
        refuse_to_overwrite(file)
    bundle = bundle_from_run(run, name)
    write_bundle(bundle, file)
    tell(_packaged_in_words(bundle, file, found_by_name=out is None))
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
            raise SettingsError(f"--out is a policy file, NAME{SUFFIX}, got {out}")
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


def write_bundle(bundle: PolicyFile, file: Path) -> None:
    """With its card beside it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        bundle.write(file)
        replace_file(_card_file(file), bundle.card_text().encode())
    except OSError as error:
        raise FileError(f"{file} cannot be written: {error}") from error


def _packaged_in_words(bundle: PolicyFile, file: Path, *, found_by_name: bool) -> str:
    calls = {result.optimizer: result.mean_force_calls for result in bundle.card.results}
    beside = ", ".join(f"{name} {number:.1f}" for name, number in calls.items() if name != POLICY)
    return (
        f"{bundle.name}: {bundle.kind} policy for {' '.join(bundle.card.elements)}, {calls[POLICY]:.1f} force calls "
        f"({beside}), {file.stat().st_size / 1000:.0f} kB -> {file}; "
        f"'relaxion policies {bundle.name if found_by_name else file}' shows its card"
    )


def list_policies(name: str | None, removed: str | None, *, as_json: bool) -> int:
    """All of them, or the model card of one as Markdown or JSON."""
    if name == REMOVE:
        tell(f"{_remove(removed)} was removed")
        return DONE
    if removed is not None:
        raise SettingsError(f"one policy at a time: 'relaxion policies {name}' shows its card")
    if name is not None:
        bundle = find_policy(name)
        tell(json.dumps(_values(bundle), ensure_ascii=False) if as_json else bundle.card_text().rstrip("\n"))
        return DONE
    known = known_policies()
    if as_json:
        for one in known:
            tell(json.dumps(_as_plain(one), ensure_ascii=False))
    elif known:
        headings = ("name", "kind", "elements", "atoms", "potential", "force calls", "size", "from")
        print_table([(heading, heading in ("name", "size", "from")) for heading in headings], map(_policy, known))
        for one in known:
            if one.error is not None:
                say(f"relaxion: {one.error}")
    else:
        say(f"relaxion: no policies: {none_found()}")
    return DONE


def _remove(name: str | None) -> Path:
    """The file of a policy of the user's own, gone now with its card."""
    if name is None:
        raise SettingsError("name the policy: relaxion policies remove NAME")
    if name in shipped_names():
        raise SettingsError(f"{name} ships with relaxion and cannot be removed; --policy none relaxes without it")
    if name not in own_files():
        raise SettingsError(f"there is no policy named '{name}' in {user_folder()}; 'relaxion policies' lists yours")
    file = own_files()[name]
    file.unlink()
    file.with_suffix(".md").unlink(missing_ok=True)
    return file


def _as_plain(known: KnownPolicy) -> dict[str, Any]:
    plain: dict[str, Any] = {"name": known.name, "file": str(known.path), "shipped": known.shipped}
    if known.bundle is None:
        return plain | {"error": known.error}
    return plain | _values(known.bundle, with_settings=False) | {"name": known.name}


def _values(bundle: PolicyFile, *, with_settings: bool = True) -> dict[str, Any]:
    card = bundle.card.model_dump(mode="json", exclude=None if with_settings else {"training_settings"})
    own = {"name": bundle.name, "kind": bundle.kind, "n_numbers": bundle.n_numbers}
    return own | {"weights_sha256": bundle.weights_sha256, **card}


def _policy(known: KnownPolicy) -> list[str]:
    size = f"{known.path.stat().st_size / 1000:.0f} kB"
    origin = "relaxion" if known.shipped else "you"
    if known.bundle is None:
        return [known.name, "unreadable", "–", "–", "–", "–", size, origin]  # the sentence why comes below
    card = known.bundle.card
    atoms = f"{card.smallest_n_atoms}–{card.largest_n_atoms}"
    calls = _result(known.bundle)
    return [known.name, known.bundle.kind, " ".join(card.elements), atoms, card.potential, calls, size, origin]


def _result(bundle: PolicyFile) -> str:
    own = bundle.card.policy_result
    source = bundle.card.learned_from
    if own is None and source is not None:
        calls = f", calls {source.calls_ratio:.2f}" if source.calls_ratio is not None else ""
        return f"error {source.error_ratio:.2f}{calls} of {source.origin}"
    if own is None:
        return "never assessed"
    others = [f"{r.optimizer} {r.mean_force_calls:.1f}" for r in bundle.card.results if r is not own]
    failed = "" if own.success_rate in (None, 1) else f", {percent(own.success_rate)} converged"
    return f"{own.mean_force_calls:.1f}{failed}" + (f" ({', '.join(others)})" if others else "")


# ---- `relaxion calculators`


def list_calculators(*, as_json: bool) -> int:
    """A table for people, or one JSON object per line."""
    entries = known_potentials()
    if as_json:
        for entry in entries:
            tell(json.dumps(asdict(entry), ensure_ascii=False))
    else:
        columns = [("--calc", True), ("what", False), ("elements", False), ("state", False)]
        print_table(columns, map(_calculator, entries))
    return DONE


def _calculator(entry: PotentialEntry) -> list[str]:
    state = "ready" if entry.available else f"missing: {entry.how_to_install}"
    return [entry.spec, entry.description, "no list" if entry.elements is None else " ".join(entry.elements), state]


# ---- `relaxion doctor`: is everything here that a relaxation needs?

PACKAGES = ("ase", "torch", "numpy", "scipy", "vesin", "gymnasium", "safetensors", "pydantic", "typer", "spglib")
COPPER_EV_PER_ATOM = -0.0057  # ASE's EMT at 3.61 Å


def examine(*, as_json: bool) -> int:
    """Show versions and calculators, and relax four atoms; the exit code is 1 if a package is missing or that fails."""
    found = {"python": f"{platform.python_version()} on {platform.system()} ({sys.prefix})", "relaxion": __version__}
    missing = [package for package in PACKAGES if _version(package) is None]
    found |= {package: _version(package) or f"not installed; try: pip install {package}" for package in PACKAGES}
    found["calculators"] = ", ".join(entry.spec for entry in known_potentials() if entry.available)
    try:
        found["relaxation"] = _relaxation()
        works = not missing
    except Exception as error:  # noqa: BLE001 - what is being looked for is what is broken
        found["relaxation"] = f"failed: {error_in_words(error)}; try: pip install -U relaxion, else please report this"
        works = False
    if as_json:
        tell(json.dumps({"ok": works, "findings": found}, ensure_ascii=False))
    else:
        print_table([("", True), ("", False)], found.items(), show_header=False)
        tell("All is well." if works else "Something does not work.")
    return DONE if works else ERROR


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _relaxation() -> str:
    """The thing itself: a small relaxation with a known end; RunError where that is another."""
    from ase.build import bulk
    from ase.calculators.emt import EMT

    from relaxion import Relaxer

    atoms = bulk("Cu", cubic=True)
    atoms.positions[0, 0] += 0.2
    atoms.calc = EMT()
    optimizer = Relaxer(atoms, logfile=None)
    converged = optimizer.run(fmax=0.01)
    energy = atoms.get_potential_energy() / len(atoms)
    sentence = f"four copper atoms: {optimizer.force_calls} force calls, {energy:.4f} eV per atom"
    if not converged or abs(energy - COPPER_EV_PER_ATOM) > 1e-3:
        raise RunError(f"{sentence}, expected {COPPER_EV_PER_ATOM:.4f}")
    return sentence
