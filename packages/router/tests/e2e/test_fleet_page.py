"""The operator's page of a fleet: two real servers behind a real router, one killed and started again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import httpx
import pytest
from packages.router.tests.routing.processes import KEY, Process, become, router, sick_server
from tests.e2e.browsing import (
    PHONE,
    axe_findings,
    needs_axe,
    needs_chromium,
    problems_of,
    until,
    wait_for,
)

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = needs_chromium
LIVE = "document.getElementById('state').textContent === 'live'"
BEARER = {"authorization": f"Bearer {KEY}"}
PROMPT = "You answer the readers of the harbour library in one sentence. " * 4


def server(model: Path, port: int = 0) -> Process:
    flags = ("--port", str(port), "--kv-cache-memory", "4MB", "--block-size", "16", "--num-threads", "1")
    return Process("stemma", "serve", str(model), *flags)


def ask(url: str, prompt: str = PROMPT, **fields: object) -> int:
    body = {"prompt": prompt, "max_tokens": 4, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code


def log_in(page: Page, url: str) -> None:
    page.goto(f"{url}/dashboard")
    page.fill("#key", KEY)
    page.click("#login button")
    until(page, LIVE)
    # The first look without a key is refused with 401, which the browser notes.
    problems_of(page)[:] = [text for text in problems_of(page) if "401" not in text]


def shown_of(proxy: Process, one: Process) -> dict[str, Any]:
    """What the router tells of a server."""
    [fleet] = httpx.get(f"{proxy.url}/admin/live/now", headers=BEARER).json()["fleets"]
    [found] = [server for server in fleet["servers"] if server["url"] == one.url]
    return dict(found)


def under_way(proxy: Process, one: Process) -> int:
    return int(shown_of(proxy, one)["requests"])


def row_of(page: Page, one: Process) -> str:
    return page.locator("#servers tbody tr", has_text=one.url.removeprefix("http://")).inner_text()


def events_of(page: Page, one: Process) -> list[str]:
    """What became of a server, the oldest first."""
    rows = page.locator("#events tbody tr", has_text=one.url).all_inner_texts()
    return [row.split("\t")[2] + ": " + row.split("\t")[3] for row in reversed(rows)]


def sees(page: Page, is_so: Callable[[], bool]) -> None:
    wait_for(is_so, lambda: page.wait_for_timeout(100))


@pytest.mark.slow
def test_a_server_that_is_killed_and_comes_back(page: Page, tiny_model: Path) -> None:
    first, second = (server(tiny_model) for _ in range(2))
    proxy = router(first.url, second.url, flags=("--router", "round-robin"))
    try:
        for _ in range(4):
            assert ask(proxy.url) == 200
        assert ask(proxy.url, temperature="hot") == 400
        log_in(page, proxy.url)
        assert "Healthy: 2 servers" in (page.text_content("#health") or "")
        for one in (first, second):
            assert "healthy" in row_of(page, one)
        sees(page, lambda: "invalid request" in page.locator("#refused tbody").inner_text())
        assert "temperature" in page.locator("#refused tbody").inner_text()
        assert "Servers had " in (page.text_content("#saved-words") or "")
        assert "http" in (page.locator("#servers a").first.get_attribute("href") or "")
        long = {"max_tokens": 500, "ignore_eos": True}
        threads = [threading.Thread(target=ask, args=(proxy.url,), kwargs=long) for _ in range(10)]
        for thread in threads:
            thread.start()
        sees(page, lambda: under_way(proxy, second) >= 4)
        second.process.kill()
        for thread in threads:
            thread.join()
        sees(page, lambda: "down" in row_of(page, second))
        assert "1 of 2 servers can't be asked" in (page.text_content("#health") or "")
        ejected = [
            text for text in events_of(page, second) if text.startswith("ejected: 3 failures in a row")
        ]
        assert ejected, events_of(page, second)
        assert "failures in a row" in row_of(page, second)
        assert f"{second.url} is down: look at its log" in (page.text_content("#advice") or "")
        second.stop()
        second = server(tiny_model, int(httpx.URL(second.url).port or 0))
        sees(page, lambda: any(text.startswith("up: ") for text in events_of(page, second)))

        def is_back() -> bool:
            ask(proxy.url)
            return "healthy" in row_of(page, second)

        sees(page, is_back)
        assert events_of(page, second)[-1] == "back: a request that tried it succeeded"
        sees(page, lambda: "Healthy: 2 servers" in (page.text_content("#health") or ""))
        assert problems_of(page) == []
    finally:
        for process in (proxy, first, second):
            process.stop()


@pytest.fixture(scope="module")
def fleet() -> Iterator[tuple[Process, Process]]:
    """A router, and one of its two servers: it has answered 500."""
    sick, well = sick_server(), sick_server()
    proxy = router(sick.url, well.url, flags=("--router", "round-robin"))
    become(sick, "500")
    for _ in range(8):
        ask(proxy.url)
    yield proxy, sick
    for process in (proxy, sick, well):
        process.stop()


@needs_axe
@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "is_phone"), [("light", False), ("dark", True)])
def test_axe_finds_nothing(
    page: Page, fleet: tuple[Process, Process], scheme: Literal["light", "dark"], is_phone: bool
) -> None:
    proxy, sick = fleet
    page.emulate_media(color_scheme=scheme)
    if is_phone:
        page.set_viewport_size(PHONE)
    log_in(page, proxy.url)
    assert "failures in a row" in row_of(page, sick)
    width: Any = page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert width is True
    assert axe_findings(page) == []


@pytest.mark.slow
def test_what_the_page_shows_is_the_operators(page: Page, fleet: tuple[Process, Process]) -> None:
    proxy, sick = fleet
    assert httpx.get(f"{proxy.url}/dashboard").status_code == 200
    for path in ("/admin/live", "/admin/live/now"):
        assert httpx.get(proxy.url + path).status_code == 401
    for name in ("none.js", "app.js", "..%2f__init__.py", "fleet.html"):
        assert httpx.get(f"{proxy.url}/dashboard/{name}").status_code in (400, 404)
    one = shown_of(proxy, sick)
    assert one["ejections"]["in_a_row"] >= 1
    assert one["age_s"] < 10.0
    assert one["outcomes"]["failed"] >= 3
    page.goto(f"{proxy.url}/dashboard")
    page.fill("#key", "wrong")
    page.click("#login button")
    until(page, "document.getElementById('refusal').textContent.includes('admin key')")
    problems_of(page).clear()
