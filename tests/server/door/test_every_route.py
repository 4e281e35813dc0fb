"""Every route that tenants have, taken from the application: with a meter, unread, at its largest.

A route that is new fails here until somebody says what the largest answer is that it can be asked for.
"""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message
from transformers import AutoTokenizer

from stemma.budgets import Holding
from stemma.model.opened.abilities import Abilities, EmbeddingFormat
from stemma.model.text.tokenizer import Tokenizer
from stemma.server.app import ROUTERS
from stemma.server.door.answer_memory import AnswerSize
from stemma.server.door.ledger import Admission
from stemma.server.routes import TENANT, AudienceRoute
from tests.server.door.rig import Rig
from tests.server.scripted_engine import ScriptedEngine

ROUTES = sorted(
    {
        (method, one.path)
        for router in ROUTERS
        for one in router.routes
        if isinstance(one, AudienceRoute) and one.audience is TENANT
        for method in one.methods or ()
    }
)
METERED = {
    (method, one.path)
    for router in ROUTERS
    for one in router.routes
    if isinstance(one, AudienceRoute) and one.is_metered
    for method in one.methods or ()
}
FREE = {
    "facts of the server": """GET /version
        GET /v1/models
        GET /v1/models/{name:path}
        GET /info
        GET /v1/config
        GET /v2
        GET /v2/models/{model}
        GET /v2/models/{model}/config
        GET /v1/engine-server/running-status""",
    "an end, which gives back": """DELETE /v1/responses/{response_id}
        DELETE /v1/conversations/{conversation_id}
        DELETE /v1/files/{file_id}
        POST /v1/batches/{batch_id}/cancel
        POST /v2/models/{model}/stopInfer""",
    "rows of one's own, bounded in number": """GET /v1/files
        GET /v1/files/{file_id}
        GET /v1/batches
        GET /v1/batches/{batch_id}""",
}
"""Routes that don't count as requests, and why."""

