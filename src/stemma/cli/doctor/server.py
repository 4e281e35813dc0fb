"""What a running server says of itself: `stemma doctor http://...`, for one of any make."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from typing import Any

import httpx

from stemma.http import http_client
from stemma.terminal_text import visible_json, visible_lines

_TIMEOUT_S = 10.0
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RunningServer:
    """Answers of one server."""

    url: str
    health: str
    """What it says of its state."""
    models: tuple[str, ...]
    answer_ms: float | None
    """Time of one small question; None: it doesn't answer."""
    problems: tuple[str, ...]

    def rows(self) -> list[tuple[str, str]]:
        """Return what is known, by name."""
        took = "no answer" if self.answer_ms is None else f"answers in {self.answer_ms:.0f} ms"
        return [
            ("server", f"{self.url}, {took}"),
            ("health", self.health),
            ("models", ", ".join(self.models) or "none seen"),
        ]


def examine_server(url: str) -> RunningServer:
    """Ask the server at `url` for its health and its models, with the key that STEMMA_API_KEY holds."""
    url = url.rstrip("/").removesuffix("/v1")
    key = os.environ.get("STEMMA_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with http_client(base_url=url, headers=headers, timeout=_TIMEOUT_S) as client:
            began = time.perf_counter()
            health, told = _asked(client, "/health")
            answer_ms = 1000 * (time.perf_counter() - began)
            models, listed = _asked(client, "/v1/models")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = visible_lines(f"{type(error).__name__}: {error}")
        problem = f"{url} can't be reached: {why}; is it running, and is the port right?"
        return RunningServer(url, "unknown", (), None, (problem,))
    state = str(told.get("status") or f"HTTP {health.status_code}")
    reason = f": {told['reason']}" if "reason" in told else ""
    problems = [] if health.is_success else [f"it takes no requests: {state}{reason}"]
    names, wrong = _models(models, listed.get("data"))
    return RunningServer(url, state + reason, names, answer_ms, (*problems, *wrong))


def _asked(client: httpx.Client, path: str) -> tuple[httpx.Response, dict[str, Any]]:
    """Return the answer and its JSON object; what is longer than a status needs counts as none."""
    content = b""
    with client.stream("GET", path) as answer:
        for chunk in answer.iter_bytes():
            content += chunk
            if len(content) > _MOST_BYTES:
                return answer, {}
    try:
        return answer, dict(visible_json(json.loads(content)))
    except (ValueError, TypeError, RecursionError):
        return answer, {}


def _models(answer: httpx.Response, listed: Any) -> tuple[tuple[str, ...], list[str]]:
    """Return the models' names with their states or lengths, and what is wrong."""
    if answer.status_code in (401, 403):
        return (), ["it asks for a key: set STEMMA_API_KEY"]
    if not answer.is_success or not isinstance(listed, list):
        return (), [
            f"/v1/models answers with status {answer.status_code}: is this an OpenAI-compatible server?"
        ]
    cards = [card for card in listed if isinstance(card, dict)]
    return tuple(_card(card) for card in cards), []


def _card(card: dict[str, Any]) -> str:
    known = [str(card["state"])] if "state" in card else []
    known += [f"{card['max_model_len']} tokens"] if "max_model_len" in card else []
    return f"{card.get('id')} ({', '.join(known)})" if known else str(card.get("id"))
