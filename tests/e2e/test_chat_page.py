"""The chat page over a real server: what turns reuse, answers under way, a server that goes and comes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.e2e.browsing import PHONE, needs_chromium, problems_of, until
from tests.e2e.chatting import (
    COMPLETIONS,
    LAST_REUSE,
    Wire,
    act,
    ask,
    open_chat,
    set_fields,
    settle,
    texts,
    without_end,
)
from tests.e2e.conftest import Served

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = needs_chromium
GROWS = "[...document.querySelectorAll('.answer')].at(-1)?.textContent.length > 5"
STATE = "document.getElementById('state').textContent"


def in_sight(page: Page, selector: str) -> bool:
    """Whether the last such element lies within the window."""
    script = (
        "selector => { const box = [...document.querySelectorAll(selector)].at(-1).getBoundingClientRect();"
        " return box.bottom > 0 && box.bottom <= innerHeight + 1; }"
    )
    return bool(page.evaluate(script, selector))


def test_each_turn_shows_what_it_reused_and_explains_it(page: Page, served: Served) -> None:
    open_chat(page, served.url)
    set_fields(page, limit="8", temperature="0")
    ask(page, "What is <b>bold</b>?")
    assert page.evaluate(LAST_REUSE).startswith("0 of ")
    assert page.locator(".question b").count() == 0  # what is said is text
    ask(page, "And then?")
    assert "from device" in page.evaluate(LAST_REUSE)
    assert page.locator(".bar .device").count() == 1
    assert "first token" in texts(page, ".speed")[-1]
    act(page, "Explain what was reused")
    until(page, "document.getElementById('why').open")
    assert "from device" in (page.text_content("#why-body") or "")
    page.keyboard.press("Escape")
    assert problems_of(page) == []


def test_a_phone_shows_it_all_and_an_answer_can_be_stopped(page: Page, served: Served) -> None:
    page.set_viewport_size(PHONE)
    page.emulate_media(color_scheme="dark")
    without_end(page)
    open_chat(page, served.url)
    set_fields(page, limit="1500")
    page.fill("#question", "Tell me a long story")
    page.click("#send")
    until(page, GROWS)
    page.dispatch_event("#stop", "click")  # it moves while the answer grows
    until(page, f"{STATE} === 'stopped'")
    assert page.get_by_role("button", name="Continue").is_visible()
    until(page, f"document.documentElement.scrollWidth <= {PHONE['width']}")
    assert page.evaluate("document.getElementById('send').getBoundingClientRect().height") >= 32  # a thumb
    assert problems_of(page) == []


def test_a_new_conversation_during_an_answer_knows_nothing_of_it(page: Page, served: Served) -> None:
    sent = without_end(page)
    open_chat(page, served.url)
    set_fields(page, limit="600")
    page.fill("#question", "a secret")
    page.keyboard.press("Enter")
    until(page, GROWS)
    page.click("#again")
    assert page.is_visible("#send")
    page.fill("#limit", "4")
    ask(page, "what did I say?")
    ask(page, "and now?")
    contents = [[one["content"] for one in body["messages"]] for body in sent]
    assert contents[1] == ["what did I say?"]
    assert [contents[2][0], contents[2][-1]] == ["what did I say?", "and now?"]
    assert texts(page, ".question") == ["what did I say?", "and now?"]
    page.get_by_role("link", name="a secret").click()
    until(page, "document.querySelector('.question')?.textContent === 'a secret'")
    until(page, GROWS)
    page.keyboard.press("Escape")
    settle(page)
    assert texts(page, ".question") == ["a secret"]
    assert problems_of(page) == []


def test_the_page_follows_an_answer_unless_its_reader_scrolled_up(page: Page, served: Served) -> None:
    page.set_viewport_size(PHONE)
    without_end(page)
    open_chat(page, served.url)
    set_fields(page, limit="60")
    for number in range(2):
        ask(page, f"question {number} " + "that is long " * 30)
        assert in_sight(page, ".reuse")
    page.fill("#question", "the last")
    page.keyboard.press("Enter")
    until(page, GROWS)
    page.evaluate("document.documentElement.scrollTop = 0")
    settle(page)
    assert page.evaluate("document.documentElement.scrollTop") == 0


def test_a_cut_answer_goes_on(page: Page, served: Served) -> None:
    sent = without_end(page)
    open_chat(page, served.url)
    set_fields(page, limit="8", temperature="0")
    ask(page, "Tell me a story")
    before = texts(page, ".answer")[0]
    assert "Cut by the token limit." in texts(page, ".outcome")[0]
    act(page, "Continue")
    settle(page)
    assert sent[1]["continue_final_message"] is True
    assert sent[1]["messages"][-1]["role"] == "assistant"
    after = texts(page, ".answer")[0]
    assert len(after) > len(before)
    assert page.locator("#turns > li").count() == 2
    assert "from device" in page.evaluate(LAST_REUSE)
    assert problems_of(page) == []


def test_a_question_without_an_answer_stays_and_is_not_sent_along(page: Page, served: Served) -> None:
    open_chat(page, served.url)
    set_fields(page, limit="4")
    ask(page, "are you there?")
    page.route(COMPLETIONS, lambda route: route.abort())
    ask(page, "and now?")
    until(page, f"{STATE} === 'the server is back'")  # it was there all along
    assert in_sight(page, "#state")
    assert "can't be reached" in texts(page, ".outcome")[-1]
    page.reload()
    until(page, "document.querySelectorAll('.question').length === 2")
    page.unroute(COMPLETIONS)
    sent = without_end(page)
    ask(page, "and then?")
    assert [one["content"] for one in sent[0]["messages"]][2:] == ["and then?"]
    page.locator("#turns > li").nth(2).get_by_role("button", name="The branch before").click()
    until(page, "[...document.querySelectorAll('.question')].at(-1).textContent === 'and now?'")
    act(page, "Try again")
    settle(page)
    assert page.locator(".reuse").count() == 2
    assert page.locator(".outcome").filter(has_text="reached").count() == 0


@pytest.mark.slow
def test_a_server_that_dies_in_mid_answer_and_comes_back(page: Page, served: Served) -> None:
    wire = Wire(served.url)
    without_end(page)
    open_chat(page, wire.url)
    set_fields(page, limit="1500")
    page.fill("#question", "Tell me a story")
    page.keyboard.press("Enter")
    until(page, GROWS)
    page.fill("#question", "a draft")
    wire.cut()
    settle(page)
    until(page, f'{STATE} === "the server can\'t be reached; waiting for it"')
    assert "isn't whole" in texts(page, ".outcome")[0]
    before = texts(page, ".answer")[0]
    wire.mend()
    until(page, f"{STATE} === 'the server is back'")
    assert page.input_value("#question") == "a draft"
    page.fill("#limit", "4")
    act(page, "Continue")
    settle(page)
    assert len(texts(page, ".answer")[0]) > len(before)
    wire.cut()
    assert [text for text in problems_of(page) if "net::ERR" not in text] == []


@pytest.mark.slow
def test_a_browser_that_sleeps_in_mid_answer_shows_all_of_it(page: Page, served: Served) -> None:
    """Nothing runs in a frozen page; the server goes on, and the page reads the rest when it wakes."""
    without_end(page)
    open_chat(page, served.url)
    set_fields(page, limit="1500")
    page.fill("#question", "Tell me a story")
    page.keyboard.press("Enter")
    until(page, GROWS)
    browser = page.context.new_cdp_session(page)
    browser.send("Page.setWebLifecycleState", {"state": "frozen"})
    time.sleep(2)
    assert httpx.get(f"{served.url}/health", trust_env=False, timeout=5).status_code == 200
    browser.send("Page.setWebLifecycleState", {"state": "active"})
    settle(page)
    assert not any("isn't whole" in outcome for outcome in texts(page, ".outcome"))
    assert "tokens" in texts(page, ".speed")[-1]
    assert problems_of(page) == []


@pytest.mark.slow
def test_two_tabs_see_each_other(page: Page, served: Served) -> None:
    open_chat(page, served.url)
    set_fields(page, limit="4")
    other = page.context.new_page()
    open_chat(other, served.url)
    ask(page, "from the first tab")
    other.get_by_role("link", name="from the first tab").click()
    until(other, "document.querySelectorAll('.reuse').length === 1")
    ask(other, "from the second tab")
    until(page, "document.querySelectorAll('.reuse').length === 2")
    assert texts(page, ".answer") == texts(other, ".answer")
