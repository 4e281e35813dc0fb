"""What the pages of docs/ must name, and whether they do."""

from __future__ import annotations

import re
from pathlib import Path

from stemma.server.schemas.base import RequestModel

_FIELDS = (Path(__file__).resolve().parents[2] / "docs" / "project" / "compatibility.md").read_text()


def check_fields(title: str, models: tuple[type[RequestModel], ...]) -> None:
    """Each field of the models is in a table of the page's section, which says what becomes of it."""
    says = _rows(title)
    names = {name for model in models for name in model.known_names()}
    assert names - says.keys() == set()
    for model in models:
        for name in model.refused.keys() - {"echo"}:
            assert "refused" in says[name], name
        for name in model.harmless | model.hints:
            assert "accepted without effect" in says[name], name
        for name in model.hints:
            assert "counted" in says[name], name
        for name in model.model_fields.keys() - {"metadata", "include", "echo"}:
            if not name.endswith("_"):
                assert says[name].startswith(("works", "the served one")), name


def section(title: str) -> str:
    """Return a section of the page on fields."""
    parts = re.split(r"^## ", _FIELDS, flags=re.MULTILINE)
    return next(part for part in parts if part.startswith(title + "\n"))


def _rows(title: str) -> dict[str, str]:
    """Return what the section's tables say of each field."""
    found: dict[str, str] = {}
    for line in section(title).splitlines():
        if line.startswith("| `"):
            fields, says = line.strip("| ").split(" | ", 1)
            for field in re.findall(r"`([a-z0-9_.]+)`", fields):
                found.setdefault(field, says)
                found.setdefault(field.partition(".")[0], says)
    return found
