"""Looking at pixels: a PNG as an array."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

COPPER, GOLD = (200, 128, 51), (255, 209, 35)


def pixels(png: bytes) -> np.ndarray:
    """(height, width, 3), 0 to 255."""
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"), dtype=int)


def near(picture: np.ndarray, hue: tuple[int, int, int], tolerance: float = 0.12) -> int:
    """How many pixels have this hue, however bright: shading does not change the share of red, green and blue."""
    total = picture.sum(axis=2)
    shares = picture / np.maximum(total, 1)[..., None]
    wanted = np.array(hue) / sum(hue)
    return int(((np.abs(shares - wanted).max(axis=2) < tolerance) & (total > 120)).sum())


def painted(picture: np.ndarray, colour: str) -> int:
    """How many pixels are just of this colour, `#rrggbb`."""
    wanted = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)])
    return int((np.abs(picture - wanted).sum(axis=2) < 12).sum())


def drawn(picture: np.ndarray) -> int:
    """How many pixels are not of the ground, which is what the upper left corner shows."""
    return int((np.abs(picture - picture[8, 8]).sum(axis=2) > 60).sum())


def changed(before: np.ndarray, after: np.ndarray) -> int:
    """How many pixels differ clearly."""
    return int((np.abs(before - after).sum(axis=2) > 60).sum())
