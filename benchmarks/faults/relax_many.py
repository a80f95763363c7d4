"""`relaxion relax-many` under faults: is every structure relaxed exactly once, with the result of a calm run?

    OMP_NUM_THREADS=1 python benchmarks/faults/relax_many.py [--number 10000] [--workers 2] [--json FILE]

1. calm: all structures (EMT alloys of 4–8 atoms, every 100th twice) in one run; the driver's largest memory, beside
   that of a run over a tenth of them;
2. full disk: the same into another folder, whose disk is full (a small tmpfs where one may be mounted, else a limit of
   file sizes) after about a tenth; the driver must end with a sentence, and go on when there is room;
3. kills: the same folder again and again: every few seconds a worker is killed by SIGKILL, now and then their parent,
   and after some kills the driver itself, which is started again;
4. hostile: a second, smaller set and calculators that raise, hang, answer NaN or wrong shapes, or kill their process
   over chosen structures, one by one and in batches: those are set aside with the reason, all others are relaxed.

Then the two folders are compared, place by place: lost, doubled, different.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.build import bulk
from ase.io import iread, write

from relaxion.apps.relax_many.results import failures, results
from relaxion.train.data.alloys import LATTICE_CONSTANTS

METALS = ("Al", "Cu", "Ag", "Au", "Ni", "Pt")  # palladium kills, see the hostile calculators
CALCULATORS = Path(__file__).parents[2] / "tests" / "unit" / "scaling"
TROUBLE = {"H": "licence server", "O": "time limit", "Pd": "died 2 times", "C": "not finite", "N": "forces of shape"}
BATCH_TROUBLE = {element: TROUBLE[element] for element in ("H", "O", "Pd")}
COMMAND = [sys.executable, "-c", "from relaxion.apps.cli.app import main; main()"]
SAME_POSITION, SAME_ENERGY = 1e-5, 1e-5  # Å, eV


def alloy(seed: int, number: int) -> Atoms:
    """4 to 8 atoms of one to three metals, displaced by 0.05 to 0.2 Å."""
    generator = np.random.default_rng([seed, number])
    atoms = bulk("Cu", a=3.61, cubic=True) * (int(generator.integers(1, 3)), 1, 1)
    elements = generator.choice(METALS, generator.integers(1, 4), replace=False)
    symbols = generator.choice(elements, len(atoms))
    atoms.set_chemical_symbols(list(symbols))
    scale = np.mean([LATTICE_CONSTANTS[symbol] for symbol in symbols]) / 3.61
    atoms.set_cell(atoms.cell * scale, scale_atoms=True)
    atoms.positions += generator.normal(0, generator.uniform(0.05, 0.2), atoms.positions.shape)
    return atoms


def write_input(file: Path, seed: int, number: int) -> None:
    """Every 100th structure is a double of the one before."""
    with file.open("w") as stream:
        for place in range(number):
            write(stream, alloy(seed, place - (place % 100 == 99)), format="extxyz")


def command(file: Path, out: Path, workers: int, *more: str) -> list[str]:
    fixed = ["--out", str(out), "--workers", f"local:{workers}", "--quiet"]
    return [*COMMAND, "relax-many", str(file), *fixed, *more]


def run(arguments: list[str], before: Callable[[], None] | None = None) -> tuple[int, str, float, int]:
    """Exit code, what it said on stderr, seconds, largest memory of the driver in KiB."""
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            arguments, stdout=subprocess.DEVNULL, stderr=said, preexec_fn=before, cwd=CALCULATORS
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        return process.returncode, said.read(), time.perf_counter() - began, usage.ru_maxrss


def children_of(pid: int) -> list[int]:
    """As the kernel lists them."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


