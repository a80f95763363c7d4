"""What the live page shows now: its parts, and which of them have changed since somebody last asked."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Sequence
from typing import Any

from relaxion.web.report_film import LARGEST_BYTES as MOST_FILM_BYTES
from relaxion.web.report_page import FOOT, Page, Part
from relaxion.web.report_training import TRAINING_SCRIPTS, heading, training_page, training_parts
from relaxion.web.watch_run import WatchedRun

LIVE_SCRIPTS = (*TRAINING_SCRIPTS, "race_tab.js", "live.js")
LIVE_FOOT = ("This page is fed by relaxion watch on this machine; it changes nothing in the runs.", FOOT[1])


class LivePage(Page):
    """The training page, allowed to ask its own server and nobody else."""

    @property
    def needs_library(self) -> bool:
        return True  # a film or a race may come later

    def security_policy(self, scripts: Sequence[str]) -> str:
        return f"{super().security_policy(scripts)}; connect-src 'self'; base-uri 'none'; form-action 'none'"


class Board:
    """Refreshed by one thread, read by many."""

    def __init__(self, runs: Sequence[WatchedRun]) -> None:
        self.runs = runs
        self.epoch = secrets.token_hex(4)  # of this server: versions of another one mean nothing
        self.version = 0
        self._looking = threading.Lock()  # at the runs
        self._lock = threading.Lock()  # of what is told
        self._texts: dict[str, str] = {}  # by id, in their order
        self._changed: dict[str, int] = {}  # by id: the version with which it came as it is
        self._heading: dict[str, str] = {}
        self._heading_changed = 0

    def refresh(self, seconds: float = 2.0) -> bool:
        """Look at the runs; whether anything is new."""
        with self._looking:
            news = [run.poll(seconds / len(self.runs)) for run in self.runs]
            if not any(news) and self.version:
                return False
            texts = {part["id"]: _text(part) for part in training_parts(self.runs, MOST_FILM_BYTES)}
            words = heading(self.runs)
        with self._lock:
            return self._take(texts, words)

    def _take(self, texts: dict[str, str], words: dict[str, str]) -> bool:
        changed = [name for name, text in texts.items() if self._texts.get(name) != text]
        if not changed and list(texts) == list(self._texts) and words == self._heading:
            return False
        self.version += 1
        self._changed = {name: self._changed.get(name, 0) for name in texts} | dict.fromkeys(changed, self.version)
        if words != self._heading:
            self._heading, self._heading_changed = words, self.version
        self._texts = texts
        return True

    def news(self, since: int) -> str:
        """What has come after that version, as JSON."""
        with self._lock:
            newer = [text for name, text in self._texts.items() if self._changed[name] > since]
            words = json.dumps(self._heading, ensure_ascii=False) if self._heading_changed > since else "null"
            order = json.dumps(list(self._texts))
            return f'{{"version":{self.version},"heading":{words},"order":{order},"parts":[{",".join(newer)}]}}'

    def page(self, more: dict[str, Any]) -> str:
        """The whole page as it is now; `more` is what else the browser has to know."""
        with self._lock:
            parts: list[Part] = [json.loads(text) for text in self._texts.values()]
            words, live = self._heading, {"epoch": self.epoch, "version": self.version, **more}
        head = words["title"], words["eyebrow"], words["lead"]
        return LivePage(*head, parts, foot=LIVE_FOOT, scripts=LIVE_SCRIPTS, more={"live": live}).html

    def frozen(self) -> str:
        """The page as a file that needs no server."""
        with self._looking:
            return training_page(self.runs).html


def _text(part: Part) -> str:
    return json.dumps(part, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
