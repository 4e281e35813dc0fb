"""What every route's test asks and measures: clients that read nothing of the largest answers."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter
from starlette.types import Message
from transformers import AutoTokenizer

from stemma.budgets import Holding
from stemma.model.opened.abilities import Abilities, EmbeddingFormat
from stemma.model.text.tokenizer import Tokenizer
from stemma.server.door.answer_memory import AnswerSize
from stemma.server.door.ledger import Admission
from stemma.server.routes import TENANT, AudienceRoute
from tests.server.door.rig import Rig
from tests.server.scripted_engine import ScriptedEngine

VECTORS = Abilities(generates=False, embedding=EmbeddingFormat("last", 4096))
POOLED = ("/rerank", "/score", "/embeddings")
"""Ends of the paths whose answers are made of vectors."""
_RECEIVED_BYTES = 1 << 16
"""Of a body at a time, as sockets give it."""
_SLACK_BYTES = 200_000
"""Of an application and a scripted engine at work, whatever they answer."""


def path_of(path: str, **names: str) -> str:
    named = {"model": "scripted", "name:path": "scripted", **names}
    for name, value in named.items():
        path = path.replace(f"{{{name}}}", value)
    return path.replace("{", "").replace("}", "")


JSON = "application/json"


def uploaded(admission: Admission) -> int:
    """Return the bytes of files that the server holds."""
    return sum(one.held for one in admission.states() if one.name == "batch_bytes")


def tenant_routes(routers: Iterable[APIRouter]) -> set[tuple[str, str]]:
    """Return method and path of each route for tenants."""
    return {route for one in _routes(routers) if one.audience is TENANT for route in _named(one)}


def metered_routes(routers: Iterable[APIRouter]) -> set[tuple[str, str]]:
    """Return method and path of each route that counts as a tenant's request."""
    return {route for one in _routes(routers) if one.is_metered for route in _named(one)}


def _routes(routers: Iterable[APIRouter]) -> list[AudienceRoute]:
    return [one for router in routers for one in router.routes if isinstance(one, AudienceRoute)]


def _named(route: AudienceRoute) -> list[tuple[str, str]]:
    return [(method, route.path) for method in route.methods or ()]


async def made_conversation(rig: Rig) -> httpx.Response:
    """Make ada's conversation of one long item."""
    item = {"role": "user", "content": "hello world " * 5000}
    return await rig.ask("ada", {"items": [item]}, "/v1/conversations")


@dataclass
class Unread:
    """A client that sends a request and reads none of the answer until it leaves."""

    rig: Rig
    method: str
    path: str
    body: bytes = b""
    content_type: str = "application/json"
    status: int = 0
    has_written: asyncio.Event = field(default_factory=asyncio.Event)
    leaves: asyncio.Event = field(default_factory=asyncio.Event)
    _num_sent: int = 0

    async def receive(self) -> Message:
        if self._num_sent <= len(self.body):
            first, self._num_sent = self._num_sent, self._num_sent + _RECEIVED_BYTES
            has_more = self._num_sent <= len(self.body)
            return {"type": "http.request", "body": self.body[first : self._num_sent], "more_body": has_more}
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif not self.leaves.is_set():
            self.has_written.set()
            await self.leaves.wait()

    async def run(self) -> None:
        key = self.rig.keys["ada"]["authorization"].encode()
        headers = [
            (b"host", b"localhost"),
            (b"authorization", key),
            (b"content-type", self.content_type.encode()),
        ]
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": b"",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("localhost", 80),
            "root_path": "",
        }
        await self.rig.app(scope, self.receive, self.send)


