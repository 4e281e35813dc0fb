"""What agents sent, without a text of theirs: structure, names of fields, numbers, and lengths of texts.

A recording is JSON. `texts` is the table of `filler`; `ids` are prefixes and lengths; `parts` are values that
occur more than once. In `parts` and in the bodies of `requests` an object with one key that begins with "~"
stands for something: ``~text`` a text, ``~nonce`` one behind the name of a header, ``~id`` an id, ``~part`` a
part, ``~json`` JSON that is sent as text, ``~pattern`` a regular expression, ``~grammar`` one in Lark,
``~model`` the model's name. Other strings are plain identifiers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.conformance.agents.filler import Texts, as_json_text, expand
from tests.conformance.agents.serving import Exchange
from tests.conformance.agents.tiny import ROOT

DIRECTORY = ROOT / "tests" / "recordings"
IDENTIFIER = re.compile(r"[A-Za-z_$][A-Za-z0-9_.$-]{0,63}")
POINTER = re.compile(r"#(/[A-Za-z0-9_$.-]+)*")
MEDIA = ("application/json", "text/event-stream", "*/*")
SCHEMA = "http://json-schema.org/draft-07/schema#"
GRAMMAR = 'start: "begin" line+ "end"\nline: /[a-z]+/ ","\n'
_KEPT = frozenset(
    {
        *("type", "role", "name", "effort", "format", "display", "summary", "tool_choice", "keep", "status"),
        *("include", "required", "enum", "ttl", "verbosity", "syntax", "phase", "execution"),
    }
)
_HEADERS = frozenset({"anthropic-beta", "anthropic-version", "accept", "content-type"})
_NOT_KEPT = frozenset(
    {"host", "content-length", "connection", "authorization", "accept-encoding", "x-api-key"}
)
_ID = re.compile(r"([a-z]+[_-])?[A-Za-z0-9_.:-]{6,127}")
NONCE = "x-anthropic-billing-header: "
"""Claude Code's first text begins with it, and servers know it by that."""
_MIN_PART = 48
"""Characters of JSON that a part has at least."""


class Recorder:
    """Turns what was sent into a recording."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._texts = Texts()
        self._ids: dict[str, int] = {}
        self._id_table: list[tuple[str, int]] = []

    def request(self, session: int, exchange: Exchange) -> dict[str, Any]:
        """Return one request."""
        headers = {name: self._header(name, value) for name, value in sorted(exchange.headers.items())}
        return {
            "session": session,
            "path": exchange.path,
            "headers": {name: value for name, value in headers.items() if name not in _NOT_KEPT},
            "body": self._value("", exchange.json),
        }

    def tables(self) -> dict[str, Any]:
        """Return what stands for texts and ids."""
        return {"texts": self._texts.table, "ids": self._id_table}

    def _header(self, name: str, value: str) -> Any:
        return (
            value if name in _HEADERS else self._string(f"{name}_id" if _ID.fullmatch(value) else "", value)
        )

    def _value(self, field: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {self._key(name): self._value(name, one) for name, one in value.items()}
        if isinstance(value, list):
            return [self._value(field, one) for one in value]
        return self._string(field, value) if isinstance(value, str) else value

    def _key(self, name: str) -> str:
        if IDENTIFIER.fullmatch(name) and not name.startswith("~"):
            return name
        return f"key_{self._texts.add(name)}"

    def _string(self, field: str, value: str) -> Any:
        if value == self._model:
            return {"~model": True}
        if field == "$schema":
            return SCHEMA
        if field == "pattern":
            return {"~pattern": True}
        if field == "definition":
            return {"~grammar": True}
        if field == "$ref" and POINTER.fullmatch(value):
            return value
        if field in _KEPT and IDENTIFIER.fullmatch(value):
            return value
        if (field == "id" or field.endswith("_id") or field.endswith("_key")) and _ID.fullmatch(value):
            return {"~id": self._id(value)}
        if value.startswith(NONCE):
            return {"~nonce": self._texts.add(value.removeprefix(NONCE))}
        if (parsed := _parsed(value)) is not None:
            is_spaced = value == as_json_text(parsed, is_spaced=True)
            return {"~json": [self._value("", parsed), is_spaced]}
        return {"~text": self._texts.add(value)}

    def _id(self, value: str) -> int:
        if value not in self._ids:
            found = re.match(r"[a-z]+_", value)
            self._ids[value] = len(self._id_table)
            self._id_table.append((found.group() if found else "", len(value)))
        return self._ids[value]


def _parsed(value: str) -> Any:
    if not value.startswith("{"):
        return None
    try:
        return json.loads(value)
    except ValueError:
        return None


def write(name: str, version: str, sessions: Sequence[Sequence[Exchange]]) -> None:
    """Write the recording of an agent: its first session, and the second one's first three requests."""
    asked = [[one for one in session if one.body.startswith(b"{")] for session in sessions]
    kept = [(0, one) for one in asked[0]] + [(number, one) for number in (1,) for one in asked[number][:3]]
    recorder = Recorder(kept[-1][1].json["model"])
    requests = [recorder.request(session, one) for session, one in kept]
    parts = _Parts([request["body"] for request in requests])
    for request in requests:
        request["body"] = parts.shortened(request["body"])
    content = {
        "agent": name,
        "version": version,
        **recorder.tables(),
        "parts": parts.table,
        "requests": requests,
    }
    lines = [f'"{key}": {json.dumps(value, separators=(",", ":"))}' for key, value in content.items()]
    DIRECTORY.mkdir(exist_ok=True)
    (DIRECTORY / f"{name}.json").write_text("{" + ",\n".join(lines) + "}\n")


