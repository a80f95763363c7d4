"""The table of docs/results/relaxing.md, whole: every set with every optimizer beside it, one JSON file each.

    python benchmarks/relaxation/tables.py                       # all that is missing; killed, it continues
    python benchmarks/relaxation/tables.py --again --only universal-mp emt-bulk
    python benchmarks/relaxation/tables.py --ours                # Relaxion and its core anew; ASE's rows stay as they
                                                                 # are, where starts and ASE are the same

At the end the pages and the picture of the README are made anew.

`mp.extxyz` is made of a MP-20 file (`--mp20 FILE`), which is not part of the repository; without it those rows are left
as they are. Counts of force calls do not depend on the machine's load; the seconds in the files do.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from relaxion.apps.cli.bench import as_plain
from relaxion.files import replace_file
from relaxion.train.judge.runs import Score
from relaxion.train.judge.statistics import Circumstances, ContestResult

HERE = Path(__file__).parent
RESULTS = HERE / "results"
USUAL = "BFGS,BFGSLineSearch,GoodOldQuasiNewton,MDMin,FIRE"
MP = "MP"  # stands for the file of crystals
METALS = {
    "emt-bulk": f"emt-bulk --with {USUAL},GPMin",
    "emt-large": f"emt-large --with {USUAL}",
    "emt-bulk-cell": f"emt-bulk-cell --with {USUAL},GPMin",
    "emt-slabs": f"emt-slabs --with {USUAL},GPMin",
    "emt-clusters": f"emt-clusters --with {USUAL}",
    "alfe": f"alfe --with {USUAL}",
    "alfe-cell": f"alfe-cell --with {USUAL}",
    "mixed": f"mixed --with {USUAL}",
    "emt-bulk-0.01": "emt-bulk --fmax 0.01 --number 40 --with BFGS,BFGSLineSearch,MDMin",
}
UNIVERSAL = {
    "universal-mp": f"{MP} --calc chgnet --perturb rattle:0.12 --with BFGSLineSearch,GoodOldQuasiNewton,BFGS",
    "universal-mp-cell": f"{MP} --calc chgnet --perturb strain:0.03+rattle:0.12 --cell --number 50 "
    "--with BFGSLineSearch,BFGS,GPMin",
    "universal-crystals": "crystals --number 60 --with BFGSLineSearch,GoodOldQuasiNewton,BFGS",
    "universal-new-elements": "new-elements --number 60 --allow-unseen --with BFGSLineSearch,BFGS",
    "universal-perovskites": "perovskites --number 48 --with BFGSLineSearch,BFGS,GPMin",
    "universal-perovskites-cell": "perovskites-cell --number 36 --with BFGSLineSearch,BFGS,GPMin",
    "universal-carbon-cell": "carbon-cell --number 36 --with BFGSLineSearch,BFGS,GPMin",
    "universal-emt-bulk": "emt-bulk --policy universal --number 40 --with BFGSLineSearch,BFGS",
    "universal-alfe": "alfe --policy universal --number 24 --with BFGSLineSearch,GoodOldQuasiNewton,BFGS",
    "universal-mp-sevennet": f"{MP} --calc sevennet --perturb rattle:0.12 --number 40 --with BFGSLineSearch,BFGS",
    "universal-mp-l3i5": f"{MP} --calc sevennet:7net-l3i5 --perturb rattle:0.12 --number 24 --with BFGSLineSearch,BFGS",
    "universal-macs": "macs --number 24 --with BFGSLineSearch",
    "mp-relax": "mp-relax --with FIRE,GoodOldQuasiNewton --number 32",
}
TIGHT = {
    f"{name}-{fmax}": f"{name} --fmax {fmax} --number 40 --with BFGS,BFGSLineSearch"
    for name in ("emt-bulk", "emt-bulk-cell", "emt-slabs")
    for fmax in ("0.001", "0.0001")
} | {
    f"universal-{name}-{fmax}": f"{name} --fmax {fmax} --number {number} --with BFGS,BFGSLineSearch"
    for name in ("crystals", "crystals-cell")
    for fmax, number in (("0.001", 20), ("0.0001", 12))
}
"""As for phonons. CHGNet answers in single precision."""
ROWS = METALS | UNIVERSAL | TIGHT


def crystals(mp20: Path | None) -> Path | None:
    """Forty crystals that were never trained on."""
    if mp20 is None:
        return None
    file = Path(tempfile.mkdtemp()) / "mp.extxyz"
    words = [str(HERE / "held_apart.py"), str(mp20), str(file), "--most-atoms", "16", "--number", "40"]
    subprocess.run([sys.executable, *words], check=True)
    return file


def measured(name: str, file: Path | None, *, ours: bool) -> None:
    """One row, by the command that a user would type; `ours`: ASE's optimizers as they were measured before."""
    words = ROWS[name].split()
    if words[0] == MP:
        if file is None:
            print(f"{name}: needs --mp20 FILE", flush=True)
            return
        words[0] = str(file)
    out = RESULTS / f"{name}.json"
    kept = json.loads(out.read_text()) if ours else None
    if kept is not None:
        words[words.index("--with") + 1] = "none"
    with tempfile.TemporaryDirectory() as folder:
        new = Path(folder) / out.name
        subprocess.run([sys.executable, "-m", "relaxion", "bench", *words, "--json", str(new), "--quiet"], check=True)
        table = json.loads(new.read_text())
    if kept is not None:
        table = beside(table, kept)
    table["command"] = f"relaxion bench {ROWS[name].replace(MP, 'mp.extxyz')} --json {name}.json"
    replace_file(out, (json.dumps(table, indent=1) + "\n").encode())
    print(f"{name}: written", flush=True)


