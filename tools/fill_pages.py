"""Write into the pages what they take from the code: python tools/fill_pages.py [--check]

With --check nothing is written; it names the pages that differ and ends with 1.
"""

from __future__ import annotations

import sys
from pathlib import Path

from documentation.pieces import REFERENCE, filled

ROOT = Path(__file__).resolve().parents[1]


def pages() -> list[Path]:
    """All but the reference, which is made with the site (tools/site_hooks.py)."""
    found = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return sorted(page for page in found if not page.relative_to(ROOT).as_posix().startswith(REFERENCE))


def main() -> int:
    old = {page: page.read_text() for page in pages()}
    changed = {page: new for page, text in old.items() if (new := filled(ROOT, text)) != text}
    for page, text in changed.items():
        if "--check" not in sys.argv:
            page.write_text(text)
        print(page.relative_to(ROOT))
    return 1 if changed and "--check" in sys.argv else 0


if __name__ == "__main__":
    raise SystemExit(main())
