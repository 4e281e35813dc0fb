"""Batches among others: the bounds of bodies, seats by owner, room for results, disks that fail twice."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from packages.batch.tests.batch_client import begun, line, records, sent, waited
from tests.server.scripted_engine import ScriptedEngine

from stemma.config.settings import Settings
from stemma.errors import StorageError
from stemma.server.door.keyfile import add_key
from stemma_batch import batches
from stemma_batch.seats import FairSeats
from stemma_batch.storage import BatchStorage
from stemma_batch.store import BATCH_BYTES, FILE_BYTES


@pytest.fixture
def changes() -> dict[str, Any]:
    return {}


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "keys.toml"
    made = {name: add_key(path, name) for name in ("ada", "bob")}
    path.write_text(path.read_text() + "requests_per_minute = 5\n")  # bob's, who comes last
    return made


@pytest.fixture
def settings(settings: Settings, tmp_path: Path, changes: dict[str, Any]) -> Settings:
    server = {"batch_directory": tmp_path / "batches", "batch_seats": 1, **changes}
    return settings.model_copy(update={"server": settings.server.model_copy(update=server)})


@pytest.fixture
def client(live_url: str) -> OpenAI:
    return OpenAI(base_url=f"{live_url}/v1", api_key="unused", max_retries=0)


def test_lines_have_the_bounds_of_bodies(client: OpenAI, engine: ScriptedEngine) -> None:
    """24 MB of empty arrays took 650 MB."""
    body = {"model": "scripted", "prompt": [[]] * 60_000}
    wide = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body})
    assert len(wide) < 260_000
    wide = wide.replace(" ", "")
    batch = waited(client, begun(client, [wide], endpoint="/v1/completions"))
    assert batch.errors is not None
    assert batch.errors.data is not None
    [error] = batch.errors.data
    assert (error.code, "objects and arrays" in str(error.message)) == ("invalid_json_line", True)


def test_a_wrong_line_is_told_by_its_number_however_long_the_file(client: OpenAI) -> None:
    lines: list[Any] = [line(f"{i}", "x") for i in range(5000)]
    batch = waited(client, begun(client, [*lines, "no json", *lines]))
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert (batch.errors.data[0].code, batch.errors.data[0].line) == ("invalid_json_line", 5001)


async def test_a_free_seat_goes_to_who_holds_fewest() -> None:
    seats, order = FairSeats(2), []

    async def work(owner: str, until: asyncio.Event) -> None:
        await seats.acquire(owner)
        order.append(owner)
        await until.wait()
        seats.release(owner)

    first, rest = asyncio.Event(), asyncio.Event()
    tasks = [asyncio.create_task(work("ada", one)) for one in (first, rest, rest, rest)]
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(work("bob", rest)) for _ in range(2)]
    cancelled = asyncio.create_task(work("eve", rest))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.sleep(0)
    assert order == ["ada", "ada"]
    first.set()
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(0)
    assert order == ["ada", "ada", "bob"]
    rest.set()
    await asyncio.gather(*tasks)
    assert Counter(order) == {"ada": 4, "bob": 2}


@pytest.fixture
def tenants(settings: Settings, keys: dict[str, str], tmp_path: Path) -> None:
    object.__setattr__(settings.server, "api_keys_file", tmp_path / "keys.toml")


@pytest.mark.usefixtures("tenants")
def test_one_tenants_batches_never_stop_anothers(
    keys: dict[str, str], engine: ScriptedEngine, request: pytest.FixtureRequest
) -> None:
    """More batches than take turns, all of a tenant whose requests of the minute are used up."""
    url = request.getfixturevalue("live_url")
    engine.script.gate = threading.Event()  # no more than one line is asked before all batches are there
    bob, ada = (OpenAI(base_url=f"{url}/v1", api_key=keys[name], max_retries=0) for name in ("bob", "ada"))
    file_id = sent(bob, [line(f"{i}", f"bob {i}") for i in range(20)])
    waiting = [
        bob.batches.create(input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h")
        for _ in range(3)
    ]
    waited(bob, waiting[0], lambda one: one.status == "in_progress")
    engine.script.gate.set()
    batch = waited(ada, begun(ada, [line(f"{i}", f"ada {i}") for i in range(20)]))
    assert (batch.status, len(records(ada, batch.output_file_id))) == ("completed", 20)
    assert bob.batches.retrieve(waiting[0].id).status == "in_progress"


@pytest.mark.parametrize("changes", [{"batch_bytes": BATCH_BYTES + FILE_BYTES + 40_000}])
def test_results_count(client: OpenAI, live_url: str) -> None:
    """905 MB lay there under --batch-bytes 4MB."""
    lines = [line(f"{i}", "hello", max_tokens=300, logprobs=True, top_logprobs=5) for i in range(4)]
    batch = waited(client, begun(client, lines))
    assert batch.status == "completed"
    failed = records(client, batch.error_file_id)
    assert [one["error"]["code"] for one in failed] == ["result_too_large"] * len(failed)
    assert failed
    metrics = httpx.get(f"{live_url}/metrics").text
    [held] = [one for one in metrics.splitlines() if 'budget_held{budget="batch_bytes"}' in one]
    files = sum(one.bytes + FILE_BYTES for one in client.files.list())
    assert float(held.split()[-1]) == files + BATCH_BYTES <= BATCH_BYTES + 3 * FILE_BYTES + 40_000
    for one in client.files.list():
        client.files.delete(one.id)
    metrics = httpx.get(f"{live_url}/metrics").text
    assert 'budget_held{budget="batch_bytes"} 65536.0' in metrics


@pytest.mark.parametrize("changes", [{"batch_bytes": 4 * FILE_BYTES}])
def test_empty_files_are_bounded_in_number(client: OpenAI) -> None:
    ids = [sent(client, []) for _ in range(4)]
    with pytest.raises(openai.InternalServerError, match="are in use"):
        sent(client, [])
    client.files.delete(ids[0])
    sent(client, [])


def test_a_disk_that_fails_again_is_tried_again(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second error while a batch was tried again was its end, until the next start."""
    monkeypatch.setattr(batches, "RETRY_S", 0.01)
    usual, failures = BatchStorage.call, iter(range(6))

    async def failing(self: BatchStorage, work: Any, owner: str = "") -> Any:
        if asyncio.current_task().get_coro().__name__ == "_run" and next(failures, None) is not None:  # type: ignore[union-attr]
            raise StorageError("no space left")
        return await usual(self, work, owner)

    monkeypatch.setattr(BatchStorage, "call", failing)
    batch = waited(client, begun(client, [line("a", "x")]))
    assert batch.status == "completed"
    assert next(failures, None) is None
