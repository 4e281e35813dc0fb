"""Recordings of agents (`tests/recordings`): what an agent sent, with other words in place of its texts.

In ``parts`` and ``requests`` an object with one key that begins with "~" stands for something: ``~text`` and
``~nonce`` a text by its number, ``~id`` an id, ``~part`` a part, ``~json`` JSON sent as text, ``~pattern``,
``~grammar``, ``~model``. A text is (its parent, how many characters it shares with that, its length): what is
shared is as long as it was, and words of ours stand there.
"""

from __future__ import annotations

import hashlib
from typing import Any

import orjson

from stemma.errors import InvalidRequest

_MAX_CHARS = 64 << 20
_MAX_DEPTH = 64
_NONCE = "x-anthropic-billing-header: "
_WORDS = tuple("amber birch cedar delta ember fern grove heron iris jade larch maple".split())  # noqa: SIM905


def is_recording(value: Any) -> bool:
    """Tell whether a JSON document is a recording."""
    return isinstance(value, dict) and {"agent", "texts", "ids", "parts", "requests"} <= value.keys()


def recorded_bodies(recording: dict[str, Any]) -> list[Any]:
    """Return the requests of a recording, each with `path` and `body`. Raises InvalidRequest."""
    try:
        reader = _Reader(recording)
        return [{"path": one["path"], "body": reader.value(one["body"])} for one in recording["requests"]]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
        raise InvalidRequest(f"the recording is broken: {type(error).__name__}: {error}") from error


class _Reader:
    def __init__(self, recording: dict[str, Any]) -> None:
        self._ids: list[Any] = recording["ids"]
        self._parts: list[Any] = recording["parts"]
        self._texts: list[str] = []
        self._num_chars = 0
        for number, (parent, shared, length) in enumerate(recording["texts"]):
            if not -1 <= parent < number or not 0 <= shared <= length:
                raise InvalidRequest(f"the recording is broken: text {number}")
            self._grow(length)
            head = self._texts[parent][:shared] if shared else ""
            self._texts.append(head + _words(number, length - len(head)))

    def value(self, given: Any, depth: int = 0) -> Any:
        """Return what `given` stands for."""
        if depth > _MAX_DEPTH:
            raise InvalidRequest(f"the recording is nested more than {_MAX_DEPTH} levels deep")
        if isinstance(given, list):
            return [self.value(one, depth + 1) for one in given]
        if not isinstance(given, dict):
            return given
        if len(given) == 1 and (kind := next(iter(given))).startswith("~"):
            return self._meant(kind, given[kind], depth)
        return {key: self.value(one, depth + 1) for key, one in given.items()}

    def _meant(self, kind: str, what: Any, depth: int) -> Any:
        if kind in ("~text", "~nonce"):
            text = self._texts[what]
            self._grow(len(text))
            return text if kind == "~text" else _NONCE + text
        if kind == "~id":
            prefix, length = self._ids[what]
            return (prefix + hashlib.blake2b(str(what).encode()).hexdigest())[:length]
        if kind == "~part":
            self._grow(1024)
            return self.value(self._parts[what], depth + 1)
        if kind == "~json":
            return orjson.dumps(self.value(what[0], depth + 1)).decode()
        return {"~pattern": "^.*$", "~grammar": 'start: "a"', "~model": "model"}[kind]

    def _grow(self, num_chars: int) -> None:
        """Count what is built: parts may name parts, each twice."""
        self._num_chars += num_chars
        if self._num_chars > 8 * _MAX_CHARS:
            raise InvalidRequest("the recording stands for too much text")


def _words(number: int, length: int) -> str:
    """Return `length` characters of words, chosen by `number`."""
    words: list[str] = []
    size = counter = 0
    while size < length:
        for byte in hashlib.blake2b(f"{number}.{counter}".encode()).digest():
            words.append(_WORDS[byte % len(_WORDS)])
            size += len(words[-1]) + 1
        counter += 1
    return " ".join(words)[:length].ljust(length, "x")
