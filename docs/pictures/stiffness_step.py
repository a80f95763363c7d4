"""Pictures for docs/how-it-works.md: a step along the force and a step by the stiffness; stiffness of a shaken crystal.

python docs/pictures/stiffness_step.py        # -> docs/pictures/stiffness-step.png, docs/pictures/stiffness-crystal.png
"""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from ase import Atoms
from ase.build import bulk
from matplotlib.collections import LineCollection
from PIL import Image

from relaxion import Relaxer, State, Structures, potential
from relaxion.model.policy_file import policy_of
from relaxion.policies import find_policy

HERE = Path(__file__).parent
ORANGE, TEAL = "#d9480f", "#0b7285"
STIFF, SOFT, REST = 20.0, 1.5, 1.0  # eV/Å² and Å of four springs around one atom
ANCHORS = np.array([[-1.05, 0.0], [1.05, 0.0], [0.0, -1.05], [0.0, 1.05]])  # pulled a little, so nothing is flat
STIFFNESSES = np.array([STIFF, STIFF, SOFT, SOFT])
START, TOLERANCE, MISJUDGED = np.array([0.16, 0.45]), 0.02, 1.3


def energy(points: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(points[..., None, :] - ANCHORS, axis=-1)
    return (0.5 * STIFFNESSES * (lengths - REST) ** 2).sum(axis=-1)


def force(point: np.ndarray) -> np.ndarray:
    away = point - ANCHORS
    lengths = np.linalg.norm(away, axis=1)
    return -(STIFFNESSES * (lengths - REST) / lengths) @ away


def stiffness(point: np.ndarray) -> np.ndarray:
    """Springs along their directions, every one thought 30 % stiffer than it is, and a small floor."""
    away = point - ANCHORS
    units = away / np.linalg.norm(away, axis=1)[:, None]
    return np.einsum("s,si,sj->ij", MISJUDGED * STIFFNESSES, units, units) + 0.1 * np.eye(2)


def way(step) -> np.ndarray:
    """Points until the force is small."""
    points = [START]
    while np.linalg.norm(force(points[-1])) > TOLERANCE and len(points) < 400:
        points.append(points[-1] + step(points[-1]))
    return np.array(points)


def _save(figure, name: str) -> None:
    """In 128 colours: a third of the size, and nobody sees it."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=100)
    Image.open(drawn).convert("RGB").quantize(128).save(HERE / name, optimize=True)


def springs_picture() -> None:
    along_force = way(lambda point: force(point) / (1.1 * STIFF))  # as long as the stiff springs allow
    by_stiffness = way(lambda point: np.linalg.solve(stiffness(point), force(point)))
    figure, panels = plt.subplots(1, 2, figsize=(7.6, 4.4), sharey=True, constrained_layout=True)
    x, y = np.meshgrid(np.linspace(-0.32, 0.32, 120), np.linspace(-0.25, 0.58, 140))
    heights = energy(np.stack([x, y], axis=-1))
    for panel, points, colour, words in (
        (panels[0], along_force, TEAL, "along the force"),
        (panels[1], by_stiffness, ORANGE, "by the stiffness, B⁻¹F"),
    ):
        panel.contour(
            x,
            y,
            heights,
            levels=np.geomspace(heights.min() * 1.02, heights.max(), 14),
            colors="#c5ccd3",
            linewidths=0.9,
        )
        panel.plot(*points.T, "-o", color=colour, markersize=4, linewidth=1.4)
        panel.plot(*START, "o", color="black", markersize=6)
        panel.annotate("start", START, (8, 4), textcoords="offset points")
        panel.plot(*by_stiffness[-1], "*", color="black", markersize=12)
        panel.set_title(f"{words}: {len(points)} force calls")
        panel.set_xlabel("stiff direction, Å")
        panel.set_aspect("equal")
    panels[0].set_ylabel("soft direction, Å")
    _save(figure, "stiffness-step.png")


def crystal() -> Atoms:
    """Copper with some gold, shaken: a cell wide enough to look at one of its layers."""
    atoms = bulk("Cu", "fcc", a=3.72, cubic=True) * (3, 3, 1)
    atoms.symbols[np.random.default_rng(4).choice(len(atoms), 10, replace=False)] = "Au"
    atoms.rattle(0.18, seed=5)
    return atoms


def state_of(atoms: Atoms) -> State:
    structures = Structures.from_ase([atoms])
    return State.without_past(structures, potential("emt")(structures), 0.6)


def relaxed(atoms: Atoms) -> Atoms:
    end = atoms.copy()
    end.calc = potential("emt").as_calculator()
    Relaxer(end, logfile=None).run(fmax=1e-3)
    return end


def crystal_picture() -> None:
    atoms = crystal()
    state, policy = state_of(atoms), policy_of(find_policy("metals"))
    with torch.no_grad():
        stiffness = policy.network(state)
        move = policy.move(state).displacements.double().numpy()
    wanted = relaxed(atoms).positions - atoms.positions
    forces = state.evaluation.forces.numpy()
    layer = np.flatnonzero(np.abs(atoms.positions[:, 2]) < 0.9)
    figure, panels = plt.subplots(1, 2, figsize=(9.2, 4.6), sharey=True, constrained_layout=True)
    for panel, arrows, scale, words in (
        (panels[0], forces, 0.2, "forces, and how stiff each pair is"),
        (panels[1], move, 3.0, "the policy's first move, and the true way"),
    ):
        lines = _springs(panel, stiffness, atoms, layer)
        _atoms(panel, atoms, layer)
        if panel is panels[1]:
            _arrows(panel, atoms, layer, wanted, 3.0, "black", "to the minimum")
        _arrows(
            panel,
            atoms,
            layer,
            arrows,
            scale,
            ORANGE if panel is panels[1] else TEAL,
            "move" if panel is panels[1] else "force",
        )
        panel.set_title(words)
        panel.set_aspect("equal")
        panel.set_xticks([])
        panel.set_yticks([])
        panel.legend(loc="upper center", bbox_to_anchor=(0.5, 0), ncols=4, frameon=False, fontsize=9)
        panel.set_xlim(-2.2, 11.2)
        panel.set_ylim(-2.2, 11.2)
    figure.colorbar(lines, ax=panels, label="k∥ of the pair, eV/Å²", shrink=0.8)
    _save(figure, "stiffness-crystal.png")
    error = np.linalg.norm(move - wanted) / np.linalg.norm(wanted)
    print(f"the first move misses the way to the minimum by {100 * error:.0f} % of its length")


def _springs(panel, stiffness, atoms: Atoms, layer: np.ndarray) -> LineCollection:
    begins = atoms.positions[stiffness.centers[::2].numpy()]
    ends = begins + stiffness.vectors[::2].double().numpy()
    shown = np.isin(stiffness.centers[::2].numpy(), layer) & (np.abs(ends[:, 2]) < 0.9)
    shown &= np.linalg.norm(ends - begins, axis=1) < 3.3  # nearest neighbours
    segments = np.stack([begins[shown, :2], ends[shown, :2]], axis=1)
    values = stiffness.along.double().numpy()[shown]
    lines = LineCollection(segments, cmap="viridis", linewidths=1 + 4 * values / values.max(), alpha=0.75)
    lines.set_array(values)
    return panel.add_collection(lines)


def _atoms(panel, atoms: Atoms, layer: np.ndarray) -> None:
    for symbol, colour in (("Cu", "#c88033"), ("Au", "#ffd123")):
        chosen = [index for index in layer if atoms.symbols[index] == symbol]
        panel.scatter(*atoms.positions[chosen, :2].T, s=150, color=colour, edgecolors="#444444", zorder=3, label=symbol)


def _arrows(panel, atoms, layer, vectors, scale, colour, words) -> None:
    places, arrows = atoms.positions[layer, :2], scale * vectors[layer, :2]
    width = 0.011 if colour == "black" else 0.006
    panel.quiver(
        *places.T, *arrows.T, color=colour, angles="xy", scale_units="xy", scale=1, width=width, zorder=4, label=words
    )


if __name__ == "__main__":
    springs_picture()
    crystal_picture()
