"""The picture of the README: mean force calls of Relaxion, its classical optimizer and the best of ASE, set by set.

python docs/pictures/gain.py        # benchmarks/relaxation/results/*.json -> docs/pictures/gain.svg
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PICTURE = ROOT / "benchmarks" / "relaxation" / "results", Path(__file__).with_name("gain.svg")
SETS = {  # engines that people pay for first
    "universal-mp": "crystals, CHGNet",
    "universal-mp-cell": "the same, free cell",
    "universal-perovskites-cell": "perovskites, free cell",
    "universal-mp-sevennet": "crystals, SevenNet-0",
    "emt-bulk": "alloys, EMT",
    "emt-bulk-cell": "the same, free cell",
    "emt-slabs": "slabs, EMT",
    "emt-clusters": "clusters, EMT",
    "alfe": "Al–Fe packings, EAM",
}
WIDTH, LABELS, END, TOP, ROW, BAR = 680, 188, 16, 74, 50, 12
# in the system's colours, light or dark, and on a ground of its own: readable wherever it is put
STYLE = """
.ground { fill: #ffffff; stroke: #d0d7de }
text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #24292f }
.title { font-size: 15px; font-weight: 600 } .small { font-size: 11.5px } .faint { fill: #57606a }
.line { stroke: #d8dee4 } .policy { fill: #d9480f } .core { fill: #0b7285 } .ase { fill: #adb5bd }
.ours { font-weight: 700 }
@media (prefers-color-scheme: dark) {
.ground { fill: #161b22; stroke: #30363d } text { fill: #e6edf3 } .faint { fill: #9aa4ae } .line { stroke: #30363d }
.policy { fill: #ff7b3d } .core { fill: #3bc9db } .ase { fill: #6e7681 } }
"""


@dataclass(frozen=True)
class Row:
    """Mean force calls on one set."""

    words: str
    policy: float
    core: float
    best: float
    best_name: str


def rows(folder: Path = RESULTS) -> list[Row]:
    found = []
    for name, words in SETS.items():
        result = json.loads((folder / f"{name}.json").read_text())
        means = {key: values["mean_force_calls"] for key, values in result["optimizers"].items()}
        best = result["best_classical"]
        found.append(Row(words, means["relaxion"], means["core"], means[best], best))
    return found


def drawn(data: list[Row]) -> str:
    """As SVG."""
    height = TOP + ROW * len(data) + 30
    longest = max(row.best for row in data)
    scale = (WIDTH - LABELS - END - 150) / longest
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"',
        f' width="{WIDTH}" height="{height}">',
        "<title>Mean force calls: Relaxion, its classical optimizer, the best of ASE's optimizers</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        '<text class="title" x="20" y="28">Mean force calls to relax a structure (fewer is better)</text>',
        *_legend(),
    ]
    for call in range(0, int(longest) + 1, 10):
        x = LABELS + call * scale
        parts.append(f'<line class="line" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{height - 28}"/>')
        parts.append(f'<text class="small faint" x="{x:.1f}" y="{height - 11}" text-anchor="middle">{call}</text>')
    for place, row in enumerate(data):
        parts += _row(row, TOP + ROW * place, scale)
    return "\n".join([*parts, "</svg>", ""])


def _legend() -> list[str]:
    entries = (
        ("policy", "Relaxion", 20),
        ("core", "its classical optimizer alone", 116),
        ("ase", "best of ASE's optimizers", 358),
    )
    parts = []
    for kind, words, x in entries:
        parts.append(f'<rect class="{kind}" x="{x}" y="43" width="12" height="12" rx="2"/>')
        parts.append(f'<text x="{x + 18}" y="53.5">{words}</text>')
    return parts


def _row(row: Row, top: float, scale: float) -> list[str]:
    parts = [f'<text x="{LABELS - 12}" y="{top + 22}" text-anchor="end">{row.words}</text>']
    bars = (
        ("policy", row.policy, f'<tspan class="ours">{row.policy:.1f}</tspan>'),
        ("core", row.core, f"{row.core:.1f}"),
        ("ase", row.best, f"{row.best:.1f} {row.best_name}"),
    )
    for place, (kind, calls, words) in enumerate(bars):
        y, width = top + place * (BAR + 1), calls * scale
        parts.append(f'<rect class="{kind}" x="{LABELS}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2"/>')
        parts.append(f'<text class="small" x="{LABELS + width + 6:.1f}" y="{y + 10}">{words}</text>')
    return parts


if __name__ == "__main__":
    PICTURE.write_text(drawn(rows()))
