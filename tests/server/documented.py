"""What the pages of docs/ must name, and whether they do."""

from __future__ import annotations

import re
from pathlib import Path

import httpx

from stemma.config.settings import Settings
from stemma.server.app import create_app
from stemma.server.schemas.base import RequestModel
from tests.server.scripted_engine import ScriptedEngine

_DOCS = Path(__file__).resolve().parents[2] / "docs"
_FIELDS = (_DOCS / "compatibility.md").read_text()
_METRICS = (_DOCS / "metrics.md").read_text()


async def undocumented_metrics(engine: ScriptedEngine, settings: Settings, names: str) -> set[str]:
    """Return what `/metrics` shows, with another server's `names` beside ours, and the page doesn't name."""
    server = settings.server.model_copy(update={"metric_aliases": (names,)})
    app = create_app(engine, settings.model_copy(update={"server": server}))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.post("/generate", json={"inputs": "ab"})).status_code == 200
        text = (await client.get("/metrics")).text
    shown = {
        line.split()[2].removesuffix("_total") for line in text.splitlines() if line.startswith("# TYPE")
    }
    shown = {name for name in shown if not name.endswith("_created")}
    assert len(shown) > 40
    return {name for name in shown if f"`{name}`" not in _METRICS}


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
