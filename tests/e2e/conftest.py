"""The whole server over the small seeded model: real engine, real sockets."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
import uvicorn

from stemma.config.loading import load_settings
from stemma.engine.async_engine import AsyncEngine
from stemma.model.files.tiny import write_tiny_model
from stemma.server.app import create_app
from tests.e2e.browsing import CHROMIUM, PATIENCE_MS, WIDE, is_problem, problems_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Served:
    """A running server and the engine inside it."""

    url: str
    engine: AsyncEngine

    def post(self, path: str, **body: object) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60)

    def complete(self, prompt: object, **body: object) -> dict:
        response = self.post("/v1/completions", model="tiny", prompt=prompt, temperature=0, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def stats(self) -> dict:
        return httpx.get(f"{self.url}/admin/stats").json()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", hidden_size=96, num_layers=2)


def start_server(model: Path, **flags: object) -> tuple[Served, Callable[[], None]]:
    """Start a server in this process, on any free port; return it and how to stop it."""
    given = {"model": model, "kv_cache_memory": "2MB", "block_size": BLOCK_SIZE, "num_threads": 1}
    given |= {"load_when": "always", "prepare_turns": "off", "port": 0} | flags
    settings = load_settings(flags=given)
    engine = AsyncEngine.from_settings(settings.engine)
    app, port = create_app(engine, settings), settings.server.port
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]

    def stop() -> None:
        server.should_exit = True
        thread.join(10)
        engine.close()

    return Served(f"http://127.0.0.1:{port}", engine), stop


@pytest.fixture(scope="session")
def shared_server(tiny_model: Path) -> Iterator[Served]:
    served, stop = start_server(tiny_model)
    yield served
    stop()


@pytest.fixture
def served(shared_server: Served) -> Iterator[Served]:
    """The server with an empty cache; after the test nothing may still be held."""
    shared_server.post("/admin/cache/flush")
    yield shared_server
    shared_server.post("/admin/cache/flush")
    stats = shared_server.stats()
    assert (stats["num_running"], stats["num_waiting"]) == (0, 0)
    assert stats["num_free_blocks"] == stats["num_blocks"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A fresh tab; the test fails if the page writes an error, or its policy stops something."""
    context = browser.new_context(viewport=WIDE)
    page = context.new_page()
    problems = problems_of(page)
    page.set_default_timeout(PATIENCE_MS)
    page.on("console", lambda m: problems.append(m.text) if is_problem(m.type, m.text) else None)
    page.on("pageerror", lambda error: problems.append(str(error) + (error.stack or "")))
    yield page
    assert context.cookies() == []
    context.close()
