"""The messages said so far, as the server takes them."""

from __future__ import annotations

from typing import Any


class Conversation:
    """Messages of one chat; the server is sent all of them with each question."""

    def __init__(self, system: str | None, extra: dict[str, Any]) -> None:
        """`extra`: keys of each request's body beside model and messages."""
        self._start = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._start)
        self._extra = extra

    @property
    def num_turns(self) -> int:
        """Answers so far."""
        return sum(message["role"] == "assistant" for message in self._messages)

    def body(self, model: str, question: str) -> dict[str, Any]:
        """Return the body that asks `question`; nothing is remembered yet."""
        messages = [*self._messages, {"role": "user", "content": question}]
        usage = {"stream_options": {"include_usage": True}}
        return {"model": model, "messages": messages, **usage, **self._extra}

    def add(self, question: str, answer: str) -> None:
        """Remember a turn. An answer that was stopped is what the user saw of it."""
        self._messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def reset(self) -> None:
        """Begin anew, with the system prompt alone."""
        self._messages = list(self._start)
