"""The process of one race: a request on stdin, progress and the finished page on stdout, a line each."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from typing import Any, TextIO

FORMATS = {"cif": "CIF", "extxyz": "XYZ", "vasp": "POSCAR"}  # what ASE calls it, what people call it
STEPS = 500
SECONDS_BETWEEN_WORDS = 0.1
SHARE = 0.28  # of the time of a race, for each of three racers


def main() -> None:
    """Answer one request."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    seconds = float(sys.argv[1])
    limit = int(seconds) + 30  # of the processor: the last resort, should whoever started us be gone
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    request = json.loads(sys.stdin.readline())
    with redirect_stdout(sys.stderr):  # some calculators greet when they load
        said = _answer(request, answers, seconds)
    _say(answers, said)


def _answer(request: dict[str, Any], answers: TextIO, seconds: float = 100.0) -> dict[str, Any]:
    from relaxion.errors import RelaxionError

    try:
        return {"page": _raced(request, answers, SHARE * seconds)}
    except RelaxionError as error:
        return {"error": str(error)}
    except Exception as error:  # noqa: BLE001 - a structure that breaks something is told, not raised at nobody
        return {"error": f"the race failed: {type(error).__name__}: {error}"}


def _raced(request: dict[str, Any], answers: TextIO, seconds: float) -> dict[str, Any]:
    """`seconds`: of each racer, so that one that gets lost does not take the others' result with it."""
    atoms, kind, hints = read_structure(request["name"], request["text"])  # first: what is none is told at once
    from ase.optimize import BFGS, FIRE

    from relaxion.bench.checks import check_structure, emt_note, occupancy_note
    from relaxion.bench.optimizers import PolicyChoice
    from relaxion.bench.runs import Task
    from relaxion.potentials.registry import make_potential
    from relaxion.web.race import Race, race_page, raced

    calculator, fmax, free_cell = request["calculator"], request["fmax"], request["free_cell"]
    potential = make_potential(calculator)
    check_structure(atoms, potential, free_cell=free_cell)
    choice = PolicyChoice.of(request["policy"], atoms)
    task = Task(atoms, potential, fmax, STEPS, free_cell, record=True)
    runs = raced(task, choice, {"BFGS": BFGS, "FIRE": FIRE}, lambda name: _reporter(answers, name, seconds))
    _say(answers, {"calls": {name: run.force_calls for name, run in runs.items()}})
    hints += filter(
        None, [occupancy_note(atoms), emt_note(atoms, calculator), potential.assumption(atoms), choice.note]
    )
    race = Race(
        request["name"], atoms, runs, fmax, calculator, free_cell, _command(request), hints,
        comment=comment_of(request["text"], kind),
    )  # fmt: skip
    return race_page(race).data


def read_structure(name: str, text: str) -> tuple[Any, str, list[str]]:
    """The first structure of a text, by ASE; its format; what is worth knowing. The name only tells the format."""
    from ase.io import read

    from relaxion.errors import FileError, StructureError
    from relaxion.web.live_race import MOST_ATOMS

    kind = format_of(name, text)
    try:
        images: Any = read(StringIO(text), index=":", format=kind)
    except Exception as error:  # ASE's readers raise anything for files that are none
        raise FileError(
            f"{name} cannot be read as {FORMATS[kind]} ({type(error).__name__}: {str(error)[:200]}); "
            "give a POSCAR, CIF or XYZ"
        ) from error
    if not images or len(images[0]) == 0:
        raise StructureError(f"{name} holds no atoms; give a POSCAR, CIF or XYZ")
    if len(images[0]) > MOST_ATOMS:
        raise StructureError(
            f"{name} has {len(images[0])} atoms, the race takes {MOST_ATOMS}; use 'relaxion race' for larger ones"
        )
    atoms = images[0].copy()
    atoms.calc = None
    several = f"{name} holds {len(images)} structures; the first one races"
    return atoms, kind, [several] if len(images) > 1 else []


def format_of(name: str, text: str) -> str:
    """By the name, else by the look of it; one of ours and no other, whatever ASE could read."""
    small = name.lower()
    if small.endswith(".cif"):
        return "cif"
    if small.endswith((".xyz", ".extxyz")):
        return "extxyz"
    if small.endswith((".vasp", ".poscar")) or small.startswith(("poscar", "contcar")):
        return "vasp"
    if re.search(r"^\s*_cell_length_a\s", text, re.MULTILINE) or text.lstrip().startswith("data_"):
        return "cif"
    second = text.split("\n", 2)[1:2]  # of a POSCAR: one number, which scales the cell
    scale = bool(second) and re.fullmatch(r"\s*-?\d+\.\d*\s*", second[0]) is not None
    return "extxyz" if re.match(r"\s*\d+\s*\n", text) and not scale else "vasp"


def comment_of(text: str, kind: str) -> str:
    """The line people write something in."""
    lines = text.split("\n", 2)
    place = 1 if kind == "extxyz" else 0
    return lines[place].strip()[:300] if len(lines) > place else ""


def _reporter(answers: TextIO, name: str, seconds: float) -> Callable[[int, float, float], None]:
    last, began = 0.0, time.monotonic()

    def report(calls: int, _energy: float, _fmax: float) -> None:
        nonlocal last
        now = time.monotonic()
        if now - began > seconds:
            raise TimeoutError(f"{name} was ended after {seconds:.2g} s and {calls} force calls")
        if now - last >= SECONDS_BETWEEN_WORDS:
            last = now
            _say(answers, {"calls": {name: calls}})

    return report


def _say(answers: TextIO, what: dict[str, Any]) -> None:
    answers.write(json.dumps(what, allow_nan=False) + "\n")
    answers.flush()


def _command(request: dict[str, Any]) -> str:
    """What would do the same on the command line."""
    from relaxion.settings import command_words

    options = {"with": "BFGS,FIRE", "calc": request["calculator"], "policy": request["policy"]}
    options |= {"fmax": f"{request['fmax']:g}", "cell": request["free_cell"]}
    return shlex.join(command_words("race", request["name"], **options))


if __name__ == "__main__":
    main()
