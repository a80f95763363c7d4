"""`relaxion watch`: news as they come, for nobody but this machine's own page."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from live_server import InThread
from relaxion.apps.report import live as live_module
from relaxion.apps.report.live import Board
from relaxion.apps.report.page import LARGEST_BYTES
from relaxion.apps.report.run import watched
from relaxion.apps.report.training import TrainingRuns
from training_runs import ATOMS, PENDULUM, train_small

HOSTILE = "<script>window.hacked = 1</script>"
COMMAND = [sys.executable, "-c", "from relaxion.apps.cli.app import main; main()"]
PATIENCE = 600.0  # seconds: only what never comes fails, whatever else the machine does


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_small(ATOMS, tmp_path_factory.mktemp("runs") / "atoms")


@pytest.fixture(scope="module")
def vector_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_small(PENDULUM, tmp_path_factory.mktemp("runs") / "pendulum")


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A run with three assessments behind it, that of its start included, and the rest still to come."""
    copy = Path(shutil.copytree(finished, tmp_path / "run"))
    (copy / "result.json").unlink()
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(lines[:5]))
    (copy / "rest").write_text("".join(lines[5:]))
    return copy


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "SECONDS_BETWEEN_LOOKS", 0.05)


@contextmanager
def served(*folders: Path) -> Iterator[InThread]:
    with InThread(Board(TrainingRuns(watched(folders)))) as server:
        limit = time.monotonic() + PATIENCE
        while time.monotonic() < limit:
            try:
                ask(server, "/")
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        yield server


