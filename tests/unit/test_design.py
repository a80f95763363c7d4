"""The page of the design says what is so: files, layers, and the ways of one step and one update."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

from ase.build import bulk
from ase.calculators.emt import EMT

from relaxion import Relaxer
from relaxion.train.experience.vectors import task
from relaxion.train.tasks.control import Trainer, VectorRunSettings

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "relaxion"
PAGE = (ROOT / "docs" / "design.md").read_text()
LOWEST = ("errors", "paths", "settings", "files")


def listed(heading: str) -> list[str]:
    """The files numbered below a heading; alternatives in brackets count too."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    items = re.findall(r"^\d+\. .*(?:\n   .*)*", section, flags=re.MULTILINE)
    return [file for item in items for file in re.findall(r"`([\w/]+\.py)`", item)]


def files_entered(work: Callable[[], object]) -> set[str]:
    """Files of the package with a function that `work` called."""
    entered: set[str] = set()

    def look(frame, event: str, _argument: object) -> None:
        if event == "call":
            entered.add(frame.f_code.co_filename)

    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
    return {Path(file).relative_to(PACKAGE).as_posix() for file in entered if file.startswith(str(PACKAGE))}


def test_files_named_exist():
    files = set(re.findall(r"`([\w/]+\.(?:py|toml))`", PAGE))
    assert len(files) > 20
    assert sorted(file for file in files if not (PACKAGE / file).exists() and not (ROOT / file).exists()) == []


def test_rooms_are_the_layers_of_the_import_contract():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [layer.removeprefix("relaxion.") for layer in reversed(contracts[0]["layers"])]
    rooms = PAGE.split("src/relaxion/\n")[1].split("```")[0]
    assert re.findall(r"^  (\w+)(?:/|\.py)", rooms, flags=re.MULTILINE) == [
        room for room in layers if room not in LOWEST
    ]
    assert tuple(layers[: len(LOWEST)]) == LOWEST
    drawn = (ROOT / "docs" / "pictures" / "design.svg").read_text()
    assert [layer for layer in layers if f">{layer}<" not in drawn] == []


def test_the_way_of_a_relaxation_step():
    way = listed("One relaxation step")
    assert len(way) == len(set(way)) <= 15
    atoms = bulk("Cu", cubic=True) * (2, 1, 1)
    atoms.symbols[:3] = "Au"
    atoms.rattle(0.12, seed=1)
    atoms.calc = EMT()
    relaxer = Relaxer(atoms, policy="metals", logfile=None)
    steps = relaxer.irun(fmax=1e-3, steps=20)
    for _ in range(3):
        next(steps)
    entered = files_entered(relaxer.step)
    assert entered == set(way)


def test_the_way_of_a_td3_update():
    way = listed("One TD3 update")
    assert len(way) == len(set(way)) <= 8
    values = {"agent": "td3", "task": "Pendulum-v1", "widths": [8], "batch_size": 8, "replay_capacity": 100}
    trainer = Trainer(VectorRunSettings.read({**values, "warmup_steps": 8}), task("Pendulum-v1"))
    for _ in range(8):
        trainer.advance()

    def update() -> None:
        for _ in range(2):  # the second one moves the policy
            trainer.agent.update(trainer.replay.sample(8, trainer.normaliser))

    assert {"train/tasks/control.py", *files_entered(update)} == set(way)
