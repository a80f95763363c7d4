"""Tables of measured force calls, from the files that `relaxion bench --json` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from relaxion.apps.comparison import LENNARD_JONES, SETS
from relaxion.train.judge.statistics import SAME_MINIMUM_EV_PER_ATOM, p95_where_same, resampled

TITLES = {  # the rows of the results page, in order
    "emt-bulk": "random alloys, 4–32 atoms",
    "emt-large": "random alloys, 24–64 atoms",
    "emt-bulk-cell": "random alloys, free cell",
    "emt-slabs": "slabs with an adsorbate",
    "emt-clusters": "random clusters",
    "alfe": "random Al–Fe packings",
    "alfe-cell": "random Al–Fe packings, free cell",
    "mixed": "rattled bulk and clusters",
    "universal-mp": "Materials Project crystals",
    "universal-mp-cell": "the same, free cell",
    "universal-mp-sevennet": "the same, fixed cell",
    "universal-mp-l3i5": "the same, fixed cell",
    "universal-crystals": "prototypes, other elements",
    "universal-new-elements": "elements never trained on",
    "universal-perovskites": "perovskites",
    "universal-perovskites-cell": "perovskites, free cell",
    "universal-carbon-cell": "carbon, free cell",
    "universal-macs": "random oxides, 40 atoms",
    "universal-emt-bulk": "alloys, policy `universal`",
    "universal-alfe": "Al–Fe, policy `universal`",
}
TIGHT = {  # the same to tighter tolerances
    "emt-bulk": "random alloys, fixed cell",
    "emt-bulk-cell": "random alloys, free cell",
    "emt-slabs": "slabs with an adsorbate",
    "universal-crystals": "prototypes, fixed cell",
    "universal-crystals-cell": "prototypes, free cell",
}
PAID = {  # the first rows of the README: engines that people pay for
    "universal-mp": "Materials Project crystals",
    "universal-mp-cell": "Materials Project crystals, free cell",
    "universal-perovskites-cell": "perovskites, free cell",
    "universal-mp-sevennet": "Materials Project crystals",
    "universal-mp-l3i5": "Materials Project crystals",
}
# python benchmarks/relaxation/internal_coordinates.py molecules --number 24 --fmax 1e-3; as on the results page
MOLECULES = "| small molecules | GFN2-xTB | 24 | **8.3** | 13.0 geomeTRIC (of 3) | – |"
FREE = {  # and those that cost nothing
    "emt-bulk": "random alloys, 4–32 atoms",
    "emt-bulk-cell": "random alloys, free cell",
    "emt-slabs": "slabs with an adsorbate",
    "emt-clusters": "random clusters",
    "alfe": "random Al–Fe packings",
}
CELLS = {  # free cells: the ends differ often, so calls are compared where they are the same, too
    "mp-relax": "unrelaxed prototypes",
    "universal-mp-cell": "Materials Project crystals",
    "universal-perovskites-cell": "perovskites",
    "universal-carbon-cell": "carbon",
    "emt-bulk-cell": "random alloys",
    "alfe-cell": "random Al–Fe packings",
}
WITHOUT_POLICY = [*list(TITLES)[:8], "lj38"]  # those that tell about the classical optimizer
OURS = ("relaxion", "core")
CALCULATORS = {
    "emt": "EMT",
    "eam": "EAM",
    "chgnet": "CHGNet",
    "sevennet": "SevenNet-0",
    "sevennet:7net-l3i5": "SevenNet-l3i5",
    "gfn2": "GFN2",
    LENNARD_JONES: "Lennard-Jones",
}


def table(root: Path) -> str:
    """All columns of the results page."""
    columns = (
        "set",
        "potential",
        "n",
        "Relaxion",
        "failed",
        "classical",
        "best of ASE's",
        "BFGS",
        "ratio (95 %)",
        "p95",
        "same end",
    )
    head = [f"| {' | '.join(columns)} | same minimum |", "|---" * (len(columns) + 1) + "|"]
    return "\n".join([*head, *(_row(name, _read(root, name)) for name in TITLES)])


def brief(root: Path) -> str:
    """The columns of the README."""
    head = "| structures | potential | number | Relaxion | best other | same minimum |"
    paid, free = ([_brief_row(words, _read(root, name)) for name, words in rows.items()] for rows in (PAID, FREE))
    return "\n".join([head, "|---|---|---|---|---|---|", *paid, _dft_row(root), MOLECULES, *free])


def _dft_row(root: Path) -> str:
    """Mean calls on the systems of `benchmarks/dft` that every method has relaxed."""
    calls = {name: _dft_calls(root / "benchmarks/dft/results", name) for name in ("relaxion", "BFGS", "BFGSLineSearch")}
    systems = set.intersection(*(set(own) for own in calls.values()))
    means = {name: np.mean([own[system] for system in systems]) for name, own in calls.items()}
    best = min((name for name in means if name != "relaxion"), key=means.__getitem__)
    cells = ["small systems, half with a free cell, to 0.03 eV/Å", "Quantum ESPRESSO", str(len(systems))]
    cells += [f"**{means['relaxion']:.1f}**", f"{means[best]:.1f} {best} (of {len(means) - 1})", "–"]
    return f"| {' | '.join(cells)} |"


def _dft_calls(folder: Path, method: str) -> dict[str, int]:
    found = [json.loads(file.read_text()) for file in folder.glob(f"*.{method}.json")]
    return {one["system"]: one["calls"] for one in found if one["outcome"] == "converged"}


def tight(root: Path) -> str:
    """The rows of `TIGHT` that were measured at 1e-3 and 1e-4 eV/Å."""
    head = (
        "| structures | potential | n | fmax, eV/Å | Relaxion | classical | best of ASE's | ratio (95 %) "
        "| not converged |"
    )
    found = [(f"{name}-{fmax}", words) for name, words in TIGHT.items() for fmax in ("0.001", "0.0001")]
    rows = [_tight_row(words, _read(root, name)) for name, words in found if _file(root, name).exists()]
    return "\n".join([head, "|---|---|---|---|---|---|---|---|---|", *rows])


def core(root: Path) -> str:
    """The classical optimizer by itself beside the best of ASE's."""
    head = "| set | potential | n | classical | failed | worst | best of ASE's | ratio (95 %) |"
    rows = [_core_row(name, _read(root, name)) for name in WITHOUT_POLICY]
    return "\n".join([head, "|---|---|---|---|---|---|---|---|", *rows])


