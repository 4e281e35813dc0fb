"""Pages in a real browser: the chat's key, the API's description; and files that aren't theirs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.e2e.browsing import needs_chromium, problems_of, until
from tests.e2e.conftest import Served, start_server

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.fixture(scope="module")
def keyed(tiny_model: Path) -> Iterator[Served]:
    served, stop = start_server(tiny_model, api_key="the-key")
    yield served
    stop()


@needs_chromium
def test_a_server_with_a_key_asks_for_it(page: Page, keyed: Served) -> None:
    page.goto(keyed.url + "/")
    page.wait_for_selector("#login:not([hidden])")
    page.fill("#key", "the-key")
    page.click("#login button")
    until(page, "document.getElementById('model').textContent === 'tiny'")
    assert page.is_hidden("#login")
    problems_of(page)[:] = [text for text in problems_of(page) if "401" not in text]
    assert problems_of(page) == []


@needs_chromium
def test_the_api_is_described_without_another_host(page: Page, served: Served) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(served.url + "/docs")
    page.wait_for_selector("#operations-default-create_chat_completion, .opblock-summary-path")
    until(page, "document.body.textContent.includes('/v1/chat/completions')")
    assert [url for url in asked if not url.startswith((served.url, "data:"))] == []
    assert problems_of(page) == []


@pytest.mark.parametrize("path", ["/chat/nothing.js", "/docs/..%2fpages.py", "/chat/index.html"])
def test_no_other_files(served: Served, path: str) -> None:
    assert httpx.get(served.url + path).status_code == 404
