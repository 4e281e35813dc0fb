"""The chat page and the API's description in a real browser, on a desktop and on a phone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.e2e.browsing import PHONE, needs_chromium, problems_of, until
from tests.e2e.conftest import Served, start_server

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

LAST_REUSE = "[...document.querySelectorAll('.reuse')].at(-1)?.textContent ?? ''"


def ask(page: Page, question: str) -> None:
    before = page.locator(".reuse").count()
    page.fill("#question", question)
    page.keyboard.press("Enter")
    until(page, f"document.querySelectorAll('.reuse').length === {before + 1}")
    until(page, "document.getElementById('stop').hidden")


@needs_chromium
def test_a_chat_shows_what_each_turn_reused(page: Page, served: Served) -> None:
    page.goto(served.url + "/")
    until(page, "document.getElementById('model').textContent === 'tiny'")
    page.click("summary")
    page.fill("#limit", "8")
    page.fill("#temperature", "0")
    ask(page, "What is <b>bold</b>?")
    assert page.evaluate(LAST_REUSE).startswith("0 of ")
    assert page.locator(".question b").count() == 0  # what is said is text
    ask(page, "And then?")
    assert "from device" in page.evaluate(LAST_REUSE)
    assert page.locator("#turns li").count() == 2
    page.click("#again")
    assert page.locator("#turns li").count() == 0
    assert problems_of(page) == []


@needs_chromium
def test_a_phone_shows_it_all_and_an_answer_can_be_stopped(page: Page, served: Served) -> None:
    page.set_viewport_size(PHONE)
    page.emulate_media(color_scheme="dark")
    page.goto(served.url + "/")
    until(page, "document.getElementById('model').textContent === 'tiny'")
    page.click("summary")
    page.fill("#limit", "1500")
    page.fill("#question", "Tell me a long story")

    def without_end(route: Route) -> None:
        """The tiny model may end its answer before it can be stopped."""
        body = json.loads(route.request.post_data or "{}")
        route.continue_(post_data=json.dumps(body | {"ignore_eos": True}))

    page.route("**/v1/chat/completions", without_end)
    page.click("#send")
    until(page, "document.querySelector('.answer')?.textContent.length > 5")
    page.dispatch_event("#stop", "click")  # it moves while the answer grows
    until(page, "document.getElementById('state').textContent === 'stopped'")
    until(page, f"document.documentElement.scrollWidth <= {PHONE['width']}")
    ask_height = page.evaluate("document.getElementById('send').getBoundingClientRect().height")
    assert ask_height >= 32  # for a thumb
    assert problems_of(page) == []


def in_sight(page: Page, selector: str) -> bool:
    """Whether the last such element lies within the window."""
    script = (
        "selector => { const box = [...document.querySelectorAll(selector)].at(-1).getBoundingClientRect();"
        " return box.bottom > 0 && box.bottom <= innerHeight + 1; }"
    )
    return bool(page.evaluate(script, selector))


@needs_chromium
def test_a_new_conversation_knows_nothing_of_the_one_before(page: Page, served: Served) -> None:
    page.goto(served.url + "/")
    until(page, "document.getElementById('model').textContent === 'tiny'")
    sent: list[dict[str, Any]] = []

    def without_end(route: Route) -> None:
        body = json.loads(route.request.post_data or "{}")
        sent.append(body)
        route.continue_(post_data=json.dumps(body | {"ignore_eos": True}))

    page.route("**/v1/chat/completions", without_end)
    page.click("summary")
    page.fill("#limit", "1500")
    page.fill("#question", "a secret")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('.answer')?.textContent.length > 5")
    page.click("#again")
    assert page.is_visible("#send")
    page.fill("#limit", "4")
    ask(page, "what did I say?")
    ask(page, "and now?")
    contents = [[one["content"] for one in body["messages"]] for body in sent]
    assert contents[1] == ["what did I say?"]
    assert [contents[2][0], contents[2][-1]] == ["what did I say?", "and now?"]
    assert page.locator("#turns li").count() == 2


@needs_chromium
def test_the_page_follows_an_answer_unless_its_reader_scrolled_up(page: Page, served: Served) -> None:
    page.set_viewport_size(PHONE)
    page.goto(served.url + "/")
    until(page, "document.getElementById('model').textContent === 'tiny'")
    page.click("summary")
    page.fill("#limit", "300")
    for number in range(3):
        ask(page, f"question {number} " + "that is long " * 30)
        assert in_sight(page, ".reuse")
    page.evaluate("document.documentElement.scrollTop = 0")
    page.evaluate("document.querySelector('#turns').append('x'.repeat(9))")
    assert page.evaluate("document.documentElement.scrollTop") == 0


@needs_chromium
def test_a_server_that_is_gone_is_told_and_the_question_stays(page: Page, served: Served) -> None:
    page.goto(served.url + "/")
    until(page, "document.getElementById('model').textContent === 'tiny'")
    page.click("summary")
    page.fill("#limit", "4")
    ask(page, "are you there?")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.fill("#question", "and now?")
    page.keyboard.press("Enter")
    until(page, "document.getElementById('state').textContent === \"the server can't be reached\"")
    assert in_sight(page, "#state")
    assert page.input_value("#question") == "and now?"
    assert page.locator("#turns li").count() == 1
    page.unroute("**/v1/chat/completions")
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('.reuse').length === 2")
    assert page.locator("#turns li").count() == 2


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