class Monkey:
    """Kills by SIGKILL, by chance but repeatably, as far as time is."""

    def __init__(self, seed: int, seconds_between: float, workers_per_driver: int) -> None:
        self.chance = random.Random(seed)
        self.seconds_between, self.workers_per_driver = seconds_between, workers_per_driver
        self.kills: Counter[str] = Counter()

    def disturb(self, arguments: list[str], most_seconds: float) -> int:
        """Run the driver until it is done, killing; start it again whenever it is killed. Its last exit code."""
        until = time.monotonic() + most_seconds
        while True:
            process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=CALCULATORS)
            calm = time.monotonic() > until  # a bound: then it may finish in peace
            if calm or self._watch(process):
                return process.wait()
            self.kills["driver starts"] += 1

    def _watch(self, process: subprocess.Popen[bytes]) -> bool:
        """True when the driver ended by itself, False when it was killed."""
        killed = 0
        while True:
            try:
                process.wait(timeout=self.seconds_between * self.chance.uniform(0.5, 1.5))
                return True
            except subprocess.TimeoutExpired:
                pass
            servers = [child for child in children_of(process.pid) if children_of(child)]  # those that fork workers
            workers = [worker for server in servers for worker in children_of(server)]
            if killed >= self.workers_per_driver:
                self._kill(process.pid, "driver")
                process.wait()
                return False
            if servers and self.chance.random() < 0.1:
                killed += self._kill(servers[0], "server")
            elif workers:
                killed += self._kill(self.chance.choice(workers), "worker")

    def _kill(self, pid: int, kind: str) -> bool:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        self.kills[kind] += 1
        return True


