"""Programs behind calculators: closed whatever happens, one sentence where they fail, `--resume` afterwards."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from ase.build import bulk
from ase.io import read, write

from relaxion.potentials import base as closing
from relaxion.potentials.counting import MOST_CELL_CHANGE

EXAMPLE = Path(__file__).parents[2] / "examples" / "engines" / "espresso.py"
ENGINES = '''
import os, subprocess, sys
from pathlib import Path
from ase.calculators.emt import EMT
from ase.calculators.socketio import PySocketIOClient, SocketIOCalculator

BREAK = Path("break-at")
NAME = f"relaxion-test-{os.getpid()}"


class Closed(EMT):
    """Says when it is closed; breaks at the call that a file names, once."""

    calls = 0

    def calculate(self, *arguments):
        self.calls += 1
        if BREAK.exists() and self.calls == int(BREAK.read_text()):
            BREAK.unlink()
            raise KeyboardInterrupt if Path("interrupt").exists() else OSError("the license server is away")
        super().calculate(*arguments)

    def close(self):
        file = Path("closed")
        file.write_text((file.read_text() if file.exists() else "") + "x")


def cannot_be_closed():
    calculator = EMT()
    calculator.close = lambda: 1 / 0
    return calculator


def through_a_socket():
    return SocketIOCalculator(unixsocket=NAME, launch_client=PySocketIOClient(EMT), timeout=20)


def started(*command):
    def launch(atoms, properties=None, port=None, unixsocket=None):
        process = subprocess.Popen(command)
        Path("pid").write_text(str(process.pid))
        return process

    return SocketIOCalculator(unixsocket=NAME, launch_client=launch, timeout=1)


def dies():
    return started(sys.executable, "-c", "raise SystemExit(3)")


def hangs():
    code = "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); time.sleep(60)"
    return started(sys.executable, "-c", code, "/tmp/ipi_" + NAME)


def is_not_installed():
    return started("no-such-dft-code")


def on_a_taken_port():
    return SocketIOCalculator(port=int(Path("port").read_text()), launch_client=PySocketIOClient(EMT))


class EnergiesOnly(EMT):
    implemented_properties = ["energy"]
'''


@pytest.fixture
def start() -> Iterator[str]:
    Path("engines_for_test.py").write_text(ENGINES)
    atoms = bulk("Cu", cubic=True)
    atoms.rattle(0.1, seed=1)
    write("start.xyz", atoms)
    yield "start.xyz"
    sys.modules.pop("engines_for_test", None)


def test_closed_at_the_end(relaxion, start):
    answer = relaxion("relax", start, "--calc", "engines_for_test:Closed", "--compare", "BFGS", "--quiet")
    assert answer.code == 0
    assert Path("closed").read_text() == "x", "once, after ours and BFGS"


def test_not_begun_where_nothing_could_be_read(relaxion, start):
    Path(start).write_text("nonsense")
    assert relaxion("relax", start, "--calc", "engines_for_test:Closed", "--quiet").code == 1
    assert not Path("closed").exists()


@pytest.mark.parametrize(("interrupt", "code"), [(False, 1), (True, 130)])
def test_closed_after_errors_and_ctrl_c_and_resumed_without_a_lost_call(relaxion, start, interrupt, code):
    Path("break-at").write_text("4")
    if interrupt:
        Path("interrupt").touch()
    arguments = ("relax", start, "--calc", "engines_for_test:Closed", "--json", "--quiet", "--fmax", "0.002")
    answer = relaxion(*arguments)
    assert (answer.code, Path("closed").read_text()) == (code, "x")
    assert Path("relaxed/start/start.restart.json").exists()
    frames = len(read("relaxed/start/start.traj", ":"))
    resumed = relaxion(*arguments, "--resume")
    assert resumed.code == 0
    expected = relaxion(*arguments, "--out", "straight")
    assert resumed.objects[0]["force_calls"] == expected.objects[0]["force_calls"], "interrupted = straight"
    assert resumed.objects[0]["energy_ev"] == pytest.approx(expected.objects[0]["energy_ev"], abs=1e-9)
    assert not Path("relaxed/start/start.restart.json").exists()
    assert len(read("relaxed/start/start.traj", ":")) == expected.objects[0]["force_calls"] > frames
    again = relaxion("relax", start, "--calc", "engines_for_test:Closed", "--resume")
    assert (again.code, again.err.strip()) == (0, "relaxion: 1 of 1 structures are done already")


def test_a_free_cell_is_resumed_too(relaxion, start):
    arguments = ("relax", start, "--calc", "engines_for_test:Closed", "--json", "--quiet", "--cell", "--fmax", "0.002")
    expected = relaxion(*arguments, "--out", "straight").objects[0]
    Path("break-at").write_text("3")
    assert relaxion(*arguments).code == 1
    resumed = relaxion(*arguments, "--resume").objects[0]
    assert resumed["force_calls"] == expected["force_calls"]
    assert resumed["energy_ev"] == pytest.approx(expected["energy_ev"], abs=1e-9)


def test_a_calculator_that_cannot_be_closed_hides_no_result(relaxion, start, caplog):
    answer = relaxion("relax", start, "--calc", "engines_for_test:cannot_be_closed", "--quiet")
    assert answer.code == 0
    assert "EMT could not be closed: ZeroDivisionError" in caplog.text


def test_a_program_behind_a_socket(relaxion, start):
    answer = relaxion("relax", start, "--calc", "engines_for_test:through_a_socket", "--cell", "--json", "--quiet")
    assert answer.code == 0
    direct = relaxion("relax", start, "--calc", "emt", "--cell", "--json", "--quiet", "--out", "direct")
    assert answer.objects[0]["energy_ev"] == pytest.approx(direct.objects[0]["energy_ev"], abs=1e-4)


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("dies", "terminated unexpectedly with status 3"),
        ("hangs", "timed out"),
        ("is_not_installed", "No such file or directory: 'no-such-dft-code'"),
        ("on_a_taken_port", "Address already in use"),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # ASE's own socket, where it is taken
def test_a_program_that_fails_is_one_sentence(relaxion, start, monkeypatch, factory, words):
    monkeypatch.setattr(closing, "SECONDS_TO_END", 0.2)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        Path("port").write_text(str(taken.getsockname()[1]))
        answer = relaxion("relax", start, "--calc", f"engines_for_test:{factory}", "--quiet")
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.count("\n") == 1
    assert words in answer.err
    if factory == "hangs":
        assert not Path(f"/proc/{Path('pid').read_text()}").exists(), "it is ended, and does not stay behind"


def test_energies_without_forces(relaxion, start):
    answer = relaxion("relax", start, "--calc", "engines_for_test:EnergiesOnly")
    assert answer.code == 1
    assert (
        answer.err == "relaxion: the calculator EnergiesOnly gives energies without forces; use one that gives both\n"
    )


FAKE_PW = '''
"""As pw.x in its place: reads pw.in, answers through the socket, gives up on its electrons where a file says so."""
import os, sys
from pathlib import Path
from ase.calculators.emt import EMT
from ase.calculators.socketio import SocketClient
from ase.io import read


class Electrons(EMT):
    calls = 0

    def calculate(self, *arguments):
        Electrons.calls += 1
        if self.calls == 3 and FEW.exists():
            print("     convergence NOT achieved after   2 iterations: stopping", flush=True)
            os._exit(0)
        super().calculate(*arguments)


FEW = Path(sys.argv[1])
address = sys.argv[sys.argv.index("--ipi") + 1].removesuffix(":UNIX")
atoms = read(sys.argv[sys.argv.index("-in") + 1], format="espresso-in")
atoms.calc = Electrons()
SocketClient(unixsocket=address).run(atoms, use_stress=True)
'''
SETTINGS = """
import sys
from pathlib import Path
from espresso_example import espresso

