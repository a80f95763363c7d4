"""The picture of the design page: the rooms of the package in layers, and the loop of one relaxation.

python docs/pictures/design.py        # -> docs/pictures/design.svg
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

PICTURE = Path(__file__).with_name("design.svg")
WIDTH, HEIGHT, EDGE, GAP = 720, 916, 20, 10
# in the system's colours, light or dark, and on a ground of its own: readable wherever it is put
STYLE = """
.ground { fill: #ffffff; stroke: #d0d7de }
text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #24292f; text-anchor: middle }
.title { font-size: 15px; font-weight: 600; text-anchor: start } .name { font-weight: 700 }
.small { font-size: 12px; fill: #57606a } .left { text-anchor: start }
.box { fill: #f6f8fa; stroke: #8c959f } .use { fill: #fff0e6; stroke: #d9480f }
.learn { fill: #e3f5f8; stroke: #0b7285 }
.arrow { stroke: #57606a; stroke-width: 1.6; fill: none; marker-end: url(#tip) } .tip { fill: #57606a }
.dashed { stroke-dasharray: 5 4 }
@media (prefers-color-scheme: dark) {
.ground { fill: #161b22; stroke: #30363d } text { fill: #e6edf3 } .small { fill: #9aa4ae }
.box { fill: #21262d; stroke: #6e7681 } .use { fill: #3a2216; stroke: #ff7b3d }
.learn { fill: #10303a; stroke: #3bc9db }
.arrow { stroke: #9aa4ae } .tip { fill: #9aa4ae } }
"""
TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path class="tip" d="M0 0 L8 4 L0 8 z"/></marker></defs>'
)
LEARN, USE, BOTH = "learn", "use", "box"
# from the top; in a row the left one may use the right one
ROOMS = [
    [("apps", "command line, pages, relax-many, compare, tuning", BOTH)],
    [("train", "agents, experience, tasks, supervised, runs, data, judge", LEARN)],
    [("search", "from minimum to minimum", USE), ("workers", "local processes or Ray", BOTH)],
    [("torchsim", "", USE), ("batch", "many structures", USE), ("relaxer", "one structure (ASE)", USE)],
    [("optimizer", "step, trust region, safeguard, models of the Hessian", USE)],
    [("policies", "shipped", USE), ("model", "networks, policy files", BOTH)],
    [("potentials", "energy, forces", BOTH), ("database", "relaxations on disk", BOTH)],
    [("structures", "Structures, Graph, State, Move", BOTH)],
    [(name, "", BOTH) for name in ("files", "settings", "paths", "errors")],
]


@dataclass(frozen=True)
class Box:
    """A name and a line below it, in a frame."""

    x: float
    y: float
    width: float
    height: float
    name: str
    words: str = ""
    kind: str = BOTH

    @property
    def middle(self) -> float:
        return self.x + self.width / 2

    def drawn(self) -> str:
        line = self.y + self.height / 2 + (-2 if self.words else 5)
        words = f'<text class="small" x="{self.middle}" y="{line + 16}">{escape(self.words)}</text>'
        return (
            f'<rect class="{self.kind}" x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}" rx="5"/>'
            f'<text class="name" x="{self.middle}" y="{line}">{escape(self.name)}</text>{words if self.words else ""}'
        )


def arrow(path: str, *, dashed: bool = False) -> str:
    return f'<path class="arrow{" dashed" if dashed else ""}" d="{path}"/>'


def words(x: float, y: float, text: str, kind: str = "small left") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(text)}</text>'


def rooms(top: float, height: float = 40, step: float = 53) -> list[str]:
    """Layers with an arrow down from each to the next."""
    parts = []
    for number, row in enumerate(ROOMS):
        y = top + number * step
        width = (WIDTH - 2 * EDGE - GAP * (len(row) - 1)) / len(row)
        for place, (name, line, kind) in enumerate(row):
            parts.append(Box(EDGE + place * (width + GAP), y, width, height, name, line, kind).drawn())
        if number + 1 < len(ROOMS):
            parts.append(arrow(f"M{WIDTH / 2} {y + height} V{y + step - 1}"))
    return parts


def loop(top: float) -> list[str]:
    """Relaxing in the middle, learning at the right."""
    height, step, width, x = 40, 66, 250, 110
    names = [
        ("generator, or your atoms", "a structure to start from", BOTH),
        ("potential", "one force call: energy, forces, stress", BOTH),
        ("state", "graph, forces, the last move", BOTH),
        ("policy", "how stiff the structure is, or a move", USE),
        ("stepper", "safeguard, trust region, minimum distance", USE),
    ]
    boxes = [Box(x, top + number * step, width + 20, height, *one) for number, one in enumerate(names)]
    right = 450
    learn = [
        Box(right, boxes[2].y, width, height, "environment", "executed move, reward, next state", LEARN),
        Box(right, boxes[3].y, width, height, "replay", "transitions, drawn at random", LEARN),
        Box(right, boxes[4].y, width, height, "agent", "update of critics and policy", LEARN),
    ]
    parts = [box.drawn() for box in [*boxes, *learn]]
    for upper, lower in [*pairwise(boxes), *pairwise(learn)]:
        parts.append(arrow(f"M{upper.middle} {upper.y + height} V{lower.y - 1}"))
    potential, state, policy, stepper = boxes[1:]
    back = f"M{stepper.x} {stepper.y + 20} H{x - 40} V{potential.y + 20} H{x - 1}"
    end = x + width + 20
    parts += [
        arrow(back),
        words(EDGE, potential.y - 26, "next place"),
        words(EDGE, potential.y - 10, "to look at"),
        arrow(f"M{end} {potential.y + 20} H{right - 1}"),
        words(right + 6, potential.y + 17, "forces below the tolerance: converged"),
        words(right + 6, potential.y + 33, "outcome and force calls are the result"),
        arrow(f"M{end} {state.y + 20} H{right - 1}"),
        arrow(f"M{right} {learn[2].y + 20} H{right - 32} V{policy.y + 20} H{end + 1}", dashed=True),
        words(right - 26, learn[2].y - 8, "weights"),
    ]
    return parts


def picture() -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img" aria-label="Rooms of the package in layers, and the loop of one relaxation">',
        f"<style>{STYLE}</style>{TIP}",
        f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>',
        words(EDGE, 30, "Packages: imports go downwards only", "title"),
        words(EDGE, 48, "in a row the left one may use the right one; orange relaxes, blue learns"),
        *rooms(62),
        words(EDGE, 562, "The loop: from a state to a step", "title"),
        words(EDGE, 580, "right: what training by an agent adds; there the minimum distance alone limits moves"),
        *loop(598),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture())
