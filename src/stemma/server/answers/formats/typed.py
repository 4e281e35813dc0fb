"""Arguments that aren't written as JSON: values as text, whose types the tool's schema knows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from stemma.server.answers.formats.literals import literal_as_json
from stemma.server.answers.json_text import escaped
from stemma.server.answers.parts import Parts
from stemma.server.answers.scanning import Markers, Reading, Scanner

_ANY = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_MAX_DEPTH = 16
"""References and alternatives that are followed in a schema."""


class TypedArguments:
    """Writes the arguments of one call as a JSON object."""

    def __init__(self, parts: Parts, schema: Mapping[str, Any]) -> None:
        self._parts = parts
        self._schema = schema
        self._is_empty = True

    def read(
        self, scanner: Scanner, key: str, closers: Markers, *, is_text: bool | None = None
    ) -> Reading[str | None]:
        """Read the value of `key` up to one of `closers`, which is passed and returned. None: the end.

        `is_text`: whether the value is a string, where the model says so.
        """
        self._parts.arguments(("{" if self._is_empty else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self._is_empty = False
        kinds = kinds_of(self._schema, key)
        if is_text is not None:
            kinds = frozenset({"string"}) if is_text else _ANY
        if kinds != {"string"}:
            text, closer = yield from scanner.take(closers)
            self._parts.arguments(text if closer is None else as_json(text, kinds))
            return closer
        self._parts.arguments('"')
        closer = yield from scanner.until(closers, lambda text: self._parts.arguments(escaped(text)))
        if closer is not None:
            self._parts.arguments('"')
        return closer

    def end(self) -> None:
        """There are no more."""
        self._parts.arguments("{}" if self._is_empty else "}")


def kinds_of(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """Return the JSON types that the property `key` may have; all if `schema` doesn't say."""
    properties = schema.get("properties")
    wanted = properties.get(key) if isinstance(properties, Mapping) else None
    return _kinds(wanted, schema, _MAX_DEPTH) or _ANY


def _kinds(wanted: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(wanted, Mapping) or not depth:
        return frozenset()
    if isinstance(reference := wanted.get("$ref"), str):
        return _kinds(_referred(reference, root), root, depth - 1)
    named = wanted.get("type")
    if isinstance(named, str):
        return frozenset({named}) & _ANY
    if isinstance(named, list):
        return frozenset(name for name in named if isinstance(name, str)) & _ANY
    values = wanted.get("enum", [wanted["const"]] if "const" in wanted else None)
    if isinstance(values, list):
        return frozenset().union(*(_kinds_of_value(value) for value in values))
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(several := wanted.get(word), list):
            return frozenset().union(*(_kinds(one, root, depth - 1) for one in several[:64]))
    return frozenset()


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def as_json(text: str, kinds: frozenset[str]) -> str:
    """Return `text` as JSON of one of `kinds` that aren't strings if it can be read so; else as a string."""
    literal = literal_as_json(text.strip())
    if literal is not None:
        value_kinds = _kinds_of_value(json.loads(literal))
        if value_kinds & (kinds - {"string"}) or ("string" not in kinds and "string" not in value_kinds):
            return literal
    return json.dumps(text, ensure_ascii=False)


def _kinds_of_value(value: Any) -> frozenset[str]:
    match value:
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"number", "integer"} if value.is_integer() else {"number"})
        case str():
            return frozenset({"string"})
        case None:
            return frozenset({"null"})
        case list():
            return frozenset({"array"})
        case _:
            return frozenset({"object"})