async def walk(
    engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """`walk_rig`, with a body of JSON and a rig of its own."""
    if path.endswith(POOLED):
        engine.abilities = VECTORS
    await walk_rig(Rig(engine, tmp_path, ""), monkeypatch, path, json.dumps(body).encode())
    assert not engine.active


async def walk_rig(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, path: str, content: bytes, kind: str = JSON
) -> None:
    """Ask, and leave unread: at most a fifth more is held than told, and nothing once the client has left."""
    made = await made_conversation(rig)
    names = {"conversation_id": made.json()["id"]}
    admission: Admission = rig.app.state.admission
    await rig.ask("ada", {"prompt": "x", "max_tokens": 1, "logprobs": 1})  # what is made once
    sizes: list[AnswerSize] = []
    num_uploaded = uploaded(admission)
    hold = admission.hold

    def noted(size: AnswerSize, owner: str, holding: Holding) -> None:
        sizes.append(size)
        hold(size, owner, holding)

    monkeypatch.setattr(admission, "hold", noted)
    gc.collect()
    tracemalloc.start()
    one = Unread(rig, "POST", path_of(path, **names), content, kind)
    task = asyncio.create_task(one.run())
    try:
        waits = asyncio.create_task(one.has_written.wait())
        await asyncio.wait({task, waits}, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        assert one.has_written.is_set(), "it answers"
        _, peak = tracemalloc.get_traced_memory()
        assert admission.answers.held() == sum(size.beside_text for size in sizes)
        told = admission.bodies.held() + uploaded(admission) - num_uploaded
        told += sum(size.num_bytes for size in sizes)
        assert one.status == 200
        most = 1.2 * told + _SLACK_BYTES
        assert peak < most, f"{peak} bytes were held and {told} told"
    finally:
        tracemalloc.stop()
        one.leaves.set()
        await task
    assert {one.name: one.held for one in admission.states() if one.held and one.name != "batch_bytes"} == {}


LONG_TOKENS = ("y" * 3000, "\x01" * 600)
"""Plain text, and what JSON writes six times as long."""


async def walk_long_token(
    tokenizer_path: Path, folder: Path, patch: pytest.MonkeyPatch, path: str, token: str, body: dict[str, Any]
) -> None:
    """`walk`, where a token of the vocabulary is one of `LONG_TOKENS`, and the answer is made of it."""
    fast = AutoTokenizer.from_pretrained(str(tokenizer_path))
    fast.add_tokens(list(LONG_TOKENS))
    fast.save_pretrained(str(folder / "tokenizer"))
    engine = ScriptedEngine(Tokenizer(folder / "tokenizer"))
    engine.script.reply = token * 100 + "🌍"  # as wide as a text can be
    limit = {"max_tokens": 110, "max_output_tokens": 110, "parameters": {"max_new_tokens": 110}}
    await walk(engine, folder, patch, path, {**limit, **body, "max_tokens": 110})


async def check_meter(
    engine: ScriptedEngine, folder: Path, method: str, path: str, body: Any, **changes: object
) -> None:
    """The second request of a minute is refused, whatever became of the first."""
    rig = Rig(engine, folder, "requests_per_minute = 1", **changes)
    content = json.dumps(body).encode() if method == "POST" else b""
    headers = rig.keys["ada"] | {"content-type": "application/json"}
    statuses = [
        (await rig.client.request(method, path_of(path), content=content, headers=headers)).status_code
        for _ in range(2)
    ]
    assert (statuses[0] != 429, statuses[1]) == (True, 429), (method, path)


async def check_given_back(engine: ScriptedEngine, tmp_path: Path, path: str, **changes: object) -> None:
    """Ask for what GET gives and leave: nothing is held then."""
    rig = Rig(engine, tmp_path, "", **changes)
    made = await made_conversation(rig)
    names = {"conversation_id": made.json()["id"]}
    one = Unread(rig, "GET", path_of(path, **names))
    task = asyncio.create_task(one.run())
    await asyncio.wait_for(one.has_written.wait(), 60)
    admission: Admission = rig.app.state.admission
    assert (admission.answers.held() > 0) is path.endswith("/items") or "item" in path
    one.leaves.set()
    await task
    assert admission.answers.held() == 0