PROMPT, IDS = "hello world " * 100, [72, 101, 108] * 300
MESSAGES = [{"role": "user", "content": PROMPT}]
LINES = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": PROMPT}})
CHAT = {"model": "scripted", "messages": MESSAGES, "max_tokens": 50}
TGI = {"details": True, "decoder_input_details": True, "return_full_text": True, "max_new_tokens": 300}
STREAMED = {"details": True, "return_full_text": True, "max_new_tokens": 300}
TENSOR = {"name": "in", "shape": [1, 900], "datatype": "UINT32", "data": IDS}
RERANKED = {"query": "a", "documents": [f"{number}{PROMPT}" for number in range(60)]}
SCORED = {"text_1": "a", "text_2": [f"{number}{PROMPT}" for number in range(60)]}
VECTORS = Abilities(generates=False, embedding=EmbeddingFormat("last", 4096))
POOLED = ("/rerank", "/score", "/embeddings")
"""Ends of the paths whose answers are made of vectors."""
LARGEST: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": [IDS] * 4, "echo": True, "max_tokens": 0, "n": 64, "return_token_ids": True},
        {"prompt": [PROMPT] * 4, "echo": True, "max_tokens": 0, "n": 64},
        {"prompt": "\x01" * 2000, "echo": True, "max_tokens": 0, "n": 128},
        {"prompt": "é" * 1500 + "🌍", "echo": True, "max_tokens": 1, "n": 128},
        {"prompt": IDS, "max_tokens": 1, "n": 64, "prompt_logprobs": 20},
        {"prompt": IDS, "max_tokens": 1, "n": 16, "echo": True, "logprobs": 20},
        {"prompt": "x", "max_tokens": 40, "n": 16, "logprobs": 20, "return_token_ids": True},
        {"prompt": IDS, "max_tokens": 1, "n": 16, "echo": True, "logprobs": 20, "stream": True},
        {
            "prompt": [IDS] * 4,
            "echo": True,
            "n": 64,
            "stream": True,
            "return_token_ids": True,
            "max_tokens": 1,
        },
    ],
    "/v1/chat/completions": [
        {**CHAT, "n": 8, "logprobs": True, "top_logprobs": 20, "return_token_ids": True},
        {**CHAT, "prompt_logprobs": 20, "n": 8},
        {**CHAT, "n": 64, "return_token_ids": True, "stream": True, "max_tokens": 2},
    ],
    "/v1/messages": [{**CHAT, "max_tokens": 500}, {**CHAT, "stream": True}],
    "/v1/messages/count_tokens": [{"model": "scripted", "messages": MESSAGES}],
    "/v1/responses": [
        {"model": "scripted", "input": PROMPT, "max_output_tokens": 500},
        {"model": "scripted", "input": PROMPT, "max_output_tokens": 50, "stream": True},
    ],
    "/v1/responses/input_tokens": [{"model": "scripted", "input": PROMPT}],
    "/v1/conversations": [{"items": [{"role": "user", "content": PROMPT * 50}]}],
    "/v1/conversations/{conversation_id}": [{"metadata": {"a": "b" * 500}}],
    "/v1/conversations/{conversation_id}/items": [{"items": [{"role": "user", "content": PROMPT * 50}]}],
    "/v1/batches": [{"input_file_id": "none", "endpoint": "/v1/completions", "completion_window": "24h"}],
    "/generate": [
        {"inputs": PROMPT, "parameters": TGI},
        {"prompt": PROMPT, "n": 128, "max_tokens": 1},
        {"inputs": "x", "parameters": {"best_of": 16, "do_sample": True, "max_new_tokens": 40}},
    ],
    "/generate_stream": [{"inputs": PROMPT, "parameters": STREAMED}],
    "/": [{"inputs": PROMPT, "parameters": TGI}, {"inputs": PROMPT, "parameters": STREAMED, "stream": True}],
    "/infer": [{"input_id": IDS, "parameters": {"details": True, "max_new_tokens": 300}}],
    "/infer_token": [
        {"input_id": IDS, "stream": True, "parameters": {"details": True, "max_new_tokens": 300}}
    ],
    "/v2/models/{model}/infer": [
        {
            "inputs": [TENSOR],
            "outputs": [{"name": f"{number}"} for number in range(8)],
            "parameters": {"max_new_tokens": 500},
        }
    ],
    "/v2/models/{model}/generate": [{"text_input": PROMPT, "parameters": {"max_new_tokens": 500}}],
    "/v2/models/{model}/generate_stream": [{"text_input": PROMPT, "parameters": {"max_new_tokens": 300}}],
    "/tokenize": [
        {"inputs": PROMPT * 50},
        {"prompt": PROMPT * 50, "return_token_strs": True},
        {"messages": MESSAGES, "return_token_strs": True},
    ],
    "/detokenize": [{"tokens": IDS * 50}],
    "/v1/tokenizer": [{"inputs": PROMPT * 50}],
    **{path: [RERANKED] for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
    **{path: [SCORED] for path in ("/score", "/v1/score")},
    "/v1/embeddings": [
        {"model": "scripted", "input": [PROMPT] * 9},
        {"model": "scripted", "input": ["a"] * 50, "encoding_format": "base64"},
    ],
    "/v1/files": [{"lines": 3000}],
}
"""Bodies of POST by path: the most of each thing that an answer may repeat."""
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


def upload_of(num_lines: int) -> tuple[bytes, str]:
    """Return the body of an upload, and its type."""
    fields = b'--cut\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    fields += b'--cut\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    content = fields + (LINES.encode() + b"\n") * num_lines + b"\r\n--cut--\r\n"
    return content, "multipart/form-data; boundary=cut"


def uploaded(admission: Admission) -> int:
    """Return the bytes of files that the server holds."""
    return sum(one.held for one in admission.states() if one.name == "batch_bytes")


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


def test_each_route_is_known_here() -> None:
    free = {tuple(one.split()) for lines in FREE.values() for one in lines.splitlines()}
    assert free | METERED == set(ROUTES)
    assert free & METERED == set()
    assert {path for method, path in METERED if method == "POST"} == LARGEST.keys()


async def test_each_route_has_a_meter(engine: ScriptedEngine, tmp_path: Path) -> None:
    """The second request of a minute is refused, whatever became of the first."""
    for number, (method, path) in enumerate(sorted(METERED)):
        folder = tmp_path / str(number)
        folder.mkdir()
        rig = Rig(engine, folder, "requests_per_minute = 1", batch_directory=folder / "batches")
        content = json.dumps(LARGEST[path][0]).encode() if method == "POST" else b""
        headers = rig.keys["ada"] | {"content-type": "application/json"}
        statuses = [
            (await rig.client.request(method, path_of(path), content=content, headers=headers)).status_code
            for _ in range(2)
        ]
        assert (statuses[0] != 429, statuses[1]) == (True, 429), (method, path)


