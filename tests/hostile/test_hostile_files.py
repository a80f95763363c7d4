"""Whatever a file holds, it is refused with a sentence or read: a few of the thousands of cases of each door.

All of them: `python benchmarks/faults/hostile_files.py`.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest

PER_DOOR = 5
MOST_SECONDS = 600  # against what never ends
DOORS = (
    "Relaxer(policy=FILE)", "relaxion policies", "train --resume, vectors", "train --resume, atoms",
    "relaxion train RUN --resume", "train --from", "TD3.load", "relaxion report RUN", "relaxion watch --save",
    "relaxion package", "relaxion train RECIPE", "restart=, core", "restart=, cell",
    "restart=, policy", "RelaxationDatabase", "relaxion status", "relaxion merge", "relax-many goes on",
    "relaxion relax FILE", "relax-many FILE", "relax --force", "relaxion report RESULT", "eam:FILE",
)  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.usefixtures("bounded")
def test_refused_with_a_sentence_or_read(door: str, hostile: Any) -> None:
    numbers = [number for number, case in enumerate(hostile.cases) if case.door == door]
    whole = [number for number in numbers if hostile.cases[number].must_be_read]
    spoilt = [number for number in numbers if number not in set(whole)]
    for number in [*whole[:2], *spoilt[:: max(len(spoilt) // PER_DOOR, 1)]]:
        signal.alarm(MOST_SECONDS)
        found = hostile.run(number)
        signal.alarm(0)
        assert found["outcome"] in ("refused", "read"), found


def test_every_door_is_tried(hostile: Any) -> None:
    assert {case.door for case in hostile.cases} == set(DOORS)
    assert len(hostile.cases) >= 2000


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("door", ["relaxion relax FILE", "relax-many FILE"])
def test_structures_made_by_hand(door: str, hostile: Any) -> None:
    """Pickles, databases on the network, expressions, billions of atoms, strange names; each at one of the doors."""
    numbers = [n for n, case in enumerate(hostile.cases) if case.door == door and case.seed.startswith("crafted/")]
    assert len(numbers) > 50
    numbers = [n for n in numbers if "bomb" not in hostile.cases[n].seed]  # seconds each
    for number in numbers[door == "relax-many FILE" :: 2]:
        signal.alarm(MOST_SECONDS)
        found = hostile.run(number)
        signal.alarm(0)
        assert found["outcome"] in ("refused", "read"), found
