"""Thousands of damaged and crafted files against every reader of foreign files.

    OMP_NUM_THREADS=1 python benchmarks/faults/hostile_files.py [--every 3] [--only WORDS] [--json FILE]

Each case is a copy of a valid file or folder (made here, nothing is stored), spoilt in one way, before one door. It
must be refused with a sentence or read; then, where a digest guards the content, read as what it was. What must not
be: any other exception, more than 20 s, more than 768 MiB, a dead process, code that runs (payloads leave a file
behind), a file outside that is changed. Cases run in a process of their own, replaced when it dies or hangs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

MOST_SECONDS = 20.0
MOST_MIB = 768.0
ADDRESS_SPACE = (
    6 << 30
)  # bytes that a case may ask for beyond what is there; so that a mistake does not end the machine
LONGEST_SENTENCE = 1000
GOOD = ("refused", "read")
CASES_PER_PROCESS = 600


class Runner:
    """Runs cases in this process."""

    def __init__(self, folder: Path) -> None:
        from hostile_doors import World, cases

        self.folder, self.world = folder, World(folder / "seeds")
        self.cases = cases(self.world)
        self._of_seed: dict[tuple[str, str], Any] = {}

    def run(self, number: int) -> dict[str, Any]:
        """What came of one case."""
        from hostile_corpus import CANARY

        case = self.cases[number]
        work = self.folder / f"case-{os.getpid()}"
        began, before = time.perf_counter(), _memory_begins()
        outcome, words = self._outcome(case, work)
        grown = _most_memory() - before
        outside = work / "outside.txt"
        if (work / CANARY).exists():
            outcome = "executed"
        elif outside.is_file() and outside.read_text().strip() != "mine":
            outcome = "changed outside"
        elif outcome in GOOD and grown > MOST_MIB:
            outcome = "memory"
        return {
            "number": number, "door": case.door, "seed": case.seed, "wrong": case.wrong, "outcome": outcome,
            "words": words[-1500:], "seconds": round(time.perf_counter() - began, 2), "grown_mib": round(grown, 1),
        }  # fmt: skip

    def _outcome(self, case: Any, work: Path) -> tuple[str, str]:
        from hostile_corpus import copied

        from relaxion.errors import RelaxionError

        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        here = Path.cwd()
        os.chdir(work)
        try:
            path = copied(self.world.seed(case.seed), work / Path(case.seed).name)
            case.spoil(path)
            found = self._door(case.door, path)
            if case.must_be_seed and found != self._as_it_was(case, work):
                return "changed", "read as something else than what was written"
            return "read", ""
        except RelaxionError as error:
            said = str(error)
            if case.must_be_read:
                return "whole one refused", said
            if not said.strip() or len(said) > LONGEST_SENTENCE or ("\n" in said and "\n" not in case.seed):
                return "no sentence", f"{len(said)} characters: {said[:500]}"
            return "refused", said
        except Exception:  # noqa: BLE001 - this is what is looked for
            return "traceback", traceback.format_exc()
        finally:
            os.chdir(here)
            if work.is_dir():
                for name in ("canary", "outside.txt"):  # looked at afterwards
                    if (work / name).exists():
                        break
                else:
                    shutil.rmtree(work, ignore_errors=True)

    def _door(self, door: str, path: Path) -> Any:
        from hostile_doors import DOORS

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return DOORS[door][1](path)

    def _as_it_was(self, case: Any, work: Path) -> Any:
        from hostile_corpus import copied

        if (case.door, case.seed) not in self._of_seed:
            path = copied(self.world.seed(case.seed), work / "as-it-was" / Path(case.seed).name)
            self._of_seed[case.door, case.seed] = self._door(case.door, path)
        return self._of_seed[case.door, case.seed]


def _status(name: str) -> float:
    """From the kernel, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    return 0.0


