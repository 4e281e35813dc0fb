"""Chat templates: what clients may pass, one that hangs, and one of the client."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from stemma.config.settings import Settings
from stemma.errors import EngineFailed, Overloaded, TookTooLong
from stemma.model.text.tokenizer import Tokenizer
from stemma.server.app import create_app
from stemma.server.turn.intake import AT_ONCE_CHARS
from stemma.supervision import LoggingSupervisor, Supervisor
from stemma.workers import MAX_STUCK, WorkerThreads
from tests.server.scripted_engine import ScriptedEngine

USER = [{"role": "user", "content": "Hello"}]
PATH = "/v1/chat/completions"
HANGS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def app_client(engine: ScriptedEngine, settings: Settings, **server: Any) -> httpx.AsyncClient:
    changed = settings.server.model_copy(update=server)
    app = create_app(engine, settings.model_copy(update={"server": changed}))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


@pytest.fixture
def with_template(tokenizer_path: Path, tmp_path: Path) -> Callable[[str], Tokenizer]:
    """The test tokenizer with another chat template."""

    def make(template: str) -> Tokenizer:
        path = shutil.copytree(tokenizer_path, tmp_path / "tokenizer")
        (path / "chat_template.jinja").write_text(template)
        return Tokenizer(path)

    return make


@pytest.fixture
async def trusting(engine: ScriptedEngine, settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """A server that renders the templates of clients."""
    async with app_client(
        engine, settings, trust_request_chat_template=True, tokenize_timeout_s=1.0
    ) as client:
        yield client


@pytest.mark.parametrize(
    "kwargs",
    [
        {"chat_template": HANGS},
        {"tokenize": True},
        {"tools": []},
        {"messages": []},
        {"return_tensors": "pt"},
        {"continue_final_message": True},
        {"tokenizer_kwargs": {}},
        {"eos_token": "x"},
        {"_secret": 1},
        {"tone": {"nested": 1}},
        {"tone": "x" * 2000},
        {"tone": 2**40},
        {"tone": [[1]]},
    ],
)
async def test_template_arguments_that_are_not_for_clients(
    client: httpx.AsyncClient, kwargs: dict[str, Any]
) -> None:
    response = await client.post(PATH, json={"messages": USER, "chat_template_kwargs": kwargs})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "chat_template_kwargs"


async def test_a_template_gets_the_variables_that_it_reads(
    engine: ScriptedEngine, client: httpx.AsyncClient, with_template: Callable[[str], Tokenizer]
) -> None:
    engine.tokenizer = with_template(
        "{% generation %}{{ tone }}{% endgeneration %}: {{ messages[0].content }}"
        "{% if not messages %}{{ raise_exception(eos_token) }}{% endif %}"
    )
    assert engine.tokenizer.template_variables == {"tone", "eos_token"}
    kwargs = {"tone": "kind", "enable_thinking": False}
    response = await client.post(PATH, json={"messages": USER, "chat_template_kwargs": kwargs})
    assert response.status_code == 200, response.text
    assert engine.tokenizer.decode(engine.requests[-1].prompt_token_ids.tolist()) == "kind: Hello"


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / 0 }}",
        HANGS,
        "{{ 10 ** (10 ** 8) }}",
        "{{ 'a' * 10 ** 10 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ raise_exception('no') }}",
    ],
)
async def test_a_template_that_fails_is_a_400(
    engine: ScriptedEngine,
    client: httpx.AsyncClient,
    with_template: Callable[[str], Tokenizer],
    template: str,
) -> None:
    engine.tokenizer = with_template(template)
    response = await client.post(PATH, json={"messages": USER})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "messages"


async def test_tokenizing_that_hangs_is_given_up(
    engine: ScriptedEngine, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both threads hang, their clients get 408, and the next prompts are tokenized by new threads."""
    finish = threading.Event()
    real = engine.tokenizer.encode_pieces
    monkeypatch.setattr(engine.tokenizer, "encode_pieces", lambda *_, **__: finish.wait(30))
    async with app_client(engine, settings, tokenize_timeout_s=0.1) as client:
        body = {"prompt": "x" * (AT_ONCE_CHARS + 1), "max_tokens": 1}
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(3)))
        assert {answer.status_code for answer in answers} == {408}
        monkeypatch.setattr(engine.tokenizer, "encode_pieces", real)
        assert (await client.post("/v1/completions", json=body)).status_code == 200
    finish.set()


