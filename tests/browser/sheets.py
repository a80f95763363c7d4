"""A tab of the browser with what the tests ask of every page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
from pictures import pixels
from playwright.sync_api import Browser, ConsoleMessage, Locator, Request, expect

PATIENCE_MS = 600_000  # only what never comes fails: software rendering on a busy machine takes its time
CONTRAST = (Path(__file__).parent / "contrast.js").read_text()
# everything a keyboard can reach and that has no name
NAMELESS = """[...document.querySelectorAll('button, input, select, summary, [tabindex="0"]')].filter((e) => {
  const label = e.getAttribute('aria-label') || (e.labels && [...e.labels].map((l) => l.textContent).join('')) ||
    e.textContent;
  return !label.trim();
}).map((e) => e.outerHTML)"""

WIDE = """[...document.querySelectorAll('body *')].filter((e) => e.getBoundingClientRect().right > 391 &&
  !e.closest('.scroll')).map((e) => `${e.tagName}.${e.className} ${e.getBoundingClientRect().right}`)"""


class Sheet:
    """Playwright's page, what it asked for and what it complained about."""

    def __init__(self, browser: Browser, *, dark: bool = False, still: bool = True) -> None:
        self.page = browser.new_page(viewport={"width": 1280, "height": 800})
        self.page.set_default_timeout(PATIENCE_MS)
        self.requests: list[str] = []  # itself left out
        self.complaints: list[str] = []  # of the console, and exceptions nobody caught
        self.page.on("request", self._asked)
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.prefer(dark=dark, still=still)

    def _asked(self, request: Request) -> None:
        if not request.is_navigation_request():
            self.requests.append(request.url)

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning", "assert"):
            self.complaints.append(message.text)

    def prefer(self, *, dark: bool, still: bool = True) -> None:
        motion = "reduce" if still else "no-preference"
        self.page.emulate_media(color_scheme="dark" if dark else "light", reduced_motion=motion)

    def open(self, path: Path) -> Self:
        """From disk, until the page says that it is built."""
        self.page.goto(path.absolute().as_uri())
        expect(self.page.locator("html")).to_have_attribute("data-ready", "true")
        return self

    def find(self, selector: str, **options: Any) -> Locator:
        return self.page.locator(selector, **options)

    def evaluate(self, expression: str) -> Any:
        return self.page.evaluate(expression)

    def texts(self, selector: str) -> list[str]:
        return self.find(selector).all_text_contents()

    def press(self, selector: str, *keys: str) -> None:
        """Keys as a person presses them, with the focus there."""
        self.find(selector).focus()
        for key in keys:
            self.page.keyboard.press(key)

    def picture(self, selector: str) -> np.ndarray:
        return pixels(self.find(selector).screenshot())

    def until(self, condition: Callable[[], bool], otherwise: str = "''") -> None:
        """For what only a picture can tell; `otherwise` is an expression that says more."""
        for _ in range(PATIENCE_MS // 100):
            if condition():
                return
            self.page.screenshot()  # a page that nobody looks at may draw no frames, and plots wait for theirs
            self.page.wait_for_timeout(100)
        raise AssertionError(f"it never came true {self.evaluate(otherwise)}")

    def readable(self, least: int = 1) -> None:
        """Names for everything a keyboard reaches, enough contrast in light and dark, nothing wider than a phone."""
        assert self.evaluate(NAMELESS) == []
        for dark in (True, False):
            self.prefer(dark=dark)
            contrast = self.evaluate(CONTRAST)
            assert contrast["bad"] == []
            assert contrast["seen"] >= least
        self.phone()
        self.desktop()

    def phone(self) -> None:
        self.page.set_viewport_size({"width": 390, "height": 844})
        self.until(lambda: self.evaluate("document.documentElement.scrollWidth") <= 390, WIDE)

    def desktop(self) -> None:
        self.page.set_viewport_size({"width": 1280, "height": 800})


def go_to(sheet: Sheet, call: int) -> None:
    sheet.find("input[type=range]").evaluate(
        "(slider, call) => { slider.value = call; slider.dispatchEvent(new Event('input')); }", call
    )
