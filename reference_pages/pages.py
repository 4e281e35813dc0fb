"""Which page is made by what."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from reference_pages import commands, metrics, mindie_keys, python_api, routes, settings
from reference_pages.copied import COPIED, copy_of

PAGES: dict[str, Callable[[], str]] = {
    "reference/settings.md": settings.page,
    "reference/cli.md": commands.page,
    "reference/http.md": routes.page,
    "reference/metrics.md": metrics.page,
    "reference/mindie-config.md": mindie_keys.page,
    "reference/python.md": python_api.page,
    **{place: partial(copy_of, source) for place, source in COPIED.items()},
}
"""By place below `docs/`."""


def write_pages(docs: Path) -> None:
    """Write every page below `docs`."""
    for place, make in PAGES.items():
        file = docs / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(make(), encoding="utf-8")
