"""Tenants over HTTP: every plane isolates, limits and records, whatever the client says."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.types import Message

from stemma.config.server_settings import ServerSettings
from stemma.config.settings import EngineSettings, ModelSettings, Settings
from stemma.engine.api import CacheReport, GenerationRequest, RequestOutput
from stemma.engine.operator.cache_control import CacheControl
from stemma.engine.sampling.params import SamplingParams
from stemma.errors import ConfigError
from stemma.insight.ledger import sqlite_url, usage
from stemma.server.app import create_app
from stemma.server.door.keyfile import add_key
from stemma.server.observe.collected import Collected
from stemma.server.observe.usage_ledger import UsageLedger
from stemma.server.turn.build import Asked, Prompt
from stemma.types import Tier, as_tokens
from tests.server.scripted_engine import ScriptedEngine

CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "a b c"}], "max_tokens": 3}
COMPLETION = {"model": "scripted", "prompt": "a b c", "max_tokens": 3}
TGI = {"inputs": "a b c", "parameters": {"max_new_tokens": 3}}
PLANES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream": True}),
    ("/v1/completions", COMPLETION),
    ("/v1/completions", {**COMPLETION, "stream": True}),
    ("/v1/completions", {**COMPLETION, "temperature": 0, "cache_salt": "mine"}),
    ("/v1/responses", {"model": "scripted", "input": "a b c", "max_output_tokens": 3}),
    ("/v1/responses", {"model": "scripted", "input": "a b c", "max_output_tokens": 3, "stream": True}),
    ("/v1/messages", CHAT),
    ("/v1/messages", {**CHAT, "stream": True}),
    ("/generate", TGI),
    ("/generate", {"prompt": "a b c", "max_tokens": 3}),
    ("/generate_stream", TGI),
    ("/", TGI),
)
Make = Callable[..., httpx.AsyncClient]


class Keys:
    """A key file with two tenants; ada has two keys."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ada, self.ada_too, self.bob = add_key(path, "ada"), add_key(path, "ada"), add_key(path, "bob")

    def limit(self, **limits: object) -> None:
        """Limit bob, who comes last in the file."""
        lines = "".join(f"{name} = {value}\n" for name, value in limits.items())
        self.path.write_text(self.path.read_text() + lines)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys.toml")