def full_disk(file: Path, workers: int, out: Path, room: int) -> dict[str, Any]:
    """Run into a full disk; what the driver said."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", str(out)], capture_output=True, check=False
    )
    limit = None
    if mounted.returncode:
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))  # noqa: E731
    code, said, _, _ = run(command(file, out, workers), limit)
    safe = sum(1 for _ in results(out))
    if not mounted.returncode:  # what is there moves to a real disk, as a user would move it
        beside = out.with_name(out.name + "-moved")
        shutil.copytree(out, beside)
        subprocess.run(["umount", str(out)], check=True)
        out.rmdir()
        beside.rename(out)
    return {
        "by": "limit of file sizes" if mounted.returncode else "tmpfs",
        "room_bytes": room,
        "exit_code": code,
        "sentence": "no room left" in said,
        "traceback": "Traceback" in said,
        "safe_results": safe,
    }


def by_place(out: Path) -> dict[str, Atoms | None]:
    """What `relaxion merge` brings, by input; everything that the summary lists."""
    with (out / "summary.csv").open(newline="") as file:
        listed: dict[str, Atoms | None] = {f"{row['file']}#{row['structure']}": None for row in csv.DictReader(file)}
    merged = out.with_name(out.name + "-all.extxyz")
    subprocess.run([*COMMAND, "merge", str(out), str(merged), "--force"], check=True, capture_output=True)
    for atoms in iread(str(merged), index=":"):
        listed[atoms.info["relaxion_input"]] = atoms
    return listed


def compare(calm: Path, disturbed: Path) -> dict[str, Any]:
    """Place by place."""
    wanted, found = by_place(calm), by_place(disturbed)
    keys = Counter(result["key"] for result in results(disturbed))
    keys.update(reason["key"] for reason in failures(disturbed))
    lost = [place for place, atoms in wanted.items() if atoms is not None and found.get(place) is None]
    position = energy = 0.0
    calls = other = 0
    for place, atoms in wanted.items():
        back = found.get(place)
        if atoms is None or back is None:
            continue
        position = max(position, float(np.abs(atoms.positions - back.positions).max()))
        energy = max(energy, float(abs(atoms.get_potential_energy() - back.get_potential_energy())))
        calls += bool(atoms.info["relaxion_force_calls"] != back.info["relaxion_force_calls"])
        apart = np.abs(atoms.positions - back.positions).max() > SAME_POSITION
        other += bool(apart or abs(atoms.get_potential_energy() - back.get_potential_energy()) > SAME_ENERGY)
    return {
        "places": len(wanted),
        "structures": len(keys),
        "lost": len(lost),
        "doubled": sum(count > 1 for count in keys.values()),
        "set_aside": sum(1 for _ in failures(disturbed)),
        "different": other,
        "other_number_of_force_calls": calls,
        "largest_difference_position_angstrom": position,
        "largest_difference_energy_ev": energy,
    }


def hostile(folder: Path, seed: int, number: int, workers: int, name: str, trouble: dict[str, str]) -> dict[str, Any]:
    """Every tenth structure brings trouble; who was set aside, and why."""
    images, expected = [], Counter()
    for place in range(number):
        atoms = alloy(seed + 1, place)
        if place % 10 == 9:
            element = list(trouble)[place // 10 % len(trouble)]
            atoms.symbols[0] = element
            expected[trouble[element]] += 1
        images.append(atoms)
    file, out = folder / f"{name}.extxyz", folder / name
    write(file, images)
    more = ["--calc", f"hostile_calculators:{name}", "--time-limit", "2", "--batch-size", "32"]
    code, said, seconds, _ = run(command(file, out, workers, *more))
    reasons = [reason["reason"] for reason in failures(out)]
    met = Counter(words for reason in reasons for words in trouble.values() if words in reason)
    return {
        "structures": number,
        "exit_code": code,
        "traceback": "Traceback" in said,
        "relaxed": sum(1 for _ in results(out)),
        "set_aside": dict(met),
        "as_expected": met == expected and sum(1 for _ in results(out)) == number - expected.total(),
        "seconds": round(seconds, 1),
    }


def measured(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    number, workers = arguments.number, arguments.workers
    file, few = folder / "input.extxyz", folder / "few.extxyz"
    write_input(file, arguments.seed, number)
    write_input(few, arguments.seed, max(number // 10, 1))
    _, _, _, few_memory = run(command(few, folder / "few", workers))
    code, said, seconds, memory = run(command(file, folder / "calm", workers))
    report: dict[str, Any] = {
        "number": number,
        "workers": workers,
        "calm": {"exit_code": code, "seconds": round(seconds, 1), "said": said.strip()[:300]},
        "driver_memory_mib": {f"{max(number // 10, 1)} structures": few_memory >> 10, f"{number}": memory >> 10},
    }
    print(json.dumps(report, indent=1), flush=True)
    out = folder / "disturbed"
    out.mkdir()
    report["full_disk"] = full_disk(file, workers, out, room=max(number * 120, 20_000))
    print(json.dumps(report["full_disk"]), flush=True)
    monkey = Monkey(arguments.seed, arguments.seconds_between, arguments.workers_per_driver)
    began = time.perf_counter()
    more = ["--batch-size", str(arguments.batch_size)]
    code = monkey.disturb(command(file, out, workers, *more), arguments.most_seconds)
    report["kills"] = {**monkey.kills, "exit_code": code, "seconds": round(time.perf_counter() - began, 1)}
    print(json.dumps(report["kills"]), flush=True)
    report["compared"] = compare(folder / "calm", out)
    print(json.dumps(report["compared"]), flush=True)
    report["hostile_one_by_one"] = hostile(folder, arguments.seed, arguments.hostile, workers, "HostileEMT", TROUBLE)
    report["hostile_batches"] = hostile(
        folder, arguments.seed, arguments.hostile, workers, "HostileBatch", BATCH_TROUBLE
    )
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=10_000)
    parser.add_argument("--hostile", type=int, default=100, help="structures for each hostile calculator")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=9300)
    parser.add_argument("--batch-size", type=int, default=32, help="of the workers that are killed")
    parser.add_argument("--seconds-between", type=float, default=3.0, help="two kills, on average")
    parser.add_argument("--workers-per-driver", type=int, default=5, help="killed, then the driver is")
    parser.add_argument("--most-seconds", type=float, default=600.0, help="of killing")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="relaxion-faults-") as folder:
        report = measured(Path(folder), arguments)
    print(json.dumps(report, indent=1))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    compared = report["compared"]
    good = not (compared["lost"] or compared["doubled"] or compared["different"] or compared["set_aside"])
    good &= report["hostile_one_by_one"]["as_expected"] and report["hostile_batches"]["as_expected"]
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
