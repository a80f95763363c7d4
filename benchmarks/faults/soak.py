"""Mixed work for an hour: does memory stay flat, is anything left behind?

    OMP_NUM_THREADS=1 python benchmarks/faults/soak.py [--minutes 60] [--share 0.6] [--json FILE]

All at once, for the whole time:

- one training on structures (`relaxion train`), stopped and let go (SIGSTOP, SIGCONT) so that it takes its share only;
- `relaxion watch` of that run, with 50 clients on the loopback: each holds a connection for events, asks for the page
  now and then, and goes away without a word now and then;
- rounds of `relaxion relax-many` into a new folder: stopped half-way by SIGTERM, gone on with, looked at (`status`),
  merged, removed.

Every few seconds resident memory (anonymous), open files and threads of every process are noted. Processes are known
by a word in their environment, so that one whose parent is gone is found too. Temporary files go into a folder of
their own, which must be empty at the end. Exit code 0: memory flat, nothing left behind, no round went wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from relax_many import write_input

from relaxion.apps.relax_many.results import results
from relaxion.errors import FileError

COMMAND = [sys.executable, "-c", "from relaxion.apps.cli.app import main; main()"]
MARK = "RELAXION_SOAK"  # in the environment of everything that is started here
TICK = os.sysconf("SC_CLK_TCK")
WARM_UP = 1 / 6  # of the time: replay fills, pages and caches are made
MOST_GROWTH_MIB, MOST_GROWTH = 16.0, 0.05  # of a lasting process, last third against first; whichever is more
RECIPE = """
task = "relax"
structures = "alloys:Al-Cu-Ni:2-4"
n_pooled = 40
steps = 100_000_000
n_structures = 8
max_force_calls = 30
channels = 8
n_layers = 1
cutoff_angstrom = 3.5
batch_size = 16
warmup_steps = 64
replay_capacity = 1_000
updates_per_round = 2
log_interval_steps = 64
assessment_interval_steps = 512
assessment_starts = 12
checkpoint_interval_steps = 512
"""


@dataclass(frozen=True)
class Sample:
    """One process at one moment."""

    seconds: float
    name: str
    pid: int
    memory_mib: float
    files: int
    threads: int


def _anonymous_mib(proc: Path) -> float:
    """Resident memory that is no file's: pages of files come and go as the kernel likes."""
    lines = (proc / "status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024


class Watcher:
    """Looks at every process that bears our mark."""

    def __init__(self, mark: str) -> None:
        self.mark = f"{MARK}={mark}".encode()
        self.names: dict[int, str] = {}  # of lasting processes, by their number
        self.samples: list[Sample] = []
        self.began, self._before = time.monotonic(), 0.0

    def marked(self) -> list[int]:
        """Living ones, ourselves not counted."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and int(folder.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if self.mark in (folder / "environ").read_bytes().split(b"\0"):
                        found.append(int(folder.name))
        return found

    def look(self) -> None:
        for pid in [*self.marked(), os.getpid()]:
            with contextlib.suppress(OSError, IndexError, StopIteration):
                proc = Path(f"/proc/{pid}")
                fields = (proc / "stat").read_text().rsplit(")", 1)[1].split()
                resident = _anonymous_mib(proc)
                files = len(list((proc / "fd").iterdir()))
                name = "soak" if pid == os.getpid() else self.names.get(pid, "other")
                self.samples.append(
                    Sample(time.monotonic() - self.began, name, pid, round(resident, 2), files, int(fields[17]))
                )

    def processor_seconds(self) -> float:
        """Of ourselves, of those that have ended and of those that live, their children included."""
        total = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        for pid in self.marked():
            with contextlib.suppress(OSError, IndexError):
                fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
                total += sum(map(int, fields[11:15])) / TICK
        return total

    def begin(self) -> None:
        self.began, self._before = time.monotonic(), self.processor_seconds()

    def share(self) -> float:
        """Of one core, since the beginning."""
        return (self.processor_seconds() - self._before) / max(time.monotonic() - self.began, 1e-9)


class Clients:
    """Readers of the page: asyncio in a thread."""

    def __init__(self, port: int, number: int, seconds_between_pages: float, seed: int) -> None:
        self.port, self.number, self.between = port, number, seconds_between_pages
        self.chance = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.listening = self.most_listening = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        with contextlib.suppress(asyncio.CancelledError):
            self._main = self._loop.create_task(self._all())
            self._loop.run_until_complete(self._main)

    async def _all(self) -> None:
        await asyncio.gather(*(self._client() for _ in range(self.number)))

    async def _client(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self.chance.uniform(0.5, 3.0) * self.between):
                    await self._listen()
            except TimeoutError:
                self.counts["connections dropped by the client"] += 1
            except (OSError, asyncio.IncompleteReadError):
                self.counts["connections lost"] += 1
                await asyncio.sleep(1.0)
            try:
                async with asyncio.timeout(60.0):
                    await self._ask("/page.html" if self.chance.random() < 0.1 else "/")
            except (TimeoutError, OSError, asyncio.IncompleteReadError):
                self.counts["pages not answered"] += 1

    async def _open(self, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        return reader, writer, int((await reader.readline()).split()[1])

    async def _listen(self) -> None:
        reader, writer, status = await self._open("/events")
        self.listening += 1
        self.most_listening = max(self.most_listening, self.listening)
        try:
            self.counts[f"events {status}"] += 1
            while piece := await reader.read(1 << 16):
                self.counts["event bytes"] += len(piece)
                self.counts["events"] += piece.count(b"event: parts")
            raise ConnectionResetError("the server let go")
        finally:
            self.listening -= 1
            writer.transport.abort()  # without a word

    async def _ask(self, path: str) -> None:
        reader, writer, status = await self._open(path)
        try:
            while piece := await reader.read(1 << 16):
                self.counts["page bytes"] += len(piece)
            self.counts[f"pages {status}"] += 1
        finally:
            writer.transport.abort()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join(timeout=10.0)


class Soak:
    """Everything that goes on, and its end."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        self.folder, self.arguments = folder, arguments
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        mark = uuid.uuid4().hex
        self.environment = {**os.environ, MARK: mark, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
        self.watcher = Watcher(mark)
        self.lasting: list[subprocess.Popen[bytes]] = []
        self.wrong: list[str] = []
        self.rounds: list[dict[str, Any]] = []

    def start(self, name: str, *words: str, **more: Any) -> subprocess.Popen[bytes]:
        log = (self.folder / f"{name}.log").open("ab")
        with log:
            process = subprocess.Popen(
                [*COMMAND, *words], stderr=log, env=self.environment, cwd=self.folder, **{"stdout": log, **more}
            )
        self.watcher.names[process.pid] = name
        self.lasting.append(process)
        return process

    def call(self, *words: str, expected: tuple[int, ...] = (0,)) -> str:
        done = subprocess.run(
            [*COMMAND, *words], capture_output=True, text=True, env=self.environment, cwd=self.folder, check=False
        )
        if done.returncode not in expected or "Traceback" in done.stderr:
            self.wrong.append(f"{' '.join(words[:1])}: exit code {done.returncode}: {done.stderr[-500:]}")
        return done.stdout

    def run(self) -> dict[str, Any]:
        recipe = self.folder / "recipe.toml"
        recipe.write_text(RECIPE)
        training = self.start("train", "train", str(recipe), "--agent", "td3", "--out", "run", "--quiet")
        self._wait_for(self.folder / "run" / "checkpoint.safetensors", 300.0)
        server = self.start("watch", "watch", "run", "--port", "0", stdout=subprocess.PIPE)
        assert server.stdout is not None
        port = int(server.stdout.readline().decode().split("127.0.0.1:")[1].split("/")[0])
        clients = Clients(port, self.arguments.clients, self.arguments.seconds_between_pages, self.arguments.seed)
        stop = threading.Event()
        helpers = [
            threading.Thread(target=self._throttle, args=(training, stop), daemon=True),
            threading.Thread(target=self._look_on, args=(stop,), daemon=True),
        ]
        self.watcher.begin()
        began = self.watcher.began
        for helper in helpers:
            helper.start()
        try:
            while time.monotonic() - began < 60.0 * self.arguments.minutes:
                self._round(len(self.rounds))
                self._rest(began + 60.0 * self.arguments.minutes)
        finally:
            seconds, share = time.monotonic() - began, self.watcher.share()
            stop.set()
            for helper in helpers:
                helper.join(timeout=30.0)
            held = clients.listening
            clients.close()
            codes = self._end(training, server)
        return self._report(seconds, share, clients, held, codes)

    def _wait_for(self, path: Path, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not path.exists() and time.monotonic() < until:
            time.sleep(0.2)

    def _throttle(self, process: subprocess.Popen[bytes], stop: threading.Event) -> None:
        """A fifth of a core for the training."""
        while not stop.is_set() and process.poll() is None:
            process.send_signal(signal.SIGCONT)
            stop.wait(1.0)
            process.send_signal(signal.SIGSTOP)
            stop.wait(4.0)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)

    def _look_on(self, stop: threading.Event) -> None:
        while not stop.wait(self.arguments.seconds_between_looks):
            self.watcher.look()

    def _round(self, number: int) -> None:
        """relax-many, stopped and gone on with."""
        file, out, merged = (self.folder / name for name in ("input.extxyz", "many", "all.extxyz"))
        write_input(file, self.arguments.seed + number, self.arguments.structures)
        words = ["relax-many", str(file), "--out", str(out), "--workers", "local:1", "--quiet"]
        first = subprocess.Popen(
            [*COMMAND, *words], env=self.environment, cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        self._wait_for_results(first, out, self.arguments.structures // 4)
        first.send_signal(signal.SIGTERM)
        _, said, peak = self._awaited(first)
        if first.returncode not in (0, 143) or b"Traceback" in said:
            self.wrong.append(f"relax-many stopped: exit code {first.returncode}: {said[-500:].decode()}")
        self.call(*words)
        self.call("status", str(out))
        self.call("merge", str(out), str(merged))
        with (out / "summary.csv").open(newline="") as table:
            outcomes = Counter(row["outcome"] for row in csv.DictReader(table))
        if outcomes.total() != self.arguments.structures or outcomes["waiting"]:
            self.wrong.append(f"round {number}: {dict(outcomes)}")
        shutil.rmtree(out)
        merged.unlink()
        self.rounds.append({"driver_peak_mib": peak, "outcomes": dict(outcomes)})
        self.watcher.look()

    def _wait_for_results(self, process: subprocess.Popen[bytes], out: Path, number: int) -> None:
        """So many results, or the end."""
        while process.poll() is None:
            with contextlib.suppress(FileError):
                if len(results(out)) >= number:
                    return
            time.sleep(0.05)

    def _awaited(self, process: subprocess.Popen[bytes]) -> tuple[int, bytes, float]:
        assert process.stderr is not None
        said = process.stderr.read()
        process.stderr.close()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        return process.returncode, said, round(usage.ru_maxrss / 1024, 1)

    def _rest(self, until: float) -> None:
        """Until the share of the core that was allowed is kept."""
        while time.monotonic() < until and self.watcher.share() > self.arguments.share:
            time.sleep(2.0)

    def _end(self, training: subprocess.Popen[bytes], server: subprocess.Popen[bytes]) -> dict[str, int]:
        for process in (training, server):
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM if process is training else signal.SIGINT)
        codes = {}
        for name, process in (("train", training), ("watch", server)):
            try:
                codes[name] = process.wait(timeout=60.0)
            except subprocess.TimeoutExpired:
                self.wrong.append(f"{name} does not end")
                process.kill()
                codes[name] = process.wait()
        if server.stdout is not None:
            server.stdout.close()
        for name in codes:
            said = (self.folder / f"{name}.log").read_text()
            if "Traceback" in said:
                self.wrong.append(f"{name} said: {said[-800:]}")
        time.sleep(2.0)
        return codes

    def _report(
        self, seconds: float, share: float, clients: Clients, held: int, codes: dict[str, int]
    ) -> dict[str, Any]:
        left = self.watcher.marked()
        found = sorted(str(path.relative_to(self.temporary)) for path in self.temporary.rglob("*"))
        temporary = [name for name in found if not re.fullmatch(r"torchinductor_\w+", name)]  # empty, torch's own
        expected = {"tmp", "run", "recipe.toml", "input.extxyz", "train.log", "watch.log"}
        strange = sorted(path.name for path in self.folder.iterdir() if path.name not in expected)
        lasting = {name: self._trend(name) for name in ("train", "watch", "soak")}
        peaks = [round_["driver_peak_mib"] for round_ in self.rounds]
        third = max(len(peaks) // 3, 1)
        report = {
            "minutes": round(seconds / 60, 1),
            "share_of_a_core": round(share, 2),
            "rounds": len(self.rounds),
            "structures_relaxed": sum(sum(round_["outcomes"].values()) for round_ in self.rounds),
            "training_steps": _training_steps(self.folder / "run"),
            "clients": {"number": self.arguments.clients, "listening_at_the_end": held, **dict(clients.counts)},
            "most_listening": clients.most_listening,
            "lasting": lasting,
            "driver_peak_mib": {"first_third": _mean(peaks[:third]), "last_third": _mean(peaks[-third:])},
            "most_processes_at_once": self._most_at_once(),
            "exit_codes": codes,
            "wrong": self.wrong,
            "processes_left": len(left),
            "temporary_files_left": temporary,
            "strange_files": strange,
        }
        driver = report["driver_peak_mib"]
        report["verdict"] = {
            "memory_flat": all(trend["flat"] for trend in lasting.values())
            and driver["last_third"] - driver["first_third"] <= MOST_GROWTH_MIB,
            "open_files_flat": all(trend["open_files_flat"] for trend in lasting.values()),
            "nothing_left": not (left or temporary or strange),
            "nothing_wrong": not self.wrong and codes["train"] == 143 and codes["watch"] in (0, 130),
        }
        return report

    def _trend(self, name: str) -> dict[str, Any]:
        """Of a lasting process, after the warm-up: thirds of the time, and the slope of a line through all."""
        own = [sample for sample in self.watcher.samples if sample.name == name]
        if len(own) < 6:
            self.wrong.append(f"{name} was seen {len(own)} times only")
            return {"flat": False, "open_files_flat": False}
        last = own[-1].seconds
        own = [sample for sample in own if sample.seconds >= WARM_UP * last]
        times = np.array([sample.seconds for sample in own])
        memory = np.array([sample.memory_mib for sample in own])
        third = max(len(own) // 3, 1)
        first_mean, last_mean = float(memory[:third].mean()), float(memory[-third:].mean())
        files = [sample.files for sample in own]
        return {
            "first_third_mib": round(first_mean, 1),
            "last_third_mib": round(last_mean, 1),
            "largest_mib": round(float(memory.max()), 1),
            "slope_mib_per_hour": round(float(np.polyfit(times, memory, 1)[0]) * 3600, 1),
            "open_files_first_third": max(files[:third]),
            "open_files_last_third": max(files[-third:]),
            "threads_last_third": max(sample.threads for sample in own[-third:]),
            "flat": last_mean - first_mean <= max(MOST_GROWTH_MIB, MOST_GROWTH * first_mean),
            "open_files_flat": max(files[-third:]) <= max(files[:third]) + 8,
        }

    def _most_at_once(self) -> int:
        at = defaultdict(set)
        for sample in self.watcher.samples:
            at[round(sample.seconds)].add(sample.pid)
        return max((len(pids) for pids in at.values()), default=0)


def _mean(values: list[float]) -> float:
    return round(sum(values) / len(values), 1) if values else 0.0


def _training_steps(run: Path) -> int:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return int(json.loads(lines[-1])["time/total_timesteps"]) if lines else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--share", type=float, default=0.6, help="of one core, on average; rounds wait for it")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--structures", type=int, default=400, help="per round of relax-many")
    parser.add_argument("--seconds-between-pages", type=float, default=60.0, help="of one client, on average")
    parser.add_argument("--seconds-between-looks", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=9500)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--samples", type=Path, help="every single look, as JSON lines")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="relaxion-soak-") as folder:
        soak = Soak(Path(folder), arguments)
        report = soak.run()
    print(json.dumps(report, indent=1))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.samples is not None:
        arguments.samples.write_text("".join(json.dumps(asdict(sample)) + "\n" for sample in soak.watcher.samples))
    sys.exit(0 if all(report["verdict"].values()) else 1)


if __name__ == "__main__":
    main()
