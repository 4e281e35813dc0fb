"""What tests of pages in a real browser share."""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page, ViewportSize

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None or importlib.util.find_spec("playwright") is None,
    reason="needs chromium (Debian: apt-get install chromium) and playwright",
)


def _axe() -> Path | None:
    found = importlib.util.find_spec("axe_playwright_python")
    return None if found is None or found.origin is None else Path(found.origin).parent / "axe.min.js"


AXE = _axe()
"""The script that looks for what keeps people out of a page; None: its package isn't there."""
PATIENCE_MS = 20_000
WIDE: ViewportSize = {"width": 1180, "height": 900}
PHONE: ViewportSize = {"width": 390, "height": 800}
_PROBLEMS: WeakKeyDictionary[Page, list[str]] = WeakKeyDictionary()


def problems_of(page: Page) -> list[str]:
    """Return the errors that a page wrote, and what its policy stopped."""
    return _PROBLEMS.setdefault(page, [])


def is_problem(kind: str, text: str) -> bool:
    """Whether a line of the console is one; this test's own reading of pixels is noted there too."""
    return kind in ("error", "warning") and not text.startswith("Canvas2D")


needs_axe = pytest.mark.skipif(AXE is None, reason="needs axe-playwright-python")


def axe_findings(page: Page) -> list[str]:
    """Return what keeps people out of the page as it stands: the rule, and the first node that breaks it."""
    assert AXE is not None
    page.evaluate(AXE.read_text())
    script = "axe.run().then((all) => all.violations.map((v) => `${v.id}: ${v.nodes[0].html}`))"
    found: list[str] = page.evaluate(script)
    return found


def until(page: Page, expression: str) -> None:
    """Wait until an expression is true there; `wait_for_function` needs eval, which the page forbids."""
    wait_for(lambda: bool(page.evaluate(expression)), lambda: page.wait_for_timeout(50))


def wait_for(is_so: Callable[[], bool], pause: Callable[[], object] = lambda: time.sleep(0.05)) -> None:
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while time.monotonic() < deadline:
        if is_so():
            return
        pause()
    raise AssertionError("it never came true")