@pytest.fixture
def make(engine: ScriptedEngine, keys: Keys) -> Make:
    def make_client(**server: object) -> httpx.AsyncClient:
        settings = Settings(
            engine=EngineSettings(model=ModelSettings(path=Path("scripted"))),
            server=ServerSettings.model_validate({"api_keys_file": keys.path, **server}),
        )
        transport = httpx.ASGITransport(app=create_app(engine, settings), raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://localhost")

    return make_client


def read_rows(file: Path) -> list[dict[str, Any]]:
    with closing(sqlite3.connect(file)) as database:
        database.row_factory = sqlite3.Row
        return [dict(row) for row in database.execute("select * from usage")]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(("path", "body"), PLANES)
async def test_tenants_share_nothing_and_keys_of_one_tenant_share(
    make: Make, keys: Keys, engine: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    client = make()
    for key in (keys.ada, keys.bob, keys.ada_too):
        response = await client.post(path, json=body, headers=bearer(key))
        assert response.status_code == 200, response.text
    ada, bob, ada_too = (request.namespace for request in engine.requests)
    assert ada == ada_too != bob
    assert (ada.owner, bob.owner) == ("ada", "bob")
    for guess in (ada.salt, "ada", "tenant:ada"):
        body = {**body, "cache_salt": guess}
        assert (await client.post(path, json=body, headers=bearer(keys.bob))).status_code == 200
        assert engine.requests[-1].namespace != ada


@pytest.mark.parametrize(("path", "body"), PLANES)
async def test_a_tenant_over_its_limit_is_told_when_to_come_back(
    make: Make, keys: Keys, engine: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    keys.limit(requests_per_minute=1)
    client = make()
    assert (await client.post(path, json=body, headers=bearer(keys.bob))).status_code == 200
    refused = await client.post(path, json=body, headers=bearer(keys.bob))
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert "limit is 1 requests a minute" in refused.text
    assert "error" in refused.json()
    assert (await client.post(path, json=body, headers=bearer(keys.ada))).status_code == 200
    assert len(engine.requests) == 2


async def test_a_stored_response_is_its_tenants(make: Make, keys: Keys) -> None:
    client = make()
    body = {"model": "scripted", "input": "a b c", "max_output_tokens": 3}
    made = (await client.post("/v1/responses", json=body, headers=bearer(keys.ada))).json()["id"]
    assert (await client.get(f"/v1/responses/{made}", headers=bearer(keys.ada_too))).status_code == 200
    assert (await client.get(f"/v1/responses/{made}", headers=bearer(keys.bob))).status_code == 404
    body["previous_response_id"] = made
    assert (await client.post("/v1/responses", json=body, headers=bearer(keys.bob))).status_code == 400
    assert (await client.post("/v1/responses", json=body, headers=bearer(keys.ada))).status_code == 200


async def test_requests_at_once_are_counted_out_however_they_end(
    make: Make, keys: Keys, engine: ScriptedEngine
) -> None:
    keys.limit(max_concurrent=1)
    client, headers = make(), bearer(keys.bob)
    engine.script.delay_s = 0.2
    running = asyncio.create_task(client.post("/v1/completions", json=COMPLETION, headers=headers))
    while not engine.requests:
        await asyncio.sleep(0.01)
    assert (await client.post("/generate", json=TGI, headers=headers)).status_code == 429
    assert (await running).status_code == 200
    engine.script.delay_s = 0.0
    engine.script.fail_after = 1
    assert (await client.post("/v1/completions", json=COMPLETION, headers=headers)).status_code == 500
    engine.script.fail_after = None
    engine.script.overloaded = True
    assert (await client.post("/v1/completions", json=COMPLETION, headers=headers)).status_code == 503
    engine.script.overloaded = False
    assert (await client.post("/v1/completions", json=COMPLETION, headers=headers)).status_code == 200
    many = {**COMPLETION, "prompt": ["a", "b"]}
    assert (await client.post("/v1/completions", json=many, headers=headers)).status_code == 400


async def test_tokens_a_minute_count_prompts_and_answers(make: Make, keys: Keys) -> None:
    keys.limit(tokens_per_minute=20)
    client, headers = make(), bearer(keys.bob)
    body = {**COMPLETION, "prompt": [1] * 10, "max_tokens": 9}
    assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200
    refused = await client.post("/v1/completions", json=body, headers=headers)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) in range(45, 56)  # 1 of 20 left, 10 + 9 needed: 54 s


async def test_tokens_a_minute_count_what_was_held_when_a_request_was_cut_off(
    make: Make, keys: Keys, engine: ScriptedEngine
) -> None:
    keys.limit(tokens_per_minute=20)
    client, headers = make(), bearer(keys.bob)
    engine.script.fail_after = 1
    engine.held = {"": 9}
    body = {**COMPLETION, "prompt": [1] * 5, "max_tokens": 9}
    assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 500
    body["prompt"] = [1] * 6  # 5 and 1 and 9 of 20 are used
    assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 429


class QuotaRecorder(CacheControl):
    """The engine's `CacheControl`, as far as quotas go."""

    def __init__(self) -> None:
        self.given: list[Mapping[str, Mapping[Tier, int]]] = []

    async def set_quotas(self, quotas: Mapping[str, Mapping[Tier, int]]) -> None:
        self.given.append(quotas)


async def test_the_engine_learns_of_quotas_before_the_first_request_and_when_they_change(
    make: Make, keys: Keys, engine: ScriptedEngine
) -> None:
    recorder = QuotaRecorder()
    engine.cache_control = recorder
    keys.limit(cache_bytes='{ device = "2MB", disk = "1GB" }')
    client = make()
    for key in (keys.ada, keys.bob):
        assert (await client.post("/generate", json=TGI, headers=bearer(key))).status_code == 200
    assert recorder.given == [{"bob": {Tier.DEVICE: 2_000_000, Tier.DISK: 1_000_000_000}}]
    keys.path.write_text(keys.path.read_text().replace("2MB", "3MB"))
    for _ in range(30):
        assert (await client.post("/generate", json=TGI, headers=bearer(keys.ada))).status_code == 200
        if len(recorder.given) == 2:
            break
        await asyncio.sleep(0.1)
    assert [given["bob"][Tier.DEVICE] for given in recorder.given[1:]] == [3_000_000]


async def test_bodies_are_bounded_by_tenant(make: Make, keys: Keys) -> None:
    keys.limit(max_body_bytes=200)
    client = make()
    body = {**COMPLETION, "prompt": "x" * 300}
    assert (await client.post("/v1/completions", json=body, headers=bearer(keys.bob))).status_code == 413
    assert (await client.post("/v1/completions", json=body, headers=bearer(keys.ada))).status_code == 200


async def test_who_may_ask_what(make: Make, keys: Keys) -> None:
    client = make(admin_key="root")
    for headers in ({}, bearer("sk-stemma-wrong"), bearer(""), {"authorization": f"Basic {keys.ada}"}):
        assert (await client.post("/v1/completions", json=COMPLETION, headers=headers)).status_code == 401
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/v1/models", headers={"x-api-key": keys.ada})).status_code == 200
    for path in ("/admin/stats", "/admin/cache/tree", "/metrics"):
        assert (await client.get(path, headers=bearer(keys.ada))).status_code == 401
        assert (await client.get(path, headers=bearer("root"))).status_code == 200
        assert (await make().get(path, headers=bearer(keys.ada))).status_code == 403


async def test_an_operator_names_the_tenant_whose_prompt_is_meant(
    make: Make, keys: Keys, engine: ScriptedEngine
) -> None:
    client = make(admin_key="root")
    await client.post("/v1/completions", json=COMPLETION, headers=bearer(keys.ada))
    body = {"prompt": "a b c", "tenant": "ada"}
    assert (await client.post("/admin/cache/prewarm", json=body, headers=bearer("root"))).status_code == 200
    used, prewarmed = (request.namespace for request in engine.requests)
    assert used == prewarmed
    for wrong in ({"prompt": "x"}, {"prompt": "x", "tenant": "eve"}):
        answer = await client.post("/admin/cache/prewarm", json=wrong, headers=bearer("root"))
        assert answer.status_code == 400


async def test_one_way_to_give_keys(make: Make) -> None:
    with pytest.raises(ConfigError, match="not both"):
        make(api_key="x")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("path", "body"), PLANES)
async def test_every_plane_records_who_used_what(
    make: Make, keys: Keys, tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    file = tmp_path / "usage.db"
    client = make(ledger=str(file), admin_key="root")
    for key in (keys.ada, keys.ada, keys.bob):
        assert (await client.post(path, json=body, headers=bearer(key))).status_code == 200
        # Nothing is waited for: the row was committed before the answer ended.
    ada, bob = usage(sqlite_url(file), "tenant")
    assert (ada.group, ada.num_requests, bob.group, bob.num_requests) == ("ada", 2, "bob", 1)
    assert (ada.model, ada.output_tokens, bob.output_tokens) == ("scripted", 6, 3)
    assert ada.hit_tokens[Tier.DEVICE] + ada.miss_tokens == 2 * bob.miss_tokens
    assert ada.hit_tokens[Tier.DEVICE] == bob.miss_tokens - 1
    shown = (await client.get("/metrics", headers=bearer("root"))).text
    assert "stemma_ledger_rows_written_total 3.0" in shown
    assert "stemma_ledger_rows_waiting 0.0" in shown


async def test_requests_that_end_badly_are_recorded_and_refused_ones_are_not(
    make: Make, keys: Keys, engine: ScriptedEngine, tmp_path: Path
) -> None:
    file = tmp_path / "usage.db"
    client, headers = make(ledger=str(file), admin_key="root"), bearer(keys.ada)
    engine.script.fail_after = 2
    assert (await client.post("/v1/completions", json=COMPLETION, headers=headers)).status_code == 500
    engine.script.overloaded = True
    assert (await client.post("/v1/completions", json=COMPLETION, headers=headers)).status_code == 503
    for _ in range(200):
        rows = usage(sqlite_url(file), "tenant")
        if rows:
            break
        await asyncio.sleep(0.02)
    [row] = rows
    assert (row.num_requests, row.output_tokens) == (1, 2)


@pytest.mark.parametrize(
    ("outcome", "is_finished", "recorded"),
    [
        ("aborted", False, ("aborted", 7)),
        ("error", False, ("error", 7)),
        ("refused", False, ("aborted", 7)),  # it took too long, or the server went down
        ("error", True, ("error", 3)),
    ],
)
def test_a_row_counts_tokens_that_were_held_when_a_request_was_cut_off(
    engine: ScriptedEngine, tmp_path: Path, outcome: str, is_finished: bool, recorded: tuple[str, int]
) -> None:
    file = tmp_path / "usage.db"
    ledger = UsageLedger(str(file), engine)
    asked = GenerationRequest("a", as_tokens([1, 2]), SamplingParams())
    entry, answer = ledger.entry(asked, "tgi"), Collected.nothing(2)
    entry.ended(answer, outcome)  # nothing was computed: no row
    answer.take(RequestOutput("a", (), CacheReport(2), is_finished, 3))
    entry.began(answer)
    answer.num_held_tokens = 0 if is_finished else 4
    entry.ended(answer, outcome)
    entry.ended(answer, outcome)
    ledger.close()
    [row] = read_rows(file)
    assert (row["outcome"], row["output_tokens"]) == recorded


async def test_a_stream_that_the_client_leaves_is_recorded_with_what_was_held(
    make: Make, keys: Keys, engine: ScriptedEngine, tmp_path: Path
) -> None:
    file = tmp_path / "usage.db"
    settings = Settings(
        engine=EngineSettings(model=ModelSettings(path=Path("scripted"))),
        server=ServerSettings.model_validate({"ledger": str(file)}),
    )
    state = create_app(engine, settings).state
    never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    request = Request({"type": "http", "headers": []}, receive=lambda: never)
    prompt = Prompt(as_tokens([1, 2]))
    asked = Asked(request_id="a", prompt=prompt, params=SamplingParams(max_tokens=9))
    stream = await state.runner.start(request, [state.api.turns.build(request, "tgi", asked)])
    _, output = await anext(stream)
    engine.held = {"a": 4}
    await stream.aclose()
    state.instruments.ledger.close()
    [row] = read_rows(file)
    assert (row["outcome"], row["output_tokens"]) == ("aborted", output.num_generated_tokens + 4)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [65]}),
        ("/v1/tokenizer", {"inputs": "a"}),
    ],
)
async def test_tokenizing_counts_as_a_request(
    make: Make, keys: Keys, path: str, body: dict[str, Any]
) -> None:
    keys.limit(requests_per_minute=2, max_concurrent=1)
    client = make()
    statuses = [(await client.post(path, json=body, headers=bearer(keys.bob))).status_code for _ in range(3)]
    assert statuses == [200, 200, 429]
    assert (await client.post(path, json=body, headers=bearer(keys.ada))).status_code == 200
