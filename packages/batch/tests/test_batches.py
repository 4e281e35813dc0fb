"""Files and batches, by OpenAI's own client over a real socket."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from packages.batch.tests.batch_client import CHAT, begun, line, records, sent, waited
from tests.server.scripted_engine import ScriptedEngine
from tests.server.scripted_process import scripted_server

from stemma.budgets import Budget
from stemma.config.server_settings import ServerSettings
from stemma.config.settings import Settings
from stemma.errors import StorageError
from stemma.server.app import create_app
from stemma_batch.records import BATCH_PURPOSE, StoredFile
from stemma_batch.records import Batch as StoredBatch
from stemma_batch.store import BatchStore

DEEP = '"tools": ' + "[" * 600 + "]" * 600


@pytest.fixture
def batch_seats() -> int:
    return 2


@pytest.fixture
def settings(settings: Settings, tmp_path: Path, batch_seats: int) -> Settings:
    batches = {"batch_directory": tmp_path / "batches", "batch_seats": batch_seats}
    server = settings.server.model_copy(update=batches)
    return settings.model_copy(update={"server": server})


@pytest.fixture
def client(live_url: str) -> OpenAI:
    return OpenAI(base_url=f"{live_url}/v1", api_key="unused", max_retries=0)


def test_results_come_in_the_order_of_lines(client: OpenAI) -> None:
    texts = [f"question {i % 3} of {i}" for i in range(12)]
    lines = [line(f"id-{i}", text) for i, text in enumerate(texts)]
    batch = waited(client, begun(client, lines))
    assert (batch.status, batch.error_file_id, batch.metadata) == ("completed", None, {"a": "b"})
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed) == (12, 12)
    found = records(client, batch.output_file_id)
    assert [one["custom_id"] for one in found] == [f"id-{i}" for i in range(12)]
    for one, sent_line in zip(found, lines, strict=True):
        alone = client.chat.completions.create(**sent_line["body"])
        body = one["response"]["body"]
        assert (one["response"]["status_code"], one["error"]) == (200, None)
        assert body["choices"][0]["message"]["content"] == alone.choices[0].message.content
    usage = client.batches.retrieve(batch.id).to_dict()["usage"]
    assert isinstance(usage, dict)
    assert usage["input_tokens"] == sum(one["response"]["body"]["usage"]["prompt_tokens"] for one in found)


@pytest.mark.parametrize("batch_seats", [1])  # two at one time may change places
def test_requests_run_depth_first(client: OpenAI, engine: ScriptedEngine) -> None:
    groups = [line(f"{i}", f"{i % 4} {'x' * 400} {i}") for i in range(20)]
    waited(client, begun(client, groups))
    prompts = [one.prompt_token_ids.tolist() for one in engine.requests]
    assert len(prompts) == 20
    assert num_shared(prompts) == num_shared(sorted(prompts))
    assert num_shared(prompts) > 1.2 * num_shared(sorted(prompts, key=lambda one: one[-30:]))


def num_shared(prompts: list[list[int]]) -> int:
    """Return the tokens that each prompt shares with the one before it."""
    return sum(
        next((i for i, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), len(pair[0]))
        for pair in pairwise(prompts)
    )


def test_a_request_that_fails_stands_in_the_file_of_errors(client: OpenAI) -> None:
    lines = [line("good", "hello"), line("bad", "hello", temperature=-1), line("model", "hi", model="none")]
    batch = waited(client, begun(client, lines))
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 2)
    bad, model = records(client, batch.error_file_id)
    assert (bad["custom_id"], bad["response"]["status_code"]) == ("bad", 400)
    assert "temperature" in bad["response"]["body"]["error"]["message"]
    assert model["response"]["status_code"] == 404


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        ([], "empty_file", None),
        (["no json"], "invalid_json_line", 1),
        (["[1]"], "invalid_json_line", 1),
        ([line("a", "x"), {"custom_id": "b", "url": CHAT}], "missing_required_parameter", 2),
        ([line("", "x")], "missing_required_parameter", 1),
        ([line("a", "x"), line("a", "y")], "duplicate_custom_id", None),
        ([{**line("a", "x"), "url": "/v1/completions"}], "mismatched_endpoint", 1),
        ([{**line("a", "x"), "method": "GET"}], "invalid_method", 1),
        ([line("a", "x", stream=True)], "invalid_request", 1),
        ([line("a", "x" * 300_000)], "request_too_large", 1),
        ([line("a", "x").__repr__().replace("'", '"').replace('"x"', "NaN")], "invalid_json_line", 1),
        ([json.dumps(line("a", "x", tools=1)).replace('"tools": 1', DEEP)], "invalid_json_line", 1),
    ],
)
def test_a_file_that_is_no_batch_fails_it(
    client: OpenAI, engine: ScriptedEngine, lines: list[Any], code: str, number: int | None
) -> None:
    batch = waited(client, begun(client, lines))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(one.code, one.line) for one in batch.errors.data] == [(code, number)]
    assert engine.requests == []


def test_a_cancelled_batch_keeps_what_was_answered(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script.delay_s = 0.05
    batch = begun(client, [line(f"{i}", f"question {i}") for i in range(50)])
    waited(client, batch, lambda one: one.request_counts is not None and one.request_counts.completed > 1)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = waited(client, batch)
    assert batch.status == "cancelled"
    found = records(client, batch.output_file_id)
    assert batch.request_counts is not None
    assert 2 <= len(found) == batch.request_counts.completed < 50
    with pytest.raises(openai.BadRequestError, match="can't be cancelled"):
        client.batches.cancel(batch.id)


def test_a_busy_server_is_asked_again(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script.overloaded = True
    batch = begun(client, [line("a", "x")])
    time.sleep(0.2)
    assert client.batches.retrieve(batch.id).status == "in_progress"
    engine.script.overloaded = False
    assert waited(client, batch).status == "completed"


def test_files(client: OpenAI, live_url: str, tmp_path: Path) -> None:
    first, second = sent(client, [line("a", "x")]), sent(client, [line("b", "y")])
    assert [one.id for one in client.files.list(limit=1)] == [second, first]
    kept = client.files.retrieve(first)
    assert (kept.filename, kept.purpose, kept.bytes) == ("in.jsonl", "batch", len(json.dumps(line("a", "x"))))
    assert client.files.content(first).text == json.dumps(line("a", "x"))
    assert client.files.delete(first).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(first)
    assert [one.name for one in (tmp_path / "batches" / "files").iterdir()] == [second]
    for path in ("..%2Flock", "file-", "%00"):
        assert httpx.get(f"{live_url}/v1/files/{path}/content").status_code == 404


@pytest.mark.parametrize(
    ("form", "status"),
    [
        ({"data": {"purpose": "batch"}}, 415),
        ({"files": {"file": b"{}"}, "data": {"purpose": "fine-tune"}}, 400),
        ({"files": {"other": b"{}"}, "data": {"purpose": "batch"}}, 400),
        ({"files": {"file": b"{}"}, "data": {"purpose": "x" * 5000}}, 400),
        ({"files": [("file", b"1"), ("file", b"2")], "data": {"purpose": "batch"}}, 400),
        ({"content": b"nonsense", "headers": {"content-type": "multipart/form-data; boundary=x"}}, 400),
        ({"content": b"nonsense", "headers": {"content-type": "multipart/form-data"}}, 400),
        ({"files": {"file": b"{}"}, "data": {"purpose": "batch", "expires_after[seconds]": "1"}}, 400),
        ({"files": {"file": b"{}"}, "headers": {"origin": "http://elsewhere.example"}}, 403),
    ],
)
def test_wrong_forms(live_url: str, form: Any, status: int) -> None:
    answer = httpx.post(f"{live_url}/v1/files", **form)
    assert answer.status_code == status, answer.text
    assert httpx.get(f"{live_url}/v1/files").json()["data"] == []


def test_wrong_batches(client: OpenAI) -> None:
    file_id = sent(client, [line("a", "x")])
    with pytest.raises(openai.BadRequestError, match="endpoint must be one of"):
        client.batches.create(input_file_id=file_id, endpoint="/v1/moderations", completion_window="24h")
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id="file-none", endpoint="/v1/completions", completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="completion_window"):
        begun(client, [line("a", "x")], window="soon")
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_none")
    assert list(client.batches.list()) == []


async def test_without_a_directory_they_are_off(engine: ScriptedEngine, settings: Settings) -> None:
    off = settings.model_copy(update={"server": ServerSettings(port=0)})
    transport = httpx.ASGITransport(app=create_app(engine, off))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        for path in ("/v1/files", "/v1/batches"):
            answer = await http.get(path)
            assert answer.status_code == 400
            assert "--batch-directory" in answer.json()["error"]["message"]


def test_two_servers_never_share_a_directory(
    live_url: str, engine: ScriptedEngine, settings: Settings
) -> None:
    with pytest.raises(StorageError, match="give each its own"):
        create_app(engine, settings)


@pytest.mark.parametrize("signal", ["SIGKILL", "SIGTERM"])
def test_a_batch_outlives_its_server(tokenizer_path: Path, tmp_path: Path, signal: str) -> None:
    kept = {"server": {"batch_directory": str(tmp_path / "batches"), "batch_seats": 3}}
    lines = [line(f"{i}", f"question {i}") for i in range(40)]
    with scripted_server(tokenizer_path, delay_s=0.02, drain_s=1.0, settings=kept) as (process, url):
        client = OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
        batch = begun(client, lines)
        before = waited(
            client, batch, lambda one: one.request_counts is not None and one.request_counts.completed > 4
        )
        if signal == "SIGKILL":
            process.kill()
        else:
            process.terminate()
        process.wait(20)
    with scripted_server(tokenizer_path, settings=kept) as (_, url):
        client = OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
        batch = waited(client, batch)
        found = records(client, batch.output_file_id)
        metrics = httpx.get(f"{url}/metrics").text
    assert batch.status == "completed"
    assert [one["custom_id"] for one in found] == [f"{i}" for i in range(40)]
    # What had been answered before is not answered again.
    [answered] = [
        one for one in metrics.splitlines() if one.startswith('stemma_requests_total{api="chat",outcome="ok"')
    ]
    assert before.request_counts is not None
    assert float(answered.split()[-1]) <= 40 - before.request_counts.completed


def test_an_old_batch_expires(
    engine: ScriptedEngine, settings: Settings, request: pytest.FixtureRequest
) -> None:
    assert settings.server.batch_directory is not None
    store = BatchStore(settings.server.batch_directory, Budget("batch_bytes", "bytes", 1 << 20))
    store.path_of("file-1").write_text(json.dumps(line("a", "x")))
    now = int(time.time())
    store.add_file(StoredFile("file-1", "", "in.jsonl", BATCH_PURPOSE, 300, now, now + 9999))
    store.save(StoredBatch("batch_1", "", CHAT, "file-1", "24h", now - 90_000, now - 10))
    store.close()
    client: OpenAI = request.getfixturevalue("client")
    batch = waited(client, client.batches.retrieve("batch_1"))
    assert batch.status == "expired"
    assert batch.output_file_id is None
    [record] = records(client, batch.error_file_id)
    assert (record["custom_id"], record["response"]) == ("a", None)
    assert record["error"]["code"] == "batch_expired"
    assert engine.requests == []


def test_a_batch_whose_file_is_deleted_fails(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script.delay_s = 0.05
    batch = begun(client, [line(f"{i}", f"question {i}") for i in range(50)])
    waited(client, batch, lambda one: one.request_counts is not None and one.request_counts.completed > 1)
    client.files.delete(batch.input_file_id)
    batch = waited(client, batch)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert "deleted" in str(batch.errors.data[0].message)
    assert len(records(client, batch.output_file_id)) >= 2


def test_an_error_of_ours_fails_the_batch(
    client: OpenAI, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told, and what was answered is kept; the batch doesn't wait for ever."""

    def broken(self: object, body: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("stemma_batch.records.BatchUsage.plus", broken)
    batch = waited(client, begun(client, [line("a", "x"), line("b", "y", temperature=-1)]))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [one.code for one in batch.errors.data] == ["server_error"]
    monkeypatch.undo()
    assert waited(client, begun(client, [line("a", "x")])).status == "completed"


async def test_uploads_under_way_count(live_url: str, engine: ScriptedEngine) -> None:
    """A client that leaves half-way leaves nothing, neither bytes held nor a file."""

    async def half() -> Any:
        yield b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"y" * 100_000
        raise RuntimeError("gone")

    headers = {"content-type": "multipart/form-data; boundary=x", "content-length": "200000"}
    async with httpx.AsyncClient() as http:
        with pytest.raises(RuntimeError, match="gone"):
            await http.post(f"{live_url}/v1/files", content=half(), headers=headers)
        deadline = time.monotonic() + 10
        while 'budget_held{budget="batch_bytes"} 0.0' not in (await http.get(f"{live_url}/metrics")).text:
            assert time.monotonic() < deadline
        assert (await http.get(f"{live_url}/v1/files")).json()["data"] == []