CASES = [
    pytest.param(path, body, id=f"{path}-{number}")
    for path, bodies in LARGEST.items()
    for number, body in enumerate(bodies)
]


@pytest.mark.parametrize(("path", "body"), CASES)
async def test_an_unread_answer_holds_what_the_ledger_says(
    engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    await walk(engine, tmp_path, monkeypatch, path, body)


async def walk(
    engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """Ask, and leave unread: at most a fifth more is held than told, and nothing once the client has left."""
    rig = Rig(engine, tmp_path, "", batch_directory=tmp_path / "batches")
    made = await rig.ask("ada", LARGEST["/v1/conversations"][0], "/v1/conversations")
    names = {"conversation_id": made.json()["id"]}
    if path.endswith(POOLED):
        engine.abilities = VECTORS
    if path == "/v1/batches":
        content, kind = upload_of(1)
        kept = await rig.client.post(
            "/v1/files", content=content, headers=rig.keys["ada"] | {"content-type": kind}
        )
        body = body | {"input_file_id": kept.json()["id"]}
    admission: Admission = rig.app.state.admission
    await rig.ask("ada", {"prompt": "x", "max_tokens": 1, "logprobs": 1})  # what is made once
    sizes: list[AnswerSize] = []
    num_uploaded = uploaded(admission)
    hold = admission.hold

    def noted(size: AnswerSize, owner: str, holding: Holding) -> None:
        sizes.append(size)
        hold(size, owner, holding)

    monkeypatch.setattr(admission, "hold", noted)
    content, kind = upload_of(body["lines"]) if "lines" in body else (json.dumps(body).encode(), JSON)
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
    assert not engine.active


LONG_TOKENS = ("y" * 3000, "\x01" * 600)
"""Plain text, and what JSON writes six times as long."""
TELLING_TEXT: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "n": 4},
    "/v1/chat/completions": {**CHAT, "n": 4},
    "/v1/messages": CHAT,
    "/v1/responses": {"model": "scripted", "input": "x"},
    "/generate": {"inputs": "x"},
    "/infer": {"inputs": "x"},
    "/v2/models/{model}/generate": {"text_input": "x"},
}


@pytest.mark.parametrize("token", LONG_TOKENS, ids=("long", "escaped"))
@pytest.mark.parametrize("path", TELLING_TEXT)
async def test_a_token_is_as_long_as_the_longest_of_the_vocabulary(
    tokenizer_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, token: str
) -> None:
    fast = AutoTokenizer.from_pretrained(str(tokenizer_path))
    fast.add_tokens(list(LONG_TOKENS))
    fast.save_pretrained(str(tmp_path / "tokenizer"))
    engine = ScriptedEngine(Tokenizer(tmp_path / "tokenizer"))
    engine.script.reply = token * 100 + "🌍"  # as wide as a text can be
    limit = {"max_tokens": 110, "max_output_tokens": 110, "parameters": {"max_new_tokens": 110}}
    await walk(engine, tmp_path, monkeypatch, path, {**limit, **TELLING_TEXT[path], "max_tokens": 110})


@pytest.mark.parametrize("path", sorted(path for method, path in ROUTES if method == "GET"))
async def test_what_is_read_is_given_back(engine: ScriptedEngine, tmp_path: Path, path: str) -> None:
    rig = Rig(engine, tmp_path, "", batch_directory=tmp_path / "batches")
    made = await rig.ask("ada", LARGEST["/v1/conversations"][0], "/v1/conversations")
    names = {"conversation_id": made.json()["id"]}
    one = Unread(rig, "GET", path_of(path, **names))
    task = asyncio.create_task(one.run())
    await asyncio.wait_for(one.has_written.wait(), 60)
    admission: Admission = rig.app.state.admission
    assert (admission.answers.held() > 0) is path.endswith("/items") or "item" in path
    one.leaves.set()
    await task
    assert admission.answers.held() == 0