def ask(
    server: InThread, path: str, method: str = "GET", body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.request(method, path, body=body, headers=named)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


class Listener:
    """Reads server-sent events as a browser does."""

    def __init__(self, server: InThread, path: str = "/events") -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        self.connection.request("GET", path)
        self.answer = self.connection.getresponse()
        assert self.answer.getheader("content-type", "").startswith("text/event-stream")

    def next(self) -> dict[str, Any]:
        while line := self.answer.readline():
            if line.startswith(b"data: "):
                return json.loads(line[6:])
        raise AssertionError("the stream has ended")

    def close(self) -> None:
        self.connection.close()


def part(news: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in news["parts"] if one["id"] == name)


def test_news_come_as_the_run_writes_them(run: Path) -> None:
    with served(run) as server:
        listener = Listener(server)
        first = listener.next()
        assert len(part(first, "curve")["series"][0]["x"]) == 3
        with (run / "metrics.jsonl").open("a") as file:
            file.write((run / "rest").read_text()[:-30])
        second = listener.next()
        assert second["version"] > first["version"]
        assert "citation" not in [one["id"] for one in second["parts"]], "only what has changed"
        assert second["order"] == first["order"]
        with (run / "metrics.jsonl").open("a") as file:
            file.write((run / "rest").read_text()[-30:])
        assert len(part(listener.next(), "curve")["series"][0]["x"]) == 4
        event = {"step": 96, "alarm": "wall", "event": "begins", "sentence": f"blocked against a wall {HOSTILE}"}
        (run / "alarms.jsonl").write_text(json.dumps(event) + "\n")
        news = listener.next()
        assert part(news, "alarms")["alarms"][0]["sentence"].endswith(HOSTILE)
        (run / "result.json").write_text('{"steps": 96}')
        assert "Finished at step 96" in listener.next()["heading"]["lead"]
        listener.close()


def test_a_resumed_run_goes_back(run: Path) -> None:
    with served(run) as server:
        listener = Listener(server)
        listener.next()
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        os.truncate(run / "metrics.jsonl", len("".join(lines[:3])))
        assert len(part(listener.next(), "curve")["series"][0]["x"]) == 2
        listener.close()


def test_a_page_that_knows_a_version_is_sent_what_is_newer(run: Path) -> None:
    with served(run) as server:
        listener = Listener(server)
        epoch = ask(server, "/")[2].decode().split('"epoch":"')[1][:8]
        version = listener.next()["version"]
        listener.close()
        again = Listener(server, f"/events?known={epoch}-{version}")
        with (run / "metrics.jsonl").open("a") as file:
            file.write((run / "rest").read_text())
        assert "citation" not in [one["id"] for one in again.next()["parts"]]
        again.close()
        stranger = Listener(server, "/events?known=other-99999")
        assert "citation" in [one["id"] for one in stranger.next()["parts"]]
        stranger.close()


def test_the_page_may_ask_its_server_and_nobody_else(run: Path) -> None:
    with served(run) as server:
        status, headers, body = ask(server, "/")
        text = body.decode()
        assert status == 200
        assert "connect-src 'self'" in text
        assert "default-src 'none'" in text
        assert headers["content-security-policy"] == "frame-ancestors 'none'"
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers


def test_a_foreign_host_header_is_turned_away(run: Path) -> None:
    with served(run) as server:
        port = server.port
        foreign = ["evil.example", f"evil.example:{port}", "127.0.0.1", "127.0.0.1:1", f"localhost.evil:{port}"]
        for host in foreign:
            for path in ("/", "/events", "/page.html"):
                status, headers, body = ask(server, path, Host=host)
                assert status == 421, host
                assert b"answers to" in body
                assert headers["content-type"].startswith("text/plain")
        assert ask(server, "/", Host=f"localhost:{port}")[0] == 200


def test_read_only_and_no_path_leads_anywhere(run: Path) -> None:
    before = {file.name: file.stat().st_mtime_ns for file in run.iterdir()}
    with served(run) as server:
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            assert ask(server, "/", method)[0] == 405
        for path in ("/../settings.toml", "/..%2f..%2fetc/passwd", "//etc/passwd", "/metrics.jsonl", "/race"):
            assert ask(server, path)[0] == 404
        ask(server, "/page.html")
    assert {file.name: file.stat().st_mtime_ns for file in run.iterdir()} == before


def test_the_server_listens_on_loopback_only(run: Path) -> None:
    with served(run) as server:
        assert server._socket.getsockname()[0] == "127.0.0.1"


def test_frozen_it_is_a_file_of_its_own(run: Path) -> None:
    with served(run) as server:
        status, headers, body = ask(server, "/page.html")
    assert status == 200
    assert "attachment" in headers["content-disposition"]
    assert b"connect-src" not in body
    assert b'"live"' not in body
    assert len(body) < LARGEST_BYTES


# ---- the command


def test_save_freezes_several_runs(relaxion, finished: Path, vector_run: Path) -> None:
    answer = relaxion("watch", str(finished), str(vector_run), "--save", "page.html")
    assert answer.code == 0
    assert "2 runs -> page.html" in answer.out
    html = Path("page.html").read_text()
    assert len(html.encode()) < LARGEST_BYTES
    assert "connect-src" not in html
    assert relaxion("watch", str(finished), "--save", "page.html").code == 1
    assert relaxion("watch", str(finished), "--save", "page.html", "--force").code == 0


def test_bad_input_is_a_sentence(relaxion, finished: Path) -> None:
    Path("empty").mkdir()
    Path("other").mkdir()
    Path("other/notes.txt").touch()
    for arguments, code, words in (
        (["absent"], 1, "does not exist"),
        (["empty"], 1, "is empty"),
        (["other"], 1, "holds no run"),
        ([str(finished / "settings.toml")], 1, "is a file"),
        ([str(finished), str(finished)], 2, "given twice"),
        ([str(finished), "--port", "70000"], 2, "from 0 (any) to 65535"),
        ([str(finished), "--save", "."], 1, "is a folder"),
        ([f"r{k}" for k in range(13)], 2, "up to 12"),
    ):
        answer = relaxion("watch", *arguments)
        assert answer.code == code, arguments
        assert words in answer.err
        assert answer.err.count("\n") == 1


def test_without_the_extra_it_says_what_to_install(relaxion, finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "relaxion.apps.report.live")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    answer = relaxion("watch", str(finished))
    assert answer.code == 1
    assert "pip install 'relaxion[live]'" in answer.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_taken_port_gives_way_to_the_next_and_a_signal_ends_it(finished: Path, number: signal.Signals) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = subprocess.Popen(
            [*COMMAND, "watch", str(finished), "--port", str(port)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            address = process.stdout.readline()
            found = int(address.split(":")[-1].split("/")[0])
            assert port < found < port + 20
            process.send_signal(number)
            assert process.wait(timeout=PATIENCE) == 128 + number
            assert f"port {port} is taken, so the page is at {found}" in process.stderr.read()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()


class _StillBoard:
    """Always the same, but for its version."""

    version, epoch = 0, "e"

    def news(self, since: int) -> str:
        del since
        return json.dumps({"version": self.version})


async def _busy_page(news: int) -> tuple[live_module.Live, list[str]]:
    """Listeners that go away at any moment while there are news; a Condition of asyncio did not survive this."""
    live = live_module.Live(_StillBoard())  # type: ignore[arg-type]
    chance = random.Random(0)
    wrong: list[str] = []

    async def read() -> None:
        async for _ in live._stream(live.board.version):
            await asyncio.sleep(0)

    async def come_and_go() -> None:
        while not live._over:
            reading = asyncio.create_task(read())
            await asyncio.sleep(chance.uniform(0, 0.006))
            reading.cancel()
            try:
                await reading
            except asyncio.CancelledError:
                pass
            except RuntimeError as error:
                wrong.append(repr(error))

    async def change() -> None:
        while not live._over:
            await asyncio.sleep(chance.uniform(0, 0.003))
            live.board.version += 1
            live._wake()

    tasks = [asyncio.create_task(work()) for work in [come_and_go] * 30 + [change]]
    while live.board.version < news:
        await asyncio.sleep(0.01)
    live.end()
    await asyncio.wait_for(asyncio.gather(*tasks), timeout=PATIENCE)
    return live, wrong


def test_readers_that_go_away_stop_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "SECONDS_OF_SILENCE", 0.002)
    live, wrong = asyncio.run(_busy_page(200))
    assert not wrong
    assert live._listeners == len(live._waiting) == 0