async def test_threads_that_hang_are_bounded() -> None:
    finish = threading.Event()
    workers = WorkerThreads(1, "test-worker", LoggingSupervisor())
    for _ in range(MAX_STUCK):
        with pytest.raises(TookTooLong):
            await workers.run(lambda: finish.wait(30), limit_s=0.01, what="waiting")
    with pytest.raises(Overloaded):
        await workers.run(lambda: None, limit_s=1, what="waiting")
    finish.set()
    while True:
        try:
            assert await workers.run(lambda: 5, limit_s=1, what="waiting") == 5
            break
        except Overloaded:
            await asyncio.sleep(0.01)
    workers.close()
    names = [thread.name for thread in threading.enumerate()]
    while "test-worker" in names:
        await asyncio.sleep(0.01)
        names = [thread.name for thread in threading.enumerate()]


async def test_errors_of_workers_reach_who_waits() -> None:
    workers = WorkerThreads(1, "test-errors", LoggingSupervisor())
    with pytest.raises(ZeroDivisionError):
        await workers.run(lambda: 1 / 0, limit_s=1, what="dividing")
    waiting = asyncio.create_task(workers.run(lambda: 1, limit_s=1, what="waiting"))
    await asyncio.sleep(0)
    waiting.cancel()
    assert await workers.run(lambda: 2, limit_s=1, what="waiting") == 2
    workers.close()


async def test_an_error_of_a_worker_thread_itself_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = []

    def die(*_: object) -> None:
        monkeypatch.undo()
        raise SystemExit("out of luck")

    class Reports(Supervisor):
        def on_thread_failure(self, name: str, error: BaseException) -> None:
            reports.append((name, type(error)))

    workers = WorkerThreads(1, "test-dies", Reports())
    # A thread's word to the event loop that it begins: outside of the work, whose errors are the caller's.
    monkeypatch.setattr(asyncio.get_running_loop(), "call_soon_threadsafe", die)
    with pytest.raises(EngineFailed, match="waiting failed"):
        await workers.run(lambda: 1, limit_s=1, what="waiting")
    while not reports:
        await asyncio.sleep(0.01)
    assert reports == [("test-dies", SystemExit)]
    assert await workers.run(lambda: 1, limit_s=1, what="waiting") == 1
    workers.close()


async def test_templates_of_clients_run_in_a_process_that_is_killed(
    engine: ScriptedEngine, trusting: httpx.AsyncClient
) -> None:
    async def ask(template: str) -> httpx.Response:
        return await trusting.post(PATH, json={"messages": USER, "chat_template": template}, timeout=90)

    good = "<{{ messages[0].content }}>{% if add_generation_prompt %}!{% endif %}"
    assert (await ask(good)).status_code == 200
    assert engine.tokenizer.decode(engine.requests[-1].prompt_token_ids.tolist()) == "<Hello>!"
    hangs, bomb, fails = await asyncio.gather(ask(HANGS), ask("{{ 'a' * 2000000000 }}"), ask("{{ 1 / 0 }}"))
    assert (hangs.status_code, bomb.status_code, fails.status_code) == (408, 400, 400)
    assert "MemoryError" in bomb.text
    assert "ZeroDivisionError" in fails.text
    too_long = await ask("{{ 'a' * 2000000 }}")
    assert (too_long.status_code, too_long.json()["error"]["param"]) == (400, "chat_template")
    escape = await ask("{{ ''.__class__.__mro__ }}")
    assert escape.status_code == 400
    assert (await ask(good)).status_code == 200