def _memory_begins() -> float:
    """Resident now; the largest is counted from here on."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _most_memory() -> float:
    return _status("VmHWM")


def child(folder: Path, numbers: list[int]) -> None:
    """Run these cases, a line for each."""
    out = os.fdopen(os.dup(1), "w")  # whatever a case prints goes elsewhere
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    runner = Runner(folder)
    here = int(_status("VmSize") * 2**20)
    resource.setrlimit(resource.RLIMIT_AS, (here + ADDRESS_SPACE, resource.RLIM_INFINITY))
    print("ready", file=out, flush=True)
    for number in numbers:
        print(json.dumps(runner.run(number)), file=out, flush=True)


def run_all(folder: Path, numbers: list[int]) -> Iterator[dict[str, Any]]:
    """Every case, in processes that are replaced when they die or hang."""
    while numbers:
        batch = numbers[:CASES_PER_PROCESS]
        process = subprocess.Popen(
            [sys.executable, __file__, "--folder", str(folder), "--cases", ",".join(map(str, batch))],
            stdout=subprocess.PIPE, stderr=(folder / "stderr.log").open("ab"),
        )  # fmt: skip
        done = 0
        try:
            for line in _lines(process):
                if line.startswith("{"):
                    done += 1
                    yield json.loads(line)
        except TimeoutError:
            pass
        hung = process.poll() is None and done < len(batch)
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        if done < len(batch):
            yield {"number": batch[done], "outcome": "hang" if hung else "crash", "words": ""}
            done += 1
        numbers = numbers[done:]


def _lines(process: subprocess.Popen[bytes]) -> Iterator[str]:
    """As they come; TimeoutError when none comes for too long."""
    assert process.stdout is not None
    rest, limit = b"", 180.0  # the first: imports and seeds
    while True:
        if not select.select([process.stdout], [], [], limit)[0]:
            raise TimeoutError
        piece = os.read(process.stdout.fileno(), 1 << 16)
        if not piece:
            return
        *lines, rest = (rest + piece).split(b"\n")
        limit = MOST_SECONDS if lines else limit
        yield from (line.decode() for line in lines)


def table(results: list[dict[str, Any]]) -> str:
    """By door: how many, refused, read, and what must not be."""
    from hostile_doors import DOORS

    rows = [
        "| what | door | cases | refused | read | wrong | slowest, s | most memory, MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for door, (what, _) in DOORS.items():
        own = [result for result in results if result["door"] == door]
        if own:
            count = Counter(result["outcome"] for result in own)
            wrong = sum(number for outcome, number in count.items() if outcome not in GOOD)
            slow, most = (max(result.get(name, 0.0) for result in own) for name in ("seconds", "grown_mib"))
            cells = (what, f"`{door}`", len(own), count["refused"], count["read"], wrong, slow, round(most))
            rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=3, help="every n-th case only; 1: all of them")
    parser.add_argument("--only", default="", help="doors or seeds with these words in their names")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cases", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cases is not None:
        child(arguments.folder, [int(word) for word in arguments.cases.split(",")])
        return
    from hostile_doors import World, cases

    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="relaxion-hostile-") as name:
        folder = Path(name)
        world = World(folder / "seeds")
        world.make()
        every = cases(world)
        chosen = [n for n, case in enumerate(every) if arguments.only in f"{case.door} {case.seed}"][:: arguments.every]
        print(f"{len(chosen)} of {len(every)} cases; seeds made in {time.perf_counter() - began:.0f} s", flush=True)
        results = []
        for found in run_all(folder, chosen):
            case = every[found["number"]]
            result = {"door": case.door, "seed": case.seed, "wrong": case.wrong, **found}
            results.append(result)
            if result["outcome"] not in GOOD:
                last = result["words"].strip().splitlines()[-1:] or [""]
                print(f"{result['outcome']}: {case.door} · {case.seed} · {case.wrong}: {last[0][:200]}", flush=True)
    seconds = time.perf_counter() - began
    count = Counter(result["outcome"] for result in results)
    print(table(results))
    print(f"{len(results)} cases in {seconds:.0f} s: {dict(count)}")
    if arguments.json is not None:
        bad = [result for result in results if result["outcome"] not in GOOD]
        report = {"cases": len(results), "seconds": round(seconds), "outcomes": dict(count), "wrong": bad}
        doors = sorted({result["door"] for result in results})
        report["by_door"] = {door: dict(Counter(r["outcome"] for r in results if r["door"] == door)) for door in doors}
        report["slowest_seconds"] = max((r.get("seconds", 0.0) for r in results), default=0.0)
        report["most_memory_mib"] = max((r.get("grown_mib", 0.0) for r in results), default=0.0)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(0 if all(outcome in GOOD for outcome in count) else 1)


if __name__ == "__main__":
    main()
