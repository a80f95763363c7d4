"""The navigation takes the pages that exist, and pages nobody has named yet come last, under a section of their own."""

from __future__ import annotations

from typing import Any

Entry = Any  # "page.md", {"Title": "page.md"} or {"Section": [entries]}, as mkdocs.yml has it
UNNAMED = "More"


def completed(nav: list[Entry], written: list[str], existing: list[str]) -> list[Entry]:
    """Without pages that are not there, with those written in docs/ that are in no section."""
    kept = [entry for entry in (_existing(entry, set(existing)) for entry in nav) if entry is not None]
    left = sorted(page for page in written if page not in set(pages(nav)))
    return [*kept, {UNNAMED: left}] if left else kept


def _existing(entry: Entry, existing: set[str]) -> Entry | None:
    if isinstance(entry, str):
        return entry if entry in existing else None
    ((title, inside),) = entry.items()
    if isinstance(inside, str):
        return entry if inside in existing else None
    kept = [one for one in (_existing(child, existing) for child in inside) if one is not None]
    return {title: kept} if kept else None


def pages(nav: list[Entry]) -> list[str]:
    """All that it names, in order."""
    named = []
    for entry in nav:
        inside = entry if isinstance(entry, str) else next(iter(entry.values()))
        named += [inside] if isinstance(inside, str) else pages(inside)
    return named
