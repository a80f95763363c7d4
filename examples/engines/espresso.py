"""Quantum ESPRESSO, kept alive between force calls by ASE's socket calculator (the i-PI protocol).

    cd examples/engines
    relaxion relax silicon.xyz --calc espresso:silicon --fmax 0.03

pw.x is started at the first force call and goes on from its last wave functions at each next one. It is started anew
before the cell has changed by 6 %: pw.x 6.7 keeps the k-points of its first cell, and beyond 10 % of the volume its
energies are wrong. Relaxion closes it at the end, on errors and on Ctrl-C. One calculator serves one structure: the
protocol sends positions and cells only. Where pw.x gives up (electrons that do not converge, a wrong input), its own
reason is in the sentence, and `relaxion relax … --resume` goes on from there once the settings are mended.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from ase import Atoms
from ase.calculators.socketio import SocketIOCalculator
from ase.io import write

from relaxion.potentials.counting import RelaunchedCalculator

PSEUDOPOTENTIALS = Path("/usr/share/espresso/pseudo")  # where Debian's quantum-espresso-data puts them
LONGEST_CALL_SECONDS = 3600.0  # pw.x that has not answered by then hangs


class Espresso(RelaunchedCalculator):
    """pw.x, started anew before the cell has changed by 6 %; the name is that of the calculator in all messages."""


class Launched(SocketIOCalculator):
    """One pw.x. Says what pw.x said before it went away."""

    output: Path

    def calculate(self, *arguments: Any, **options: Any) -> None:
        try:
            super().calculate(*arguments, **options)
        except (OSError, RuntimeError) as error:
            reason = reason_in(self.output)
            if reason is None:
                raise
            raise RuntimeError(f"pw.x: {reason} ({self.output})") from error


def reason_in(output: Path) -> str | None:
    """Why pw.x stopped; None where it does not say."""
    text = output.read_text(errors="replace") if output.exists() else ""
    if found := re.findall(r"convergence NOT achieved after.*iterations", text):
        return found[-1]
    found = re.search(r"Error in routine.*\n\s*(.*)", text)
    return found and found[1].strip()


def silicon() -> Espresso:
    """LDA for silicon, light enough to try."""
    settings = {"ecutwfc": 14.0, "occupations": "fixed"}
    return espresso(settings, {"Si": "Si.pz-vbc.UPF"}, kpts=(2, 2, 2))


def espresso(
    settings: dict[str, Any],
    pseudopotentials: dict[str, str],
    kpts: tuple[int, int, int] | None,
    folder: Path | None = None,
    command: tuple[str, ...] = ("pw.x",),
    timeout: float = LONGEST_CALL_SECONDS,
) -> Espresso:
    """`settings`: of pw.x, flat. `kpts`: None for Γ alone. `folder`: for its files; a temporary one unless given.

    Each launch has files of its own there: `pw-1.in` and `pw-1.out`, then `pw-2.in`.
    """
    where = (folder or Path(mkdtemp(prefix="espresso-"))).absolute()
    where.mkdir(parents=True, exist_ok=True)
    data = {
        "calculation": "vc-relax",  # also with a fixed cell: only so pw.x reads the next number
        "cell_factor": 2.0,  # tables for the longer wave vectors of a cell that shrinks
        "pseudo_dir": str(PSEUDOPOTENTIALS),
        "outdir": str(where / "out"),
        "tprnfor": True,
        "tstress": True,
        "nosym": True,
        "conv_thr": 1e-8,
        **settings,
    }

    def make() -> Launched:
        number = calculator.launches + 1
        name = where / f"pw-{number}.in"
        output = name.with_suffix(".out")

        def launch(atoms: Atoms, properties: Any = None, port: Any = None, unixsocket: Any = None) -> subprocess.Popen:
            del properties, port
            write(name, atoms, format="espresso-in", input_data=data, pseudopotentials=pseudopotentials, kpts=kpts)
            with output.open("w") as out:
                arguments = [*command, "-in", name.name, "--ipi", f"{unixsocket}:UNIX"]
                return subprocess.Popen(arguments, cwd=where, stdout=out, stderr=subprocess.STDOUT)

        socket = f"relaxion-{os.getpid()}-{where.name}-{number}"
        made = Launched(unixsocket=socket, timeout=timeout, launch_client=launch)
        made.output = output
        return made

    calculator = Espresso(make)
    return calculator
