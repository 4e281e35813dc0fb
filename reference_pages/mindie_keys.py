"""The page of MindIE's configuration: every key of its file, and what it does here."""

from __future__ import annotations

from reference_pages.markdown import prose, table
from stemma.config.readers import WORKS, KeyRow
from stemma_mindie.config.explain import key_rows

_HEAD = """# MindIE's config.json

Every key that the package `stemma-mindie` knows. Another key that looks like a typing error is
refused with the nearest known one; others are listed at the start and ignored.
[From MindIE](../how-to/from-mindie.md) says how to start.

"""


def page() -> str:
    """Return the page."""
    rows = ((f"`{row.name}`", f"`{row.default}`", row.limits, row.does, _about(row)) for row in key_rows())
    return _HEAD + table(("key", "default", "range", "here", "what"), rows)


def _about(row: KeyRow) -> str:
    about = f"becomes {row.detail}" if row.does == WORKS else row.detail
    about = about.replace("a check at the start", "checked at the start").replace(
        "becomes checked", "checked"
    )
    return prose(f"{about}. {row.description}" if row.description else about)
