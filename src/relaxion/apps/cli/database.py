"""`relaxion database` and `learn`: what a relaxation database holds, and what a policy learns from it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from relaxion.apps.cli.command import DONE, INCOMPLETE, interrupts
from relaxion.apps.cli.inputs import command_line
from relaxion.apps.cli.policies import refuse_to_overwrite, target_of, write_bundle
from relaxion.apps.cli.progress import Now, bar, say, tell
from relaxion.database import USER, RelaxationDatabase
from relaxion.errors import PolicyError, SettingsError
from relaxion.model.policy_file import SUFFIX
from relaxion.optimizer.choice import CORE, WORDS, Loaded, load
from relaxion.potentials.registry import make_potential
from relaxion.settings import assigned
from relaxion.train.data.exchange import add_files, overview
from relaxion.train.data.exchange import export as export_to
from relaxion.train.supervised.fit import FitSettings
from relaxion.train.supervised.learn import (
    USUAL,
    Learned,
    OnUpdate,
    StoreFineTune,
    alone,
    bundle_of,
    gathered,
    without_molecules,
)

SECONDS_BETWEEN_PLAIN_LINES = 10.0


def show_database(
    folder: Path, added: Sequence[Path], calculator: str | None, export: Path | None, *, as_json: bool, force: bool
) -> int:
    """Add, export, show; in this order."""
    if calculator is not None and not added:
        raise SettingsError("--calculator names the calculator that made the files of --add; there are none")
    if added:
        found = add_files(RelaxationDatabase.open_or_create(folder, {"made_by": USER}), added, calculator)
        words = f"{found.relaxations} relaxations with {found.structures} structures added"
        words += f", {found.already} were there already" * bool(found.already)
        words += f"; {found.without_forces} structures without energy and forces left out" * bool(found.without_forces)
        say(f"relaxion: {words}")
    database = RelaxationDatabase.open(folder)
    if export is not None:
        number = export_to(database, export, force=force, note=_note)
        say(f"relaxion: {number} structures -> {export}")
    found = overview(database, None if export is not None else _note)
    for line in [json.dumps(found.as_dict())] if as_json else [f"{folder}/", *found.lines()]:
        tell(line)
    return DONE


@dataclass(frozen=True)
class LearnRequest:
    """What `relaxion learn` was asked."""

    folder: Path
    origin: str
    out: str
    calculator: str | None
    calc: str | None
    number: int
    assignments: list[str] | None
    as_json: bool
    force: bool
    quiet: bool


def learn_from_database(request: LearnRequest) -> int:
    """The first signal is only noticed: the fit is saved, and the same command goes on."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    name, out = _named(request)
    settings = FitSettings.read(USUAL.model_dump() | assigned(request.assignments or (), "--set"))
    origin = _origin(request.origin)
    potential = None if request.calc is None else make_potential(request.calc)
    trajectories = gathered(request.folder, request.calculator, _note)
    trajectories = without_molecules(request.folder, trajectories, origin, _note)
    began = time.monotonic()
    with alone(request.folder), interrupts.held():
        tuned = StoreFineTune(request.folder, origin, trajectories, settings)
        with _progress(request) as on_update:
            whole = tuned.run(on_update, lambda: interrupts.noticed)
        if not whole:
            say(f"relaxion: stopped after {tuned.tuning.n_updates} updates, saved; the same command continues")
            return interrupts.exit_code
        measured = None if potential is None else tuned.measure(potential, request.number, lambda: interrupts.noticed)
        learned = tuned.tested(time.monotonic() - began, measured)
        if learned.kept:
            write_bundle(bundle_of(name, tuned, learned, command_line()), out)
    plain = learned.plain() | {"policy": str(out) if learned.kept else None}
    tell(json.dumps(plain) if request.as_json else _in_words(request.origin, learned, out))
    return DONE if learned.kept else INCOMPLETE


def _note(sentence: str) -> None:
    say(f"relaxion: {sentence}")


def _origin(name: str) -> Loaded:
    """The policy to begin with; words that `--policy` understands beside names are none."""
    if name in (*WORDS, CORE):
        raise PolicyError(
            f"'{name}' is no policy to start from: give --from universal, --from metals or one of your "
            "own; the classical optimizer does not learn"
        )
    return load(name)


def _named(request: LearnRequest) -> tuple[str, Path]:
    """A name, or a file."""
    path = Path(request.out) if request.out.endswith(SUFFIX) or os.sep in request.out else None
    name = request.out if path is None else path.name.removesuffix(SUFFIX)
    file = target_of(name, path)
    if not request.force:
        refuse_to_overwrite(file)
    return name, file


def _in_words(origin: str, learned: Learned, out: Path) -> str:
    test = learned.acceptance
    judged = (
        f"on {test.n_validation} held-out relaxations its error is {test.ratio:.2f} ({test.low:.2f}–"
        f"{test.high:.2f}) of that of {origin}"
    )
    if learned.measured is not None:
        judged += f", its measured force calls are {learned.measured:.2f} of those of {origin}"
    elif learned.calls_before is not None:
        judged += f"; expected force calls: about {learned.expected_calls_ratio:.2f} of those of {origin}"
    work = f"{learned.n_updates} updates from {learned.n_training} relaxations in {learned.seconds:.0f} s"
    if learned.kept:
        return f"{out}: {work}; {judged}"
    return f"nothing was saved: {work}, but {judged}: not proven better; relax more structures, then learn again"


@contextmanager
def _progress(request: LearnRequest) -> Iterator[OnUpdate | None]:
    due = Now(SECONDS_BETWEEN_PLAIN_LINES, at_once=False)
    with bar(str(request.folder), None, quiet=request.quiet) as advance:

        def report(made: int, total: int, told: Mapping[str, float]) -> None:
            words = f"error {told['fit/relative_error']:.2f}"
            if advance is not None:
                advance(total=total, completed=made, words=words)
            elif due():
                say(f"relaxion: {made} of {total} updates, {words}")

        yield None if request.quiet else report
