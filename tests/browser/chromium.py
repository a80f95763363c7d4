"""A headless Chromium driven over a pipe by the DevTools protocol; the standard library is enough for it."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import queue
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # as root there is no other way
    "--disable-dev-shm-usage",
    "--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader",  # WebGL without a graphics card
    "--no-first-run", "--disable-extensions", "--disable-component-update", "--disable-background-networking",
    "--disable-sync", "--disable-default-apps", "--force-color-profile=srgb", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip
PATIENCE_SECONDS = 60.0  # software rendering on a busy machine takes its time
KEYS = {"Tab": 9, "Enter": 13, " ": 32, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39, "+": 187}


def find() -> str | None:
    """Where Chromium is; RELAXION_CHROMIUM names another one."""
    return os.environ.get("RELAXION_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class BrowserError(RuntimeError):
    """The browser refused a command, or did not answer in time."""


class Chromium:
    """The process and the pipe to it."""

    def __init__(self, program: str, *flags: str) -> None:
        self._profile = tempfile.mkdtemp(prefix="relaxion-chromium-")
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        inherited = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (theirs_in, theirs_out)]
        log = os.open(Path(self._profile) / "log", os.O_WRONLY | os.O_CREAT)
        self._pid = os.posix_spawn(
            program,
            [program, *FLAGS, *flags, f"--user-data-dir={self._profile}", "about:blank"],
            {**os.environ, "HOME": self._profile},
            # the protocol wants its pipe at 3 and 4
            file_actions=[
                (os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2),
                (os.POSIX_SPAWN_DUP2, inherited[0], 3), (os.POSIX_SPAWN_DUP2, inherited[1], 4),
            ],
            setpgroup=0,
        )  # fmt: skip
        for end in (theirs_in, theirs_out, log, *inherited):
            os.close(end)
        self._lock = threading.Lock()
        self._last = 0
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._sheets: dict[str, Sheet] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrowserError, OSError):
            self.send("Browser.close")
        self._end()
        self._reader.join(timeout=5)
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self._profile, ignore_errors=True)

    def _end(self) -> None:
        """Wait for the process; end its whole group if it lingers."""
        limit = time.monotonic() + 5
        while time.monotonic() < limit:
            if os.waitpid(self._pid, os.WNOHANG)[0]:
                return
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """A command and its answer."""
        with self._lock:
            self._last += 1
            number = self._last
            self._answers[number] = queue.Queue()
            message = {"id": number, "method": method, "params": parameters}
            message |= {} if session is None else {"sessionId": session}
            os.write(self._to, json.dumps(message).encode() + b"\0")
        try:
            answer = self._answers[number].get(timeout=PATIENCE_SECONDS)
        except queue.Empty:
            log = (Path(self._profile) / "log").read_text(errors="replace")[-2000:]
            raise BrowserError(f"no answer to {method} within {PATIENCE_SECONDS:.0f} s; Chromium says: {log}") from None
        finally:
            del self._answers[number]
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']}")
        return answer["result"]

    def _read(self) -> None:
        rest = b""
        while True:
            try:
                piece = os.read(self._from, 1 << 20)
            except OSError:
                return
            if not piece:
                return
            *messages, rest = (rest + piece).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._answers[message["id"]].put(message)
                elif (sheet := self._sheets.get(message.get("sessionId", ""))) is not None:
                    sheet.events.append(message)

    def sheet(self, width: int = 1280, height: int = 800, *, dark: bool = False, still: bool = True) -> Sheet:
        """A new, empty sheet: of this size, light or dark, for a reader who wants things still or not."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        sheet = self._sheets[session] = Sheet(self, session, target)
        for domain in ("Page", "Runtime", "Network", "Log"):
            sheet.send(f"{domain}.enable")
        sheet.resize(width, height)
        sheet.prefer(dark=dark, still=still)
        return sheet


class Sheet:
    """One tab."""

    def __init__(self, browser: Chromium, session: str, target: str) -> None:
        self._browser, self._session, self._target = browser, session, target
        self.events: list[dict[str, Any]] = []

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.send(method, self._session, **parameters)

    def close(self) -> None:
        self._browser.send("Target.closeTarget", targetId=self._target)

    def resize(self, width: int, height: int) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def prefer(self, *, dark: bool, still: bool) -> None:
        features = {
            "prefers-color-scheme": "dark" if dark else "light",
            "prefers-reduced-motion": "reduce" if still else "no-preference",
        }
        self.send("Emulation.setEmulatedMedia", features=[{"name": k, "value": v} for k, v in features.items()])

    def open(self, path: Path) -> None:
        """From disk, and wait until the page says that it is built."""
        self.send("Page.bringToFront")  # a sheet behind another draws no frames, and plots wait for their size
        self.send("Page.navigate", url=path.absolute().as_uri())
        self.wait("document.readyState === 'complete' && document.documentElement.dataset.ready === 'true'")

    def evaluate(self, expression: str) -> Any:
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = PATIENCE_SECONDS) -> None:
        limit = time.monotonic() + seconds
        if not self.evaluate(condition):
            self.send("Page.bringToFront")
        while not self.evaluate(condition):
            if time.monotonic() > limit:
                raise BrowserError(f"not true within {seconds:g} s: {condition}; complaints: {self.complaints}")
            time.sleep(0.03)

    def press(self, key: str, *, shift: bool = False) -> None:
        """A key as a person presses it."""
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        common = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": KEYS[key]}
        common |= {"modifiers": 8 if shift else 0}
        self.send("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
        self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        for kind, (x, y) in (("mousePressed", start), ("mouseMoved", end), ("mouseReleased", end)):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    def screenshot(self, *, whole: bool = False, clip: dict[str, float] | None = None) -> bytes:
        options: dict[str, Any] = {"captureBeyondViewport": whole}
        if whole:
            size = self.send("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"]}
        options |= {} if clip is None else {"clip": {**clip, "scale": 1}}
        return base64.b64decode(self.send("Page.captureScreenshot", format="png", **options)["data"])

    def picture_of(self, selector: str) -> bytes:
        """A PNG of one element."""
        box = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView();"
            "const r = e.getBoundingClientRect(); return {x: r.x + scrollX, y: r.y + scrollY, width: r.width,"
            "height: r.height}; })()"
        )
        return self.screenshot(clip=box)

    @property
    def requests(self) -> list[str]:
        """Everything the page asked for, itself left out."""
        asked = [event["params"] for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [one["request"]["url"] for one in asked if one.get("type") != "Document"]

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings of the console, and exceptions nobody caught."""
        said = []
        for event in list(self.events):
            detail = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                said.append(str(detail["exceptionDetails"].get("exception", detail["exceptionDetails"])))
            elif event["method"] == "Runtime.consoleAPICalled" and detail["type"] in ("error", "warning", "assert"):
                said.append(" ".join(str(argument.get("value", argument)) for argument in detail["args"]))
            elif event["method"] == "Log.entryAdded" and detail["entry"]["level"] in ("error", "warning"):
                said.append(detail["entry"]["text"])
        return said