ELECTRONS = {"ecutwfc": 10.0, "occupations": "fixed", "electron_maxstep": 1}


def fake():
    command = (sys.executable, str(Path("fake_pw.py").absolute()), str(Path("few").absolute()))
    return espresso({"ecutwfc": 10.0}, {"Cu": "Cu.UPF"}, None, Path("pw"), command)


def too_few():
    return espresso(ELECTRONS, {"Si": "Si.pz-vbc.UPF"}, None, Path("pw"))
"""


@pytest.fixture
def settings() -> Iterator[str]:
    shutil.copy(EXAMPLE, "espresso_example.py")
    Path("fake_pw.py").write_text(FAKE_PW)
    Path("espresso_settings.py").write_text(SETTINGS)
    yield "espresso_settings"
    for name in ("espresso_settings", "espresso_example"):
        sys.modules.pop(name, None)


def test_electrons_that_do_not_converge_are_a_sentence_and_the_rest_is_resumed(relaxion, start, settings):
    arguments = ("relax", start, "--calc", f"{settings}:fake", "--json", "--quiet", "--fmax", "0.01")
    Path("few").touch()
    answer = relaxion(*arguments)
    assert (answer.code, answer.err.count("\n")) == (1, 1)
    assert "failed at force call 3: RuntimeError: pw.x: convergence NOT achieved after 2 iterations" in answer.err
    assert Path("relaxed/start/start.restart.json").exists()
    Path("few").unlink()  # the user mends the settings
    resumed = relaxion(*arguments, "--resume")
    straight = relaxion("relax", start, "--json", "--quiet", "--fmax", "0.01", "--out", "straight")
    assert (resumed.code, straight.code) == (0, 0)
    assert resumed.objects[0]["force_calls"] == straight.objects[0]["force_calls"] >= 3


@pytest.mark.skipif(shutil.which("pw.x") is None, reason="needs Quantum ESPRESSO: make espresso")
def test_what_quantum_espresso_itself_says_of_its_electrons(relaxion, settings):
    write("silicon.xyz", bulk("Si", a=5.4))
    answer = relaxion("relax", "silicon.xyz", "--calc", f"{settings}:too_few", "-q")
    assert (answer.code, answer.err.count("\n")) == (1, 1)
    assert "pw.x: convergence NOT achieved after 1 iterations" in answer.err


@pytest.mark.skipif(shutil.which("pw.x") is None, reason="needs Quantum ESPRESSO: make espresso")
def test_the_example_with_quantum_espresso(relaxion):
    shutil.copy(EXAMPLE, "espresso_example.py")
    atoms = bulk("Si", a=5.4)
    atoms.rattle(0.05, seed=1)
    write("silicon.xyz", atoms)
    answer = relaxion("relax", "silicon.xyz", "--calc", "espresso_example:silicon", "--fmax", "0.03", "--json", "-q")
    assert answer.code == 0
    assert answer.objects[0]["force_calls"] < 10
    relaxed = read("relaxed/silicon/silicon.extxyz")
    assert np.linalg.norm(relaxed.get_distance(0, 1, mic=True)) == pytest.approx(5.4 * 3**0.5 / 4, abs=0.01)


@pytest.mark.skipif(shutil.which("pw.x") is None, reason="needs Quantum ESPRESSO: make espresso")
def test_quantum_espresso_is_started_anew_before_its_energies_are_wrong(monkeypatch):
    """From the second to the third cell the volume has changed by 10 %: pw.x 6.7 keeps the k-points of the first."""
    shutil.copy(EXAMPLE, "espresso_example.py")
    monkeypatch.syspath_prepend(".")
    silicon = import_module("espresso_example").silicon
    structures = []
    for scale in (0.95, 0.965, 0.98):
        structures.append(bulk("Si", a=5.4 * scale))
        structures[-1].rattle(0.05, seed=1)

    def energies(most_cell_change: float) -> tuple[list[float], int]:
        calculator = silicon()
        calculator.most_cell_change = most_cell_change
        try:
            return [calculator.get_potential_energy(atoms) for atoms in structures], calculator.launches
        finally:
            calculator.close()

    fresh, _ = energies(0.0)
    kept, launches = energies(10.0)
    assert launches == 1
    assert kept[2] - fresh[2] > 0.1, "else this version of pw.x has mended it"
    relaunched, launches = energies(MOST_CELL_CHANGE)
    assert launches == 2
    assert relaunched == pytest.approx(fresh, abs=0.05)  # plane waves of the cell it was started with


@pytest.mark.skipif(shutil.which("pw.x") is None, reason="needs Quantum ESPRESSO: make espresso")
def test_a_free_cell_with_quantum_espresso_ends_where_a_fresh_one_agrees(relaxion):
    """From 0.92 of the volume: pw.x is started anew on the way, and once more at the end."""
    shutil.copy(EXAMPLE, "espresso_example.py")
    atoms = bulk("Si", a=5.25)
    atoms.rattle(0.02, seed=1)
    write("silicon.xyz", atoms)
    arguments = ("--calc", "espresso_example:silicon", "--cell", "--fmax", "0.03", "--json", "-q", "--out")
    first = relaxion("relax", "silicon.xyz", *arguments, "first")
    assert first.code == 0, first.err
    again = relaxion("relax", "first/silicon/silicon.extxyz", *arguments, "again")
    assert again.code == 0, again.err
    assert again.objects[0]["force_calls"] <= 3
    assert first.objects[0]["energy_ev"] == pytest.approx(again.objects[0]["energy_ev"], abs=0.05)
