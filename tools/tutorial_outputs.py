"""Run the tutorials and keep what they print, for the pages: python tools/tutorial_outputs.py [NAME…]"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

TUTORIALS = Path(__file__).resolve().parents[1] / "examples" / "tutorials"
NOT_RUN = ("my_potential",)  # a part of another one


def names() -> list[str]:
    return sorted(path.stem for path in TUTORIALS.glob("*.py") if path.stem not in NOT_RUN)


def printed(name: str, folder: Path, *options: str) -> str:
    """What a tutorial prints, run in a folder of its own, one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TUTORIALS / f"{name}.py"), *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{name} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def main() -> None:
    for name in sys.argv[1:] or names():
        with tempfile.TemporaryDirectory() as folder:
            text = printed(name, Path(folder))
        (TUTORIALS / "outputs" / f"{name}.txt").write_text(text)
        print(f"{name}\n{text}")


if __name__ == "__main__":
    main()
