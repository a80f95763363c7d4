"""Numbers as a page of a run writes them."""

from __future__ import annotations

from typing import Any

THIN_SPACE = "\u202f"  # no line ends inside a number


def short(value: float) -> str:
    """Three digits that count, and a minus as wide as a plus."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        text = f"{value:.2e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    elif size >= 1000:
        text = count(value)
    else:
        text = f"{value:.3g}"
    return text.replace("-", "−")


def count(value: float) -> str:
    """`20 000` with a thin space."""
    return f"{value:,.0f}".replace(",", THIN_SPACE)


def duration(seconds: Any) -> str:
    """`38 s`, `12 min`, `3.4 h`."""
    if not isinstance(seconds, int | float) or seconds < 0:
        return "–"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
