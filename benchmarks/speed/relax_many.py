"""What the driver of `relaxion relax-many` spends on a structure: that bounds how many workers it can feed.

    OMP_NUM_THREADS=1 python benchmarks/speed/relax_many.py [--number 500]

Processor time per structure of emt-bulk (4 to 32 atoms): reading (ASE), key, task for a worker, appending the result;
and, on the side of the worker, reading the task and writing the frame.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ase.io import write

from relaxion.apps.comparison import find_set
from relaxion.apps.relax_many.results import ResultFolder, written
from relaxion.apps.relax_many.run import atoms_of, places, task_line
from relaxion.apps.relax_many.settings import ManySettings, structure_key

DRIVER = ("read", "key", "task", "append")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=500)
    number = parser.parse_args().number
    settings = ManySettings()
    taken: dict[str, float] = {}

    def timed(name: str, work: Callable[[], list[Any]]) -> list[Any]:
        began = time.process_time()
        answer = work()
        taken[name] = 1000 * (time.process_time() - began) / number
        return answer

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "input.extxyz"
        write(file, find_set("emt-bulk").starts(number, 9000))
        images = [place.atoms for place in timed("read", lambda: list(places(file)))]
        keys = timed("key", lambda: [structure_key(atoms, settings.context) for atoms in images])
        tasks = timed("task", lambda: [task_line(key, atoms) for key, atoms in zip(keys, images, strict=True)])
        timed("worker: read the task", lambda: [atoms_of(task) for task in tasks])
        frames = timed(
            "worker: frame",
            lambda: [{"key": key, "frame": written(a, {"key": key})} for key, a in zip(keys, images, strict=True)],
        )
        with ResultFolder(Path(folder) / "out", settings, []) as out:
            timed("append", lambda: [out.append([frame]) for frame in frames])
    for name, milliseconds in taken.items():
        print(f"{name:24} {milliseconds:.3f} ms")
    driver = sum(taken[name] for name in DRIVER)
    print(f"{'driver':24} {driver:.3f} ms: {1000 / driver:.0f} structures per second at most")


if __name__ == "__main__":
    main()
