"""What tests of the chat page share: a reader's hands, a scripted model, and a wire that can be cut."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tests.e2e.browsing import until

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

COMPLETIONS = "**/v1/chat/completions"
LAST_REUSE = "[...document.querySelectorAll('.reuse')].at(-1)?.textContent ?? ''"


def open_chat(page: Page, url: str) -> None:
    page.goto(url + "/")
    until(page, "document.getElementById('model').textContent === 'tiny'")


def set_fields(page: Page, **values: str) -> None:
    """Fill fields of the settings' panel; `_` stands for `-`."""
    if not page.evaluate("document.getElementById('panel').open"):
        page.click("#panel > summary")
    for name, value in values.items():
        page.fill(f"#{name.replace('_', '-')}", value)


def settle(page: Page) -> None:
    """Wait for the end of the answer that is under way."""
    until(page, "document.getElementById('stop').hidden")


def ask(page: Page, question: str) -> None:
    page.fill("#question", question)
    page.keyboard.press("Enter")
    settle(page)


def texts(page: Page, selector: str) -> list[str]:
    return page.locator(selector).all_text_contents()


def act(page: Page, label: str, turn: int = -1) -> None:
    """Press a button of a turn, the last by default."""
    turns = page.locator("#turns > li")
    index = turn if turn >= 0 else turns.count() + turn
    turns.nth(index).get_by_role("button", name=label, exact=True).click()


def without_end(page: Page) -> list[dict[str, Any]]:
    """Let answers go on to their limit: the tiny model may end earlier. Returns the bodies that are sent."""
    sent: list[dict[str, Any]] = []

    def lengthen(route: Route) -> None:
        body = json.loads(route.request.post_data or "{}")
        sent.append(body)
        route.continue_(post_data=json.dumps(body | {"ignore_eos": True}))

    page.route(COMPLETIONS, lengthen)
    return sent


class ScriptedModel:
    """Answers in place of the server; `replies` are deltas with a reason to finish, one reply a request."""

    def __init__(self, page: Page, *replies: tuple[dict[str, Any], str]) -> None:
        self.replies = list(replies)
        self.sent: list[dict[str, Any]] = []
        page.route(COMPLETIONS, self._answer)

    def contents(self, request: int = -1) -> list[Any]:
        return [one["content"] for one in self.sent[request]["messages"]]

    def _answer(self, route: Route) -> None:
        self.sent.append(json.loads(route.request.post_data or "{}"))
        delta, reason = self.replies.pop(0)
        usage = {
            "prompt_tokens": 10,
            "completion_tokens": 3,
            "stemma": {"cached_tokens_by_tier": {"host": 4}},
        }
        events = (
            {"choices": [{"delta": delta, "finish_reason": None}]},
            {"choices": [{"delta": {}, "finish_reason": reason}]},
            {"choices": [], "usage": usage},
        )
        lines = [json.dumps({"id": "chatcmpl-1", "model": "tiny", **event}) for event in events]
        body = "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])
        route.fulfill(status=200, content_type="text/event-stream", body=body)


def said(text: str, reason: str = "stop") -> tuple[dict[str, Any], str]:
    return {"content": text}, reason


class Wire:
    """A way to a server, at a port of its own, that can be cut and mended."""

    def __init__(self, url: str) -> None:
        self._to = urlsplit(url)
        self._port = 0
        self._open: list[socket.socket] = []
        self.mend()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def mend(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._port = self._listener.getsockname()[1]
        threading.Thread(target=self._take, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        for one in (self._listener, *self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._open.clear()

    def _take(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection((self._to.hostname, self._to.port))
                self._open += [client, server]
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=_carry, args=ends, daemon=True).start()


def _carry(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
