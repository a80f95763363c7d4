"""`relaxion watch`: news as they come, nobody but this machine's own page, races that are bounded in every way."""

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
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from ase import Atoms
from ase.build import bulk
from ase.io import write

from live_server import InThread
from relaxion.errors import FileError, SettingsError, StructureError
from relaxion.web import live as live_module
from relaxion.web import live_race, live_race_worker
from relaxion.web.live import Board
from relaxion.web.live_race import LARGEST_UPLOAD, MOST_ATOMS, Races, read_request, shown_name
from relaxion.web.live_race_worker import comment_of, format_of, read_structure
from relaxion.web.page import LARGEST_BYTES
from relaxion.web.run import watched
from relaxion.web.training import TrainingRuns
from training_runs import ATOMS, PENDULUM, train_small

COMMAND = [sys.executable, "-c", "from relaxion.cli.app import main; main()"]
HOSTILE = "<script>window.hacked = 1</script>"
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
            for path in ("/", "/events", "/page.html", "/race/1"):
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
        up = ("/../settings.toml", "/..%2f..%2fetc/passwd", "/race/../../x")
        for path in (*up, "//etc/passwd", "/metrics.jsonl", "/race/x"):
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


# ---- races


def structure_text(atoms: Atoms, name: str, tmp_path: Path, **options: Any) -> str:
    write(tmp_path / name, atoms, **options)
    return (tmp_path / name).read_text()


def shaken(repeat: int = 1) -> Atoms:
    atoms = bulk("Cu", a=3.7, cubic=True) * (repeat, 1, 1)
    atoms.rattle(0.1, seed=2)
    return atoms


def asked(structure: str, **changes: Any) -> bytes:
    plain = {
        "name": "a.xyz",
        "text": structure,
        "calculator": "emt",
        "policy": "auto",
        "free_cell": False,
        "fmax": 0.05,
    }
    return json.dumps(plain | changes).encode()


def begin(server: InThread, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    own = {"Origin": f"http://127.0.0.1:{server.port}", "Content_Type": "application/json"} | headers
    status, _, answer = ask(server, "/race", "POST", body, **own)
    return status, json.loads(answer) if answer[:1] == b"{" else {"error": answer.decode()}


def ended(server: InThread, number: int, seconds: float = PATIENCE) -> dict[str, Any]:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        state = json.loads(ask(server, f"/race/{number}")[2])
        if state["state"] != "running":
            return state
        time.sleep(0.1)
    raise AssertionError("the race does not end")


def test_a_dropped_structure_races(run: Path, tmp_path: Path) -> None:
    text = structure_text(shaken(), "x.xyz", tmp_path, format="extxyz")
    with served(run) as server:
        status, begun = begin(server, asked(text, name=f"../../{HOSTILE}/x.xyz"))
        assert status == 202
        state = ended(server, begun["number"])
        assert state["state"] == "done", state
        failed = ended(server, begin(server, asked("nothing"))[1]["number"])
        assert failed["state"] == "failed"
        assert "cannot be read as XYZ" in failed["error"]
    page = state["page"]
    assert page["eyebrow"].startswith("Relaxion race · x.xyz ·")
    films = next(one for one in page["parts"] if one["kind"] == "film")["films"]
    assert [film["name"] for film in films] == ["Relaxion", "BFGS", "FIRE"]
    assert state["calls"] == {film["name"]: film["end_call"] for film in films}


def raced(structure: str, **changes: Any) -> dict[str, Any]:
    """As the worker does it, without a process of its own."""
    return live_race_worker._answer(json.loads(asked(structure, **changes)), StringIO())


@pytest.mark.parametrize(("name", "form"), [("POSCAR", "vasp"), ("x.cif", "cif")])
def test_other_formats_race_too(tmp_path: Path, name: str, form: str) -> None:
    said = raced(structure_text(shaken(), name, tmp_path, format=form), name=name)
    assert said["page"]["eyebrow"].startswith(f"Relaxion race · {name} ·")
    assert "Relaxion wins" in said["page"]["title"]


def test_a_script_in_the_comment_line_is_data(tmp_path: Path) -> None:
    said = raced(structure_text(shaken(), "x.xyz", tmp_path, format="xyz", comment=HOSTILE))
    facts = next(one for one in said["page"]["parts"] if one.get("title") == "How it was made")["facts"]
    assert {"label": "Comment in the file", "value": HOSTILE} in facts


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text": "no structure at all\nnor here"}, "cannot be read as XYZ"),
        ({"text": "import os\nos.system('true')\n", "name": "x.py"}, "cannot be read as POSCAR"),
        ({"text": "1\n\nXx 0 0 0\n"}, "a.xyz"),
        ({"text": "2\n\nCu 0 0 0\nCu 0 0 0\n"}, "apart"),
        ({"text": "1\n\nU 0 0 0\n"}, "U"),
        ({"text": "1\n\nCu 0 0 0\n", "free_cell": True}, "no cell to relax"),
    ],
)
def test_what_cannot_race_says_why(changes: dict[str, Any], words: str) -> None:
    said = raced("", **changes)
    assert words in said["error"]
    assert "--" not in said["error"]


