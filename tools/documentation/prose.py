"""Markdown as text: what is prose, what is code, which links there are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

FENCE = re.compile(r"^[ ]{0,3}(```+|~~~+)", re.MULTILINE)
INLINE_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"(?<=\]\()(?P<path>[^)\s#]*)(?P<anchor>#[^)\s]*)?(?=\))")
HEADING = re.compile(r"^#{1,6} +(?P<title>.+?) *#*$", re.MULTILINE)
FOREIGN = re.compile(r"^([a-z]+:|//)")


def parts(text: str) -> Iterator[tuple[bool, str]]:
    """Pieces of the text in order, and whether each is prose; fenced blocks are not."""
    fence, prose = None, True
    kept: list[str] = []
    for line in text.splitlines(keepends=True):
        found = FENCE.match(line)
        if found and fence is None:
            yield prose, "".join(kept)
            kept, fence, prose = [line], found[1], False
        elif found and line.strip().startswith(fence or "") and not line.strip().strip(fence[0]):
            yield False, "".join([*kept, line])
            kept, fence, prose = [], None, True
        else:
            kept.append(line)
    yield prose, "".join(kept)


def links(text: str) -> list[tuple[str, str]]:
    """(path, anchor without #) of every link that stays here; code is not looked at."""
    found = []
    for is_prose, piece in parts(text):
        if is_prose:
            for link in LINK.finditer(INLINE_CODE.sub("code", piece)):
                if not FOREIGN.match(link["path"]):
                    found.append((link["path"], (link["anchor"] or "#")[1:]))
    return found


def with_links(text: str, change: Callable[[str], str | None]) -> str:
    """Every path of a link changed; None leaves it."""

    def changed(link: re.Match[str]) -> str:
        new = None if not link["path"] or FOREIGN.match(link["path"]) else change(link["path"])
        return link[0] if new is None else new + (link["anchor"] or "")

    return "".join(LINK.sub(changed, piece) if is_prose else piece for is_prose, piece in parts(text))


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings, and as the site is told to; repeated ones are counted up."""
    seen: dict[str, int] = {}
    result = set(re.findall(r'<a (?:id|name)="([^"]+)"', text))
    for is_prose, piece in parts(text):
        for heading in HEADING.finditer(piece) if is_prose else ():
            slug = slug_of(heading["title"])
            result.add(slug if slug not in seen else f"{slug}-{seen[slug]}")
            seen[slug] = seen.get(slug, 0) + 1
    return result


def slug_of(title: str) -> str:
    words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title)  # a link in a heading shows its words only
    return re.sub(r" ", "-", re.sub(r"[^\w\- ]", "", words.strip().lower()))
