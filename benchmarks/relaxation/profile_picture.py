"""Performance profiles as pictures: who relaxed which share of the starts within τ times the fewest force calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from relaxion.train.judge.runs import CORE, OURS
from relaxion.train.judge.statistics import ContestResult, performance_profile

WIDEST_RATIO = 16.0  # beyond it, all that can be read off is who failed
OUR_COLOURS = {OURS: "#c1121f", CORE: "#e08e45"}  # warm: ours; ASE's get the cool ones
COOL_COLOURS = ("#003049", "#3a86c8", "#6a994e", "#7b5ea7", "#2a9d8f", "#8d99ae", "#577590", "#4d4d4d", "#90be6d")
DASHES = ("-", "--", ":", "-.")


def draw_profile(result: ContestResult, path: Path) -> None:
    """Share of structures solved against the ratio to the fewest calls, by Dolan and Moré; a PNG file."""
    figure = Figure(figsize=(7.5, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    profiles = performance_profile(result.scores)
    finite = [ratios[-1] for ratios, _ in profiles.values() if len(ratios)]
    right = float(np.clip(max(finite, default=2.0), 2.0, WIDEST_RATIO))
    for place, name in enumerate(result.by_calls()):
        ratios, shares = _stair(*profiles[name], right)
        axes.step(ratios, shares, where="post", label=name, **_style(name, place))
    axes.set_xscale("log", base=2)
    axes.set_xlim(1, right)
    axes.set_ylim(0, 1.02)
    ticks = [tick for tick in (1, 1.5, 2, 3, 4, 6, 8, 12, 16) if tick <= right]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    axes.minorticks_off()
    axes.set_xlabel("force calls, relative to the fewest of all on that structure (τ)")
    axes.set_ylabel("share of structures solved within τ")
    title = result.circumstances.title
    told = result.circumstances
    axes.set_title(f"{title}\n{result.n_structures} structures, fmax {told.fmax:g} eV/Å", fontsize=10)
    axes.grid(alpha=0.25)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    figure.savefig(path, format="png")


def _style(name: str, place: int) -> dict[str, Any]:
    """Ours in warm colours, thick and on top, the classical optimizer dashed: both can be seen where they coincide."""
    if name in OUR_COLOURS:
        dash = "--" if name == CORE else "-"
        return {"color": OUR_COLOURS[name], "linestyle": dash, "linewidth": 2.4, "zorder": 4 + (name == CORE)}
    cool = COOL_COLOURS[place % len(COOL_COLOURS)]
    dash = DASHES[place % len(DASHES)]
    return {"color": cool, "linestyle": dash, "linewidth": 1.3}


def _stair(ratios: np.ndarray, shares: np.ndarray, right: float) -> tuple[np.ndarray, np.ndarray]:
    """From the left edge, where nobody is solved yet, to the right one."""
    seen = ratios <= right
    ratios = ratios[seen]
    shares = shares[seen]
    end = shares[-1] if len(shares) else 0.0
    return np.concatenate([[1.0], ratios, [right]]), np.concatenate([[0.0], shares, [end]])