def test_what_the_form_would_not_send_is_refused(run: Path) -> None:
    with served(run) as server:
        for changes, words in (
            ({"calculator": "os:system"}, "not one of those offered"),
            ({"calculator": "eam:/etc/passwd"}, "not one of those offered"),
            ({"policy": "/etc/passwd"}, "not one of those offered"),
            ({"policy": "../x.safetensors"}, "not one of those offered"),
            ({"fmax": 0}, "from 0.001 to 1"),
            ({"fmax": "nan"}, "from 0.001 to 1"),
            ({"fmax": None}, "needs name"),
            ({"text": "  "}, "is empty"),
        ):
            body = asked("1\n\nCu 0 0 0\n", **changes)
            with pytest.raises(SettingsError, match=words):
                read_request(body, Races().choices())
            status, answer = begin(server, body)
            assert status == 400
            assert words in answer["error"]
        assert begin(server, b"[]")[0] == 400
        assert begin(server, b"\xff{")[0] == 400


def test_an_upload_too_large_is_refused_before_it_is_read_to_its_end(run: Path) -> None:
    with served(run) as server:
        status, answer = begin(server, asked("x" * (LARGEST_UPLOAD + 1)))
        assert status == 413
        assert "larger than 2000 kB" in answer["error"]


def test_a_race_is_begun_by_the_page_itself_only(run: Path) -> None:
    body = asked("1\n\nCu 0 0 0\n")
    with served(run) as server:
        for origin in ("http://evil.example", "null", f"https://127.0.0.1:{server.port}", "http://127.0.0.1:1"):
            assert begin(server, body, Origin=origin)[0] == 403
        own = {"Content-Type": "application/json"}
        assert ask(server, "/race", "POST", body, **own)[0] == 403
        assert begin(server, body, Content_Type="text/plain")[0] == 415
        assert begin(server, body, Content_Type="multipart/form-data; boundary=x")[0] == 415


def test_races_are_few_and_end_in_time(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "Races", lambda: Races(seconds=1.0, at_once=1))
    text = structure_text(shaken(repeat=400), "large.xyz", tmp_path, format="extxyz")
    with served(run) as server:
        _, begun = begin(server, asked(text, fmax=0.001))
        status, answer = begin(server, asked(text))
        assert status == 429
        assert "wait until one is over" in answer["error"]
        state = ended(server, begun["number"], seconds=20)
        assert "longer than 1 s" in state["error"]
        assert json.loads(ask(server, "/")[2].decode().split('"race":')[1].split("}]")[0] + "}]}")["calculators"]
        assert ask(server, "/race/99")[0] == 404


def test_a_thousand_atoms_race_and_their_page_stays_small(tmp_path: Path) -> None:
    text = structure_text(shaken(repeat=250), "x.xyz", tmp_path, format="extxyz")
    said = raced(text, fmax=5.0)  # converged where it starts: BFGS would take minutes for its matrix
    films = next(one for one in said["page"]["parts"] if one["kind"] == "film")["films"]
    assert len(films[0]["species"]) == 1000
    assert len(json.dumps(said)) < 400_000


def test_a_racer_that_gets_lost_does_not_take_the_others_with_it(tmp_path: Path) -> None:
    text = structure_text(shaken(), "x.xyz", tmp_path, format="extxyz")
    said = live_race_worker._answer(json.loads(asked(text)), StringIO(), seconds=0.0)
    table = next(one for one in said["page"]["parts"] if one["kind"] == "table")
    assert [row["cells"][2] for row in table["rows"]] == ["failed"] * 3
    facts = next(one for one in said["page"]["parts"] if one.get("title") == "How it was made")["facts"]
    assert any("FIRE was ended after 0 s" in fact["value"] for fact in facts)