class _Parts:
    """Values that occur more than once, each kept once."""

    def __init__(self, bodies: Sequence[Any]) -> None:
        self.table: list[Any] = []
        self._numbers: dict[str, int] = {}
        self._counts: Counter[str] = Counter()
        for body in bodies:
            self._count(body)

    def _count(self, value: Any) -> None:
        if isinstance(value, dict | list):
            text = json.dumps(value)
            self._counts[text] += 1
            if self._counts[text] == 1:
                for one in value.values() if isinstance(value, dict) else value:
                    self._count(one)

    def shortened(self, value: Any) -> Any:
        """Return a value with what occurs again replaced by its number."""
        if not isinstance(value, dict | list):
            return value
        text = json.dumps(value)
        if text in self._numbers:
            return {"~part": self._numbers[text]}
        if isinstance(value, dict):
            short: Any = {key: self.shortened(one) for key, one in value.items()}
        else:
            short = [self.shortened(one) for one in value]
        if self._counts[text] == 1 or len(text) < _MIN_PART:
            return short
        self._numbers[text] = len(self.table)
        self.table.append(short)
        return {"~part": self._numbers[text]}


class Recording:
    """A recording that was read."""

    def __init__(self, file: Path) -> None:
        self.raw = json.loads(file.read_text())
        self.name: str = self.raw["agent"]
        self.requests: list[dict[str, Any]] = self.raw["requests"]
        self._texts = expand(self.raw["texts"])

    def body(self, request: dict[str, Any], model: str) -> Any:
        """Return what is sent to a server of `model`."""
        return self._value(request["body"], model)

    def headers(self, request: dict[str, Any]) -> dict[str, str]:
        """Return a request's headers."""
        told = {name: str(self._value(value, "")) for name, value in request["headers"].items()}
        return {name: value.replace(" ", "-") for name, value in told.items() if name not in _HEADERS} | {
            name: value for name, value in told.items() if name in _HEADERS
        }

    def _value(self, value: Any, model: str) -> Any:
        if isinstance(value, list):
            return [self._value(one, model) for one in value]
        if not isinstance(value, dict):
            return value
        [kind, *more] = value or [""]
        if not more and kind.startswith("~"):
            return self._meant(kind, value[kind], model)
        return {key: self._value(one, model) for key, one in value.items()}

    def _meant(self, kind: str, what: Any, model: str) -> Any:
        if kind == "~text":
            return self._texts[what]
        if kind == "~nonce":
            return NONCE + self._texts[what]
        if kind == "~id":
            prefix, length = self.raw["ids"][what]
            return (prefix + hashlib.blake2b(str(what).encode()).hexdigest())[:length]
        if kind == "~part":
            return self._value(self.raw["parts"][what], model)
        if kind == "~json":
            return as_json_text(self._value(what[0], model), is_spaced=what[1])
        return {"~pattern": "^.*$", "~grammar": GRAMMAR, "~model": model}[kind]


def read_all() -> list[Recording]:
    """Return all recordings."""
    return [Recording(file) for file in sorted(DIRECTORY.glob("*.json"))]
