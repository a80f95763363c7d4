"""The command as a process: what it loads, how it ends, what Ctrl-C does."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ase.io import read

COMMAND = [sys.executable, "-c", "from relaxion.apps.cli.app import main; main()"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "150"}


def call(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=ENVIRONMENT, check=False)


@pytest.mark.parametrize("option", ["--version", "--help", "relax --help"])
def test_quick_start(option):
    """Nobody waits for torch to read a help text."""
    code = (
        "import sys\nfrom relaxion.apps.cli.app import app\n"
        f"app({option.split()!r}, standalone_mode=False)\n"
        "heavy = {'torch', 'ase', 'numpy', 'scipy'} & set(sys.modules)\n"
        "print('heavy:', sorted(heavy))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT)
    assert result.stdout.splitlines()[-1] == "heavy: []"


def test_version():
    from relaxion import __version__

    result = call("--version")
    assert (result.returncode, result.stdout) == (0, f"relaxion {__version__}\n")


def test_help_has_examples_and_units():
    result = call("--help")
    assert result.returncode == 0
    for words in ("relaxion relax alloy.cif", "eV/Å", "Exit codes", "130 interrupted", "143"):
        assert words in result.stdout
    assert "Structure files in any" in call("relax", "--help").stdout


def test_stdout_is_json_and_nothing_else(alloy_file):
    result = call("relax", alloy_file, "--json", "--compare", "BFGS,GPMin")
    assert result.returncode == 0
    assert [json.loads(line)["file"] for line in result.stdout.splitlines()] == ["alloy.xyz"]
    assert "Relaxion: call 1" in result.stderr


def test_exit_codes(alloy_file):
    assert call("relax", alloy_file, "--steps", "1").returncode == 3
    assert call("relax", "missing.xyz").returncode == 1
    assert call("relax", alloy_file, "--calc", "nonsense", "--out", "other").returncode == 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm(alloy_file, number, code):
    command = [*COMMAND, "relax", str(alloy_file), "--calc", "calculators_for_test:Stuck", "--fmax", "1e-6"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=ENVIRONMENT, **pipes) as process:
        assert process.stderr is not None
        assert "call 1" in process.stderr.readline(), "it says that it has begun"
        process.send_signal(number)
        out, err = process.communicate(timeout=600)
    assert process.returncode == code
    assert "Traceback" not in err
    assert "the structure reached so far is saved" in out
    assert len(read("relaxed/alloy/alloy.extxyz")) == 8
    assert [entry.name for entry in Path("relaxed").iterdir()] == ["alloy"]


def test_ignored_signals_stay_ignored(alloy_file):
    """A shell script starts its background jobs deaf to Ctrl-C."""
    shell = [
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    ]
    command = [sys.executable, "-c", *shell, *COMMAND, "relax", str(alloy_file), "--calc", "calculators_for_test:Slow"]
    with subprocess.Popen(command, text=True, env=ENVIRONMENT, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert "call 1" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=600)
    assert process.returncode == 0


def test_a_terminal_without_unicode(alloy_file):
    """The sentence loses a letter, not the result; JSON loses nothing."""
    Path("l\u00e9ger.xyz").write_bytes(alloy_file.read_bytes())
    environment = {**ENVIRONMENT, "PYTHONIOENCODING": "ascii"}
    options = {"capture_output": True, "timeout": 600, "env": environment, "check": False}
    plain = subprocess.run([*COMMAND, "relax", str(alloy_file), "--compare", "BFGS"], **options)
    assert plain.returncode == 0, plain.stderr
    assert b"eV/?" in plain.stdout
    json_only = subprocess.run([*COMMAND, "relax", "l\u00e9ger.xyz", "--json"], **options)
    assert json_only.returncode == 0, json_only.stderr
    assert json.loads(json_only.stdout)["file"] == "l\u00e9ger.xyz"
    assert subprocess.run([*COMMAND, "relax", "--help"], **options).returncode == 0


def test_terminal_shows_one_line(alloy_file):
    """In a terminal the progress line rewrites itself and is gone at the end."""
    screen, terminal = pty.openpty()
    command = [*COMMAND, "relax", str(alloy_file), "--compare", "BFGS"]
    environment = {**ENVIRONMENT, "TERM": "xterm"}
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment) as process:
        os.close(terminal)
        shown = _everything(screen)
    assert process.returncode == 0
    before, _, after = shown.partition("alloy.xyz: Au2Cu6 relaxed in")
    assert "call 1," not in after
    assert before.endswith("\x1b[2K"), "the progress line is wiped before the result"


def _everything(screen: int) -> str:
    shown = b""
    while True:
        try:
            piece = os.read(screen, 4096)
        except OSError:  # how Linux says that the other end is closed
            piece = b""
        if not piece:
            os.close(screen)
            return shown.decode()
        shown += piece
