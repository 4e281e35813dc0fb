"""Events that are written once but for their text."""

from __future__ import annotations

from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from stemma.server.transport.sse import TextEvent, event


def body(text: str) -> dict[str, Any]:
    return {"id": '"text"', "choices": [{"index": 0, "text": text, "logprobs": None}], "usage": None}


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_it_is_the_event_with_that_text(text: str) -> None:
    assert TextEvent(body)(text) == event(body(text))
    assert orjson.loads(TextEvent(body)(text).removeprefix(b"data: "))["choices"][0]["text"] == text