def test_a_server_that_ends_takes_its_races_with_it(run: Path, tmp_path: Path) -> None:
    text = structure_text(shaken(repeat=400), "large.xyz", tmp_path, format="extxyz")
    with served(run) as server:
        begin(server, asked(text, fmax=0.001))
        limit = time.monotonic() + PATIENCE
        while not (workers := _workers()) and time.monotonic() < limit:
            time.sleep(0.05)
        assert workers
    assert not set(workers) & set(_workers())


def _workers() -> list[int]:
    """Processes of races begun by this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
            if int(parent) == os.getpid() and b"live_race_worker" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except (OSError, IndexError, ValueError):
            continue
    return found


def test_results_of_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_race, "KEPT", 2)
    races = Races()
    for number in range(1, 6):
        races._races[number] = live_race.Race(number, outcome={"error": "x"})
    races._forget()
    assert [races.state(number) is not None for number in range(1, 6)] == [False, False, False, True, True]


def test_formats_are_ours_whatever_the_name() -> None:
    poscar = "12\n1.0\n3 0 0\n0 3 0\n0 0 3\nCu\n1\nDirect\n0 0 0\n"
    assert format_of("POSCAR", "") == format_of("x.vasp", "") == format_of("CONTCAR_1", "") == "vasp"
    assert format_of("x.CIF", "") == "cif"
    assert format_of("x", "data_Cu\n_cell_length_a 3\n") == "cif"
    assert format_of("x", "1\n\nCu 0 0 0\n") == "extxyz"
    assert format_of("x", poscar) == "vasp"
    assert format_of("x.py", "import os") == format_of("x.db", "") == "vasp"
    assert comment_of(poscar, "vasp") == "12"
    assert comment_of("1\nhello\nCu 0 0 0", "extxyz") == "hello"


def test_too_many_atoms_no_atoms_several_structures() -> None:
    line = "Cu 0 0 0\n"
    with pytest.raises(StructureError, match=f"the race takes {MOST_ATOMS}"):
        read_structure("a.xyz", f"{MOST_ATOMS + 1}\n\n" + line * (MOST_ATOMS + 1))
    with pytest.raises((StructureError, FileError)):
        read_structure("a.xyz", "0\n\n")
    atoms, kind, hints = read_structure("a.xyz", f"1\n\n{line}1\n\n{line}")
    assert (len(atoms), kind) == (1, "extxyz")
    assert "the first one races" in hints[0]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("../../etc/passwd", "passwd"), ("C:\\x\\POSCAR", "POSCAR"), ("..", "structure"), ("", "structure"),
        ("a\x00b\n.cif", "ab.cif"), ("x" * 300, "x" * 80), (HOSTILE, "script>"),
    ],
)  # fmt: skip
def test_names_are_only_shown(given: str, shown: str) -> None:
    assert shown_name(given) == shown


def test_a_vasp_4_poscar_reads_no_file_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ASE looks for the elements of an old POSCAR in a POTCAR beside it; there is no beside."""
    monkeypatch.chdir(tmp_path)
    Path("POTCAR").write_text(" PAW_PBE Cu 22Jun2005\n   11.0\n")
    text = "no elements\n1.0\n3 0 0\n0 3 0\n0 0 3\n1\nDirect\n0 0 0\n"
    with pytest.raises(FileError, match="cannot be read as POSCAR"):
        read_structure("POSCAR", text)


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
    monkeypatch.delitem(sys.modules, "relaxion.web.live")
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


def test_the_worker_has_a_list_of_formats() -> None:
    assert set(live_race_worker.FORMATS) == {"cif", "extxyz", "vasp"}


class _StillBoard:
    """Always the same, but for its version."""

    version, epoch = 0, "e"

    def news(self, since: int) -> str:
        del since
        return json.dumps({"version": self.version})


async def _busy_page(news: int) -> tuple[live_module.Live, list[str]]:
    """Listeners that go away at any moment while there are news; a Condition of asyncio did not survive this."""
    live, chance, wrong = live_module.Live(_StillBoard(), Races()), random.Random(0), []  # type: ignore[arg-type]

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
    await asyncio.wait_for(live.end(), timeout=PATIENCE)
    await asyncio.wait_for(asyncio.gather(*tasks), timeout=PATIENCE)
    return live, wrong


def test_readers_that_go_away_stop_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "SECONDS_OF_SILENCE", 0.002)
    live, wrong = asyncio.run(_busy_page(200))
    assert not wrong
    assert live._listeners == len(live._waiting) == 0