def cells(root: Path) -> str:
    """Free cells beside three others, over all starts and over those that end in the same minimum."""
    head = "| structures | beside | n | ratio (95 %) | the same minimum | ratio there (95 %) | lower | higher |"
    rows = []
    for name, words in CELLS.items():
        result = _read(root, name)
        rows += [
            _cell_row(words, result, other)
            for other in ("core", result["best_classical"], "FIRE")
            if other in result["optimizers"]
        ]
    return "\n".join([head, "|---|---|---|---|---|---|---|---|", *rows])


def _cell_row(words: str, result: dict[str, Any], other: str) -> str:
    calls, others = (np.array(result["force_calls"][who], dtype=np.float64) for who in ("relaxion", other))
    ends, theirs = (np.array(result["energies_ev"][who], dtype=np.float64) for who in ("relaxion", other))
    gaps = (ends - theirs) / np.array(result["n_atoms"])
    same = np.abs(gaps) <= SAME_MINIMUM_EV_PER_ATOM
    ratios = [resampled(calls, others), resampled(calls[same], others[same])]
    everywhere, there = (f"{one.value:.2f} ({one.low:.2f}–{one.high:.2f})" for one in ratios)
    lower = int((gaps < -SAME_MINIMUM_EV_PER_ATOM).sum())
    higher = int((gaps > SAME_MINIMUM_EV_PER_ATOM).sum())
    who = "the classical optimizer" if other == "core" else other
    return f"| {words} | {who} | {len(calls)} | {everywhere} | {same.sum()} | {there} | {lower} | {higher} |"


