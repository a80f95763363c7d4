"""Do all links lead somewhere? Those of every Markdown file as GitHub shows it, and those of the built site.

python tools/check_links.py [build/site]

Checked are files, anchors, and paths of the repository that stand in backticks; on the site also that nothing is loaded
from elsewhere. Addresses on other hosts are not asked: a check that needs the network fails for others' reasons.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from documentation.prose import INLINE_CODE, anchors, links, parts

ROOT = Path(__file__).resolve().parents[1]
GENERATED = "docs/reference/"
NAMED_PATH = re.compile(r"^(?:src|tests|benchmarks|docs|examples|tools)/[\w./*-]+$")
LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}
ELSEWHERE_IN_STYLE = re.compile(r"(?:url\(|@import )[\"']?(?:https?:)?//")


def markdown_files(root: Path) -> list[str]:
    """Those that git knows or would take."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    names = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    return sorted(name for name in set(names) if (root / name).exists())


def wrong_in_markdown(root: Path, name: str) -> list[str]:
    """Sentences about links and named paths of one file."""
    text = (root / name).read_text()
    wrong = []
    for path, anchor in links(text):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(path))) if path else name
        if target.startswith("..") or not (root / target).exists():
            wrong.append(f"{name}: the link '{path}' leads to {target}, which is not there")
        elif target.startswith(GENERATED):
            continue  # made with the site, where its anchors are checked
        elif anchor and target.endswith(".md") and anchor not in anchors((root / target).read_text()):
            wrong.append(f"{name}: {target} has no heading for '#{anchor}'")
    return wrong + [f"{name}: the path `{path}` is not there" for path in _named_paths(text) if not _exists(root, path)]


def _named_paths(text: str) -> list[str]:
    prose = "".join(piece for is_prose, piece in parts(text) if is_prose)
    words = (found[0].strip("`").partition("::")[0] for found in INLINE_CODE.finditer(prose))
    return [word for word in words if NAMED_PATH.match(word)]


def _exists(root: Path, path: str) -> bool:
    return any(root.glob(path.rstrip("/")))


class _Page(HTMLParser):
    """What a page links to, what it loads, which anchors it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if value is None:
                continue
            if key in ("id", "name"):
                self.anchors.add(value)
            elif tag == "a" and key == "href":
                self.links.append(value)
            elif (tag, key) in LOADED and dict(attrs).get("rel") not in ("canonical", "next", "prev"):
                self.loaded.append(value)


def wrong_on_site(site: Path) -> list[str]:
    """Sentences about the built pages."""
    pages = {path: _Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    wrong = []
    for path, page in pages.items():
        name = path.relative_to(site).as_posix()
        if name == "404.html":
            continue  # its links begin at the root of a server
        for address in page.loaded:
            if urlsplit(address).netloc:
                wrong.append(f"{name}: loads {address} from elsewhere")
            elif not _target(path, address).exists():
                wrong.append(f"{name}: loads {address}, which is not there")
        wrong += [f"{name}: {sentence}" for link in page.links if (sentence := _wrong_link(path, link, pages))]
    for style in sorted(site.rglob("*.css")):
        if ELSEWHERE_IN_STYLE.search(style.read_text()):
            wrong.append(f"{style.relative_to(site)}: loads something from elsewhere")
    return wrong


def _target(page: Path, address: str) -> Path:
    path = unquote(urlsplit(address).path)
    return (page.parent / path).resolve() if path else page


def _wrong_link(page: Path, link: str, pages: dict[Path, _Page]) -> str | None:
    parts_of_link = urlsplit(link)
    if parts_of_link.scheme or parts_of_link.netloc:
        return None
    target, anchor = _target(page, link), unquote(parts_of_link.fragment)
    if target.is_dir():
        target = target / "index.html"
    if not target.exists():
        return f"the link {link} leads nowhere"
    if anchor and target in pages and anchor not in pages[target].anchors:
        return f"{link}: that page has no such anchor"
    return None


def main() -> int:
    names = markdown_files(ROOT)
    wrong = [sentence for name in names for sentence in wrong_in_markdown(ROOT, name)]
    site = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else None
    if site is not None:
        wrong += wrong_on_site(site)
    for sentence in wrong:
        print(sentence)
    n_pages = len(list(site.rglob("*.html"))) if site else 0
    print(f"{len(names)} Markdown files and {n_pages} pages of the site: {len(wrong)} wrong links")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