def beside(new: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    """The new row of ours with ASE's optimizers of the kept one; of their ends it knows the energies only."""
    same = (
        "structures",
        "calculator",
        "fmax_ev_per_angstrom",
        "force_call_cap",
        "free_cell",
        "seed",
        "perturb",
        "n_atoms",
    )
    changed = [key for key in same if new[key] != kept[key]]
    changed += [] if new["versions"]["ase"] == kept["versions"]["ase"] else ["ASE"]
    if changed:
        raise SystemExit(f"{new['set']}: not the same starts or conditions, {', '.join(changed)}; measure it --again")
    classical = [name for name in kept["optimizers"] if name not in new["optimizers"]]
    scores = {name: scores_of(new, name) for name in new["optimizers"]}
    scores |= {name: scores_of(kept, name) for name in classical}
    told = Circumstances(
        new["set"], new["title"], new["calculator"], new["policy"], new["fmax_ev_per_angstrom"], new["force_call_cap"],
        new["free_cell"], new["seed"], new["perturb"], new["command"], policies_used=new["policies_used"],
    )  # fmt: skip
    table = as_plain(ContestResult(told, scores, classical))
    for name in new["optimizers"]:
        distance = new["optimizers"][name]["median_distance_from_ours_angstrom"]
        table["optimizers"][name]["median_distance_from_ours_angstrom"] = distance
    return table | {"versions": new["versions"]}


def scores_of(table: dict[str, Any], name: str) -> list[Score]:
    """As far as a file tells: of times it has the sums only."""
    own, number = table["optimizers"][name], table["structures"]
    columns = (table[key][name] for key in ("converged", "force_calls", "energies_ev"))
    return [
        Score(
            converged=converged,
            spent=calls,
            charged=calls,
            energy_ev=energy,
            n_atoms=n_atoms,
            seconds=own["wall_time_seconds"] / number,
            calculator_seconds=own["calculator_seconds"] / number,
            overhead_seconds=own["overhead_seconds_per_force_call"] * calls,
        )
        for converged, calls, energy, n_atoms in zip(*columns, table["n_atoms"], strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW")
    parser.add_argument("--again", action="store_true", help="also what is there already")
    parser.add_argument("--ours", action="store_true", help="anew what is there already, but for ASE's optimizers")
    parser.add_argument("--mp20", type=Path, help="crystals of MP-20, extended XYZ")
    options = parser.parse_args()
    file = crystals(options.mp20)
    for name in options.only:
        there = (RESULTS / f"{name}.json").exists()
        if options.again or options.ours or not there:
            measured(name, file, ours=options.ours and there)
    for script in ("tools/fill_pages.py", "docs/pictures/gain.py"):
        subprocess.run([sys.executable, str(HERE.parents[1] / script)], check=True)


if __name__ == "__main__":
    main()
