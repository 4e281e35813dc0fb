"""The first screen of the operator's page: health, speed, savings, refusals, advice, and the ways from it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import httpx
import pytest

from tests.e2e.browsing import PHONE, WIDE, axe_findings, needs_axe, needs_chromium, problems_of, until
from tests.e2e.conftest import Served, start_server

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = needs_chromium
LIVE = "document.getElementById('state').textContent === 'live'"
RULES = "You answer the readers of the harbour library in one sentence. " * 4
DIALOG_IS_OPEN = "document.getElementById('why').open"


@pytest.fixture(scope="module")
def operated(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server without keys, with a tier below the device, after some traffic and two refusals."""
    served, stop = start_server(tiny_model, host_cache="4MB", host_write="write_through")
    for number in range(4):
        served.complete(f"{RULES}Reader {number} asks.", max_tokens=4)
    body: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": -4}
    assert served.post("/v1/completions", **body).status_code == 400
    assert served.post("/v1/completions", model="gpt-9", prompt="x").status_code == 404
    yield served
    stop()


def text_of(page: Page, selector: str) -> str:
    return " ".join((page.text_content(selector) or "").split())


def open_dashboard(page: Page, served: Served, part: str = "") -> None:
    page.goto(f"{served.url}/dashboard{part}")
    until(page, LIVE)


def test_the_first_screen_answers_an_operators_questions(page: Page, operated: Served) -> None:
    open_dashboard(page, operated)
    assert text_of(page, "#health").startswith("Healthy, up ")
    rows = page.locator("#speed tbody tr")
    assert [rows.nth(n).locator("td").first.text_content() for n in range(4)] == [
        *("first token, p50", "first token, p95", "each token, p50", "each token, p95")
    ]
    times = [rows.nth(n).locator("td").nth(column).text_content() for n in range(4) for column in (1, 2)]
    assert all(time is not None and time.endswith("s") for time in times), times
    assert "prompt tokens of the last hour, about" in text_of(page, "#saved-words")
    assert "from device" in text_of(page, "#saved")
    assert re.fullmatch(r"host: [0-9.]+ MB of KV in [0-9.]+ MB", text_of(page, "#held"))
    assert text_of(page, "#refused-words") == "2 in the last hour, 2 in the last minute"
    assert {"1 × invalid request", "1 × unknown model"} <= set(
        page.locator("#refused-kinds li").all_inner_texts()
    )
    until(page, "document.getElementById('advice').textContent !== 'reading'")
    assert "requests are too few to advise on" in text_of(page, "#advice") or "stemma-lab" in text_of(
        page, "#advice"
    )
    for part in ("#health", "#speed", "#saved-words", "#refused-words", "#advice"):
        box = page.locator(part).bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= WIDE["height"], f"{part} isn't on the first screen"
    assert [text for text in problems_of(page) if "/admin/advice" not in text and "404" not in text] == []


def test_a_refused_request_is_seen_with_its_reason_at_once(page: Page, operated: Served) -> None:
    open_dashboard(page, operated)
    before = page.locator("#refused tbody tr").count()
    answer = operated.post("/v1/completions", model="tiny", prompt="x", temperature="hot")
    assert answer.status_code == 400
    until(page, f"document.querySelectorAll('#refused tbody tr').length === {before + 1}")
    newest = page.locator("#refused tbody tr").first.inner_text()
    assert "invalid request" in newest
    assert "temperature" in newest
    assert answer.headers["x-request-id"] in newest
    page.get_by_role("link", name="Each with its reason").click()
    until(page, "location.hash === '#refusals'")


def test_keys_lead_from_a_request_to_its_explanation_and_back(page: Page, operated: Served) -> None:
    made = operated.complete(f"{RULES}And the last one?", max_tokens=2)["id"]
    open_dashboard(page, operated)
    link = page.locator(f"#ended a[href*='{made}']")
    link.wait_for()
    link.focus()
    page.keyboard.press("Enter")
    until(page, DIALOG_IS_OPEN)
    until(page, "document.getElementById('why-body').textContent.includes('from device')")
    assert made in page.evaluate("location.hash")
    page.keyboard.press("Escape")
    until(page, "location.hash === ''")
    assert not page.evaluate(DIALOG_IS_OPEN)
    assert made in page.evaluate("document.activeElement.hash")
    page.keyboard.press("Enter")
    until(page, DIALOG_IS_OPEN)
    page.go_back()
    until(page, f"!{DIALOG_IS_OPEN}")
    open_dashboard(page, operated, f"#request={made}")  # as the chat's link does
    until(page, DIALOG_IS_OPEN)
    page.get_by_role("button", name="Close").click()
    until(page, "location.hash === ''")


def test_an_unknown_request_says_so(page: Page, operated: Served) -> None:
    open_dashboard(page, operated, "#request=%3Cb%3Enobody")
    until(page, DIALOG_IS_OPEN)
    until(page, "document.getElementById('why-body').textContent.length > 10")
    assert page.locator("#why b").count() == 0
    problems_of(page).clear()  # the browser notes the 404


def test_the_chats_explanation_leads_here(page: Page, operated: Served) -> None:
    page.goto(f"{operated.url}/")
    until(page, "document.getElementById('model').textContent === 'tiny'")
    page.fill("#question", "Where are the maps?")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Explain what was reused").click()
    page.get_by_role("link", name="On the dashboard").click()
    until(page, LIVE)
    until(page, DIALOG_IS_OPEN)


@needs_axe
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("is_phone", [False, True])
def test_axe_finds_nothing(
    page: Page, operated: Served, scheme: Literal["light", "dark"], is_phone: bool
) -> None:
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    if is_phone:
        page.set_viewport_size(PHONE)
    open_dashboard(page, operated)
    page.wait_for_selector("#refused tbody tr")
    page.wait_for_selector("#hits .main-svg")
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]  # type: ignore[index]
    assert axe_findings(page) == []
    page.locator("#ended a").first.click()
    until(page, DIALOG_IS_OPEN)
    assert axe_findings(page) == []


def test_a_server_that_goes_and_comes_back_is_seen(page: Page, tiny_model: Path) -> None:
    stop: Callable[[], None]
    served, stop = start_server(tiny_model)
    open_dashboard(page, served)
    stop()
    until(page, "document.getElementById('state').textContent.includes('trying again')")
    until(page, "document.getElementById('state').textContent.includes('What stands here is of ')")
    state = page.locator("#state").bounding_box()
    assert state is not None
    assert 0 <= state["y"] < WIDE["height"]
    _, stop = start_server(tiny_model, port=httpx.URL(served.url).port)
    try:
        until(page, LIVE)
        until(page, "document.getElementById('health').textContent.startsWith('Healthy')")
    finally:
        stop()
    problems_of(page).clear()  # the browser notes each refused connection


def test_a_stream_that_falls_silent_is_begun_anew(page: Page, operated: Served) -> None:
    """As after a night in a bag: the connection is open still, and nothing comes."""
    page.add_init_script(
        "const real = fetch; let left = 1; window.fetch = (path, options) => {"
        " if (!String(path).startsWith('/admin/live') || !left--) return real(path, options);"
        " const body = new ReadableStream({ start(it) { options.signal.addEventListener('abort',"
        " () => it.error(new DOMException('stopped', 'AbortError'))); } });"
        " return Promise.resolve(new Response(body)); };"
    )
    page.goto(f"{operated.url}/dashboard")
    until(page, LIVE)
