"""The server of the live page: loopback only, read-only, for this machine's own browser.

Whoever asks must have typed our address: the Host header is checked, so that no foreign name can be pointed at us.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from relaxion.apps.report.page import FOOT, Page, Part, as_json
from relaxion.apps.report.training import TRAINING_SCRIPTS
from relaxion.errors import SettingsError

LIVE_SCRIPTS = (*TRAINING_SCRIPTS, "live.js")
HEADING = "heading"
LIVE_FOOT = ("'relaxion watch' on this machine updates this page; it does not change the runs.", FOOT[1])


class Shown(Protocol):
    """What grows on disk while somebody looks at it: training runs, a folder of `relax-many`."""

    def poll(self, seconds: float) -> bool:
        """Read what is new, for about so long; whether anything was."""
        ...

    def heading(self) -> dict[str, Any]:
        """Title, the line above and the sentence below."""
        ...

    def parts(self) -> list[Part]:
        """With ids: those that change are sent."""
        ...

    def page(self) -> Page:
        """Complete in itself, as a file."""
        ...


class LivePage(Page):
    """The page of what is shown, allowed to ask its own server and nobody else."""

    @property
    def needs_library(self) -> bool:
        return True  # a film may come later

    def security_policy(self, scripts: Sequence[str]) -> str:
        return f"{super().security_policy(scripts)}; connect-src 'self'; base-uri 'none'; form-action 'none'"


class Board:
    """Refreshed by one thread, read by many."""

    def __init__(self, shown: Shown) -> None:
        self.shown = shown
        self.epoch = secrets.token_hex(4)  # of this server: versions of another one mean nothing
        self.version = 0
        self._looking = threading.Lock()  # at what is shown
        self._lock = threading.Lock()  # of what is told
        self._texts: dict[str, str] = {}  # by id, in their order, the heading first
        self._changed: dict[str, int] = {}  # by id: the version with which it came as it is

    def refresh(self, seconds: float = 2.0) -> bool:
        """Look at what is shown; whether anything is new."""
        with self._looking:
            if not self.shown.poll(seconds) and self.version:
                return False
            texts = {HEADING: json.dumps(self.shown.heading(), ensure_ascii=False)}
            texts |= {part["id"]: as_json(part) for part in self.shown.parts()}
        with self._lock:
            if list(texts.items()) == list(self._texts.items()):
                return False
            self.version += 1
            changed = {name: self.version for name, text in texts.items() if self._texts.get(name) != text}
            self._changed = {name: changed.get(name) or self._changed[name] for name in texts}
            self._texts = texts
            return True

    def news(self, since: int) -> str:
        """What has come after that version, as JSON."""
        with self._lock:
            newer = {name: text for name, text in self._texts.items() if self._changed[name] > since}
            words = newer.pop(HEADING, "null")
            order = json.dumps(list(self._texts)[1:])
            parts = ",".join(newer.values())
            return f'{{"version":{self.version},"heading":{words},"order":{order},"parts":[{parts}]}}'

    def page(self) -> str:
        """The whole page as it is now."""
        with self._lock:
            words, *parts = (json.loads(text) for text in self._texts.values())
            live = {"epoch": self.epoch, "version": self.version}
        return LivePage(**words, parts=parts, foot=LIVE_FOOT, scripts=LIVE_SCRIPTS, more={"live": live}).html

    def frozen(self) -> str:
        """The page as a file that needs no server."""
        with self._looking:
            return self.shown.page().html


HOST = "127.0.0.1"
NAMES = ("127.0.0.1", "localhost")
PORTS_TRIED = 20
SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_OF_SILENCE = 15.0  # then a line without news, so that a dead connection is noticed
MOST_LISTENERS = 64
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "content-security-policy": "frame-ancestors 'none'",
}


class OwnPageOnly:
    """Turns away foreign Host headers and everything that would change something."""

    def __init__(self, app: ASGIApp, port: int) -> None:
        self.app = app
        self.hosts = {f"{name}:{port}" for name in NAMES} | (set(NAMES) if port == 80 else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await (self._refusal(scope) or self.app)(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope) -> Response | None:
        given = Headers(scope=scope)
        hosts = [value.lower() for value in given.getlist("host")]
        if len(hosts) != 1 or hosts[0] not in self.hosts:
            names = " and ".join(sorted(self.hosts))
            return _sentence(421, f"this server answers to {names} only; open it by that name")
        return None if scope["method"] in ("GET", "HEAD") else _sentence(405, "this page is read-only")


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(HEADERS)
        await send(message)

    return send_with_headers


def _sentence(status: int, words: str) -> PlainTextResponse:
    return PlainTextResponse(words + "\n", status_code=status)


class Live:
    """The application: the board is looked after while it runs, listeners are told when it changes."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self._waiting: set[asyncio.Event] = set()  # one for each listener that has everything there is
        self._listeners = 0
        self._over = False

    def app(self, port: int) -> ASGIApp:
        routes = [Route("/", self.page), Route("/page.html", self.frozen), Route("/events", self.events)]
        return OwnPageOnly(Starlette(routes=routes, lifespan=self._lifespan), port)

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        looking = asyncio.create_task(self._look())
        try:
            yield
        finally:
            self.end()
            looking.cancel()
            with suppress(asyncio.CancelledError):
                await looking

    def end(self) -> None:
        """Let listeners go."""
        self._over = True
        self._wake()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
            if await asyncio.to_thread(self.board.refresh):
                self._wake()

    def _wake(self) -> None:
        for event in self._waiting:
            event.set()

    async def page(self, _request: Request) -> Response:
        return HTMLResponse(await asyncio.to_thread(self.board.page))

    async def frozen(self, _request: Request) -> Response:
        """The page as a file: no server needed any more."""
        html = await asyncio.to_thread(self.board.frozen)
        return HTMLResponse(html, headers={"content-disposition": 'attachment; filename="relaxion.html"'})

    async def events(self, request: Request) -> Response:
        if self._listeners >= MOST_LISTENERS:
            return _sentence(503, f"{MOST_LISTENERS} pages are listening already; close one of them")
        known = request.headers.get("last-event-id") or request.query_params.get("known", "")
        epoch, _, version = known.partition("-")
        ours = epoch == self.board.epoch and version.isdigit() and len(version) < 16
        return StreamingResponse(self._stream(int(version) if ours else 0), media_type="text/event-stream")

    async def _stream(self, since: int) -> AsyncIterator[str]:
        self._listeners += 1
        try:
            yield "retry: 2000\n\n"
            while not self._over:
                if self.board.version > since:
                    text = await asyncio.to_thread(self.board.news, since)
                    since = int(json.loads(text)["version"])
                    yield f"id: {self.board.epoch}-{since}\nevent: parts\ndata: {text}\n\n"
                elif not await self._wait(since):
                    yield ": nothing new\n\n"
        finally:
            self._listeners -= 1

    async def _wait(self, since: int) -> bool:
        """For news; False after a long silence.

        Not an asyncio.Condition: a listener that goes away while it is woken leaves its lock behind, and then nobody
        hears anything any more (Python 3.11).
        """
        news = asyncio.Event()
        self._waiting.add(news)
        try:
            if self._over or self.board.version > since:
                return True
            return await asyncio.wait_for(news.wait(), SECONDS_OF_SILENCE)
        except TimeoutError:
            return False
        finally:
            self._waiting.discard(news)


def free_socket(port: int) -> socket.socket:
    """Bound to the loopback address at this port, or at the next one that is free; 0: at any."""
    last: OSError | None = None
    for candidate in [port] if port == 0 else range(port, min(port + PORTS_TRIED, 65536)):
        try:
            return socket.create_server((HOST, candidate), backlog=64)
        except OSError as error:
            last = error
    raise SettingsError(f"no port from {port} to {port + PORTS_TRIED - 1} is free ({last}); name another port")


def server(board: Board, bound: socket.socket) -> uvicorn.Server:
    """Ready to run; what it serves is up to date once."""
    board.refresh(seconds=5.0)
    app = Live(board).app(bound.getsockname()[1])
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, ws="none", lifespan="on", server_header=False, proxy_headers=False,
        limit_concurrency=64, timeout_keep_alive=5, timeout_graceful_shutdown=2,
    )  # fmt: skip
    return uvicorn.Server(config)