def sets() -> str:
    """What `relaxion bench` knows by name."""
    rows = [
        f"| `{one.name}` | {one.title} | {CALCULATORS.get(one.calculator, one.calculator)} | "
        f"{'free' if one.free_cell else 'fixed'} | {one.number} |"
        for one in SETS.values()
    ]
    return "\n".join(["| set | starts | calculator | cell | number |", "|---|---|---|---|---|", *rows])


def _core_row(name: str, result: dict[str, Any]) -> str:
    own, best = result["optimizers"]["core"], result["best_classical"]
    calls, others = (np.array(result["force_calls"][who], dtype=np.float64) for who in ("core", best))
    ratio = resampled(calls, others)
    cells = [f"`{name}`", *_start("", result)[1:3], f"**{_mean(result, 'core')}**", str(own["failures"])]
    cells += [f"{own['worst_force_calls']:g}", _best(result), f"{ratio.value:.2f} ({ratio.low:.2f}–{ratio.high:.2f})"]
    return f"| {' | '.join(cells)} |"


def _tight_row(words: str, result: dict[str, Any]) -> str:
    failed = {name: sum(not ended for ended in own) for name, own in result["converged"].items()}
    cells = [*_start(words, result)[:-1], f"{result['fmax_ev_per_angstrom']:g}", f"**{_mean(result, 'relaxion')}**"]
    cells += [_mean(result, "core"), _best(result), _ratio(result)]
    cells += [", ".join(f"{name} {number}" for name, number in failed.items() if number) or "none"]
    return f"| {' | '.join(cells)} |"


def _file(root: Path, name: str) -> Path:
    return root / "benchmarks/relaxation/results" / f"{name}.json"


def _read(root: Path, name: str) -> dict[str, Any]:
    return json.loads(_file(root, name).read_text())


def _row(name: str, result: dict[str, Any]) -> str:
    cells = [*_start(TITLES[name], result), str(result["optimizers"]["relaxion"]["failures"]), _mean(result, "core")]
    cells += [_best(result), _mean(result, "BFGS"), _ratio(result)]
    cells += [f"{result['p95_of_paired_ratios_to_core']:.2f}", _same_end(result), f"{result['same_minimum_rate']:.0%}"]
    return f"| {' | '.join(cells)} |"


def _same_end(result: dict[str, Any]) -> str:
    """95th percentile of the ratios to the core where both end in the same minimum, and the number of those starts."""
    calls, others = (np.array(result["force_calls"][name], dtype=np.float64) for name in OURS)
    energies, core = (np.array(result["energies_ev"][name], dtype=np.float64) for name in OURS)
    gaps = (energies - core) / np.array(result["n_atoms"])
    found = p95_where_same(calls, others, gaps)
    return "–" if found is None else f"{found:.2f} ({int((np.abs(gaps) <= SAME_MINIMUM_EV_PER_ATOM).sum())})"


def _brief_row(words: str, result: dict[str, Any]) -> str:
    cells = [*_start(words, result), _best(result), f"{result['same_minimum_rate']:.0%}"]
    return f"| {' | '.join(cells)} |"


def _start(words: str, result: dict[str, Any]) -> list[str]:
    calculator = str(CALCULATORS.get(result["calculator"], result["calculator"]))
    return [words, calculator, str(result["structures"]), f"**{_mean(result, 'relaxion')}**"]


def _best(result: dict[str, Any]) -> str:
    """With the number of ASE's optimizers that took part."""
    best = result["best_classical"]
    return f"{_mean(result, best)} {best} (of {sum(name not in OURS for name in result['optimizers'])})"


def _ratio(result: dict[str, Any]) -> str:
    low, high = result["ratio_to_best_classical_interval_95"]
    return f"**{result['ratio_to_best_classical']:.2f}** ({low:.2f}–{high:.2f})"


def _mean(result: dict[str, Any], name: str) -> str:
    found = result["optimizers"].get(name)
    return "–" if found is None else f"{found['mean_force_calls']:.1f}"
