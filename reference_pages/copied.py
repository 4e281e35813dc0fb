"""Pages that stand beside the code and are shown on the site too."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = {
    "reference/changelog.md": "CHANGELOG.md",
    "reference/contributing.md": "CONTRIBUTING.md",
    "reference/security.md": "SECURITY.md",
}


def copy_of(source: str) -> str:
    """Return a page of the repository's root, its links as from `docs/reference/`."""
    text = (ROOT / source).read_text(encoding="utf-8")
    text = re.sub(r"\]\(docs/([^)]+)\)", r"](../\1)", text)
    return re.sub(r"\]\(([A-Z]+)\.md\)", lambda link: f"]({link[1].lower()}.md)", text)
