"""Counts of the house, nothing subtracted: files, lines, settings, names, and what one step really enters.

    python tools/house.py            # the table
    python tools/house.py --check    # exit code 1 where a count is above its limit, as CI asks

Limits only ever fall: whoever lowers a count lowers its limit here.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "relaxion"
COUNTS = {  # what is counted: (limit, goal)
    "files": (150, 150),
    "lines": (40016, 28500),
    "files of a relaxation step": (15, 15),
    "files of a TD3 update on atoms": (14, 15),
    "files of a TD3 update on Pendulum": (4, 6),
    "modules loaded by Relaxer and one run": (42, 45),
    "settings": (248, 250),
    "class names used twice": (0, 0),
    "flags outside the command line": (0, 0),
}
TRACED = """
import json, sys
entered = set()
def trace(frame, event, argument):
    file = frame.f_code.co_filename
    if "/relaxion/" in file and "site-packages" not in file and not frame.f_code.co_name.startswith("<"):
        entered.add(file)
def traced(function):
    entered.clear()
    sys.setprofile(trace)
    function()
    sys.setprofile(None)
    return len(entered)
"""
STEP = (
    TRACED
    + """
from ase.build import bulk
from ase.calculators.emt import EMT
from relaxion import Relaxer
def relaxer():
    atoms = bulk("Cu", cubic=True) * (2, 1, 1)
    atoms.rattle(0.1, seed=1)
    atoms.calc = EMT()
    return Relaxer(atoms, logfile=None)
relaxer().run(fmax=0.01)
loaded = sum(name.split(".")[0] == "relaxion" for name in sys.modules)
steps = relaxer().irun(fmax=0.01)
next(steps)
print(json.dumps([traced(lambda: next(steps)), loaded]))
"""
)

UPDATE_ON_ATOMS = (
    TRACED
    + """
from relaxion.train.runs.loop import make_trainer
from relaxion.train.tasks.settings import find, settings_from_recipe
small = {"n_structures": 8, "warmup_steps": 16, "batch_size": 8, "updates_per_round": 2, "n_pooled": 40}
trainer = make_trainer(settings_from_recipe(find("emt-metals"), "td3", small | {"replay_capacity": 1000}))
for _ in range(4):
    trainer.advance()
def update():
    for _ in range(2):  # one of them with the policy
        trainer.agent.update(trainer._sampled())
print(json.dumps([traced(update)]))
"""
)
UPDATE_ON_PENDULUM = (
    TRACED
    + """
from relaxion.train.runs.loop import make_trainer
from relaxion.train.tasks.settings import find, settings_from_recipe
trainer = make_trainer(settings_from_recipe(find("pendulum"), "td3", {"warmup_steps": 128}))
for _ in range(130):
    trainer.advance()
def update():
    for _ in range(2):  # one of them with the policy
        trainer.agent.update(trainer.replay.sample(16, trainer.normaliser))
print(json.dumps([traced(update)]))
"""
)


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield path, ast.parse(path.read_text())


def classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield path, node


def settings() -> int:
    """Fields of classes whose name or base ends with "Settings"."""
    total = 0
    for _, node in classes():
        bases = [ast.unparse(base) for base in node.bases]
        if any(name.endswith("Settings") for name in (node.name, *bases)):
            total += sum(isinstance(line, ast.AnnAssign) for line in node.body)
    return total


def names_used_twice() -> list[str]:
    counts = Counter(node.name for _, node in classes() if not node.name.startswith("_"))
    return sorted(name for name, number in counts.items() if number > 1)


def flags() -> int:
    """String literals outside the command line that name one of its options."""
    total = 0
    for path, tree in trees():
        if "cli" in path.relative_to(SOURCE).parts:
            continue
        literals = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        total += sum(isinstance(text, str) and bool(re.search(r"(?<![\w-])--[a-z]", text)) for text in literals)
    return total


def run(code: str) -> list[int]:
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return json.loads(answer.stdout.splitlines()[-1])


def counted() -> dict[str, int]:
    files = sorted(SOURCE.rglob("*.py"))
    step, loaded = run(STEP)
    (on_atoms,) = run(UPDATE_ON_ATOMS)
    (on_pendulum,) = run(UPDATE_ON_PENDULUM)
    return {
        "files": len(files),
        "lines": sum(len(path.read_text().splitlines()) for path in files),
        "files of a relaxation step": step,
        "files of a TD3 update on atoms": on_atoms,
        "files of a TD3 update on Pendulum": on_pendulum,
        "modules loaded by Relaxer and one run": loaded,
        "settings": settings(),
        "class names used twice": len(names_used_twice()),
        "flags outside the command line": flags(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    found = counted()
    for name, number in found.items():
        limit, goal = COUNTS[name]
        print(f"{name:40} {number:6}   limit {limit:6}   goal {goal:6}")
    above = [name for name, number in found.items() if number > COUNTS[name][0]]
    if asked.check and above:
        sys.exit(f"above the limit: {', '.join(above)}")


if __name__ == "__main__":
    main()
