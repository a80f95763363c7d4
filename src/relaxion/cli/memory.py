"""`relaxion memory`: what is in a memory, all of it as extended XYZ, and files of others taken in."""

from __future__ import annotations

import json

from relaxion.cli.ending import DONE, Interrupts
from relaxion.cli.progress import say, tell
from relaxion.cli.requests import MemoryRequest
from relaxion.errors import SettingsError
from relaxion.memory.overview import export, overview
from relaxion.memory.recording import MEMORY
from relaxion.memory.store import TrajectoryStore
from relaxion.memory.taking import take_in


def memory(request: MemoryRequest, _: Interrupts) -> int:
    """Take in, export, tell; in this order."""
    if request.calculator is not None and not request.files:
        raise SettingsError("--calculator names the calculator that made the files of --add; there are none")
    if request.files:
        store = TrajectoryStore.open_or_create(request.folder, {"made_by": MEMORY})
        taken = take_in(store, request.files, request.calculator)
        words = f"{taken.relaxations} relaxations with {taken.structures} structures taken in"
        words += f", {taken.already} were there already" * bool(taken.already)
        words += f"; {taken.without_forces} structures without energy and forces left out" * bool(taken.without_forces)
        say(f"relaxion: {words}")
    store = TrajectoryStore.open(request.folder)
    if request.export is not None:
        number = export(store, request.export, force=request.force, note=_damaged)
        say(f"relaxion: {number} structures -> {request.export}")
    found = overview(store, None if request.export is not None else _damaged)
    for line in [json.dumps(found.as_dict())] if request.as_json else [f"{request.folder}/", *found.lines()]:
        tell(line)
    return DONE


def _damaged(sentence: str) -> None:
    say(f"relaxion: {sentence}")
