"""JSON schemas as llguidance can compile them: some keywords that it doesn't know are said in others.

What a rewritten schema allows, the original allows too, but for two keywords that no grammar can hold:
``uniqueItems`` where the possible arrays can't be written out, and ``oneOf`` whose schemas overlap, which is
read as ``anyOf``. What can't be rewritten stays as it is, and llguidance refuses it; `advice` says what to
write instead.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from itertools import permutations
from typing import Any

_Schema = dict[str, Any]
MOST_ARRAYS = 1000
"""Arrays of unlike items that are written out."""
_NOTES = frozenset({"title", "description", "default", "examples", "$comment"})
"""Keywords that allow and forbid nothing."""
_ONE, _LISTS, _MAPS = (
    ("items", "additionalProperties"),
    ("allOf", "anyOf", "oneOf", "prefixItems"),
    ("properties", "patternProperties", "$defs", "definitions"),
)
"""Keywords that hold a schema, several, and several by name."""
_ADVICE = {
    "propertyNames": "propertyNames works with an enum or a pattern alone beside additionalProperties; else "
    "write patternProperties with additionalProperties false",
    "not": "write what is allowed instead of not: an enum, a pattern, or anyOf",
    "if": "write if, then and else as anyOf of two whole schemas",
    "dependentRequired": "write dependentRequired as anyOf: a schema with both required, one without",
    "dependentSchemas": "write dependentSchemas as anyOf of whole schemas",
    "contains": "write contains as prefixItems, or say the items one by one",
}


_KNOWN_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
"""Formats that llguidance enforces; all others say nothing, as JSON Schema has it."""
_REWRITTEN = ('"uniqueItems"', '"propertyNames"', '"format"', "(?!")
_NOT_ALL_OF = re.compile(r"\^\(\?!\^(\[[^\[\]^]+\])\*\$\)")
"""Pydantic's way to say of a ``Decimal`` that it isn't signs and dots alone."""


def rewritten(text: str) -> str:
    """Return a JSON schema's text in keywords that llguidance knows, as far as that is possible."""
    if not any(word in text for word in _REWRITTEN):
        return text
    try:
        return json.dumps(_rewrite(json.loads(text)), ensure_ascii=False)
    except (ValueError, RecursionError):  # llguidance says what is wrong
        return text


def embedded(schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Return a JSON schema as it stands in a grammar of Lark's, read with llguidance's `options`."""
    text = rewritten(json.dumps(schema, ensure_ascii=False))
    return json.dumps({**json.loads(text), "x-guidance": dict(options)}, ensure_ascii=False)


def advice(reason: str) -> str:
    """Return llguidance's reason for a refusal with what to write instead of the keywords that it names."""
    if "Unimplemented keys" not in reason:
        return reason
    return "; ".join([reason, *(hint for key, hint in _ADVICE.items() if f'"{key}"' in reason)])


def _rewrite(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for key in _ONE:
        if isinstance(result.get(key), dict):
            result[key] = _rewrite(result[key])
    for key in _LISTS:
        if isinstance(result.get(key), list):
            result[key] = [_rewrite(each) for each in result[key]]
    for key in _MAPS:
        if isinstance(result.get(key), dict):
            result[key] = {name: _rewrite(each) for name, each in result[key].items()}
    steps: tuple[Callable[[_Schema], _Schema], ...] = (
        _without_unique_items,
        _without_property_names,
        _without_unknown_format,
        _without_look_ahead,
    )
    for step in steps:
        result = step(result)
    return result


def _without_unique_items(schema: _Schema) -> _Schema:
    unique, most = schema.get("uniqueItems"), schema.get("maxItems", math.inf)
    if unique is None:
        return schema
    rest = {key: value for key, value in schema.items() if key != "uniqueItems"}
    if unique is False or (unique is True and _is_count(most) and most <= 1):
        return rest
    if unique is not True:
        return schema
    least = schema.get("minItems", 0)
    values = _values(schema.get("items"))
    plain = _NOTES | {"type", "items", "minItems", "maxItems", "uniqueItems"}
    if values is None or schema.keys() - plain or schema.get("type", "array") != "array":
        return rest
    if not (_is_count(least) and (most == math.inf or _is_count(most))):
        return rest
    lengths = range(least, int(min(most, len(values))) + 1)
    if not lengths or sum(math.perm(len(values), length) for length in lengths) > MOST_ARRAYS:
        return rest
    arrays = [list(array) for length in lengths for array in permutations(values, length)]
    return {key: rest[key] for key in rest if key in _NOTES} | {"enum": arrays}


def _values(items: Any) -> list[Any] | None:
    """Return the values of items that are an enum of unlike texts, or of unlike whole numbers; else None."""
    if not isinstance(items, dict) or not isinstance(items.get("enum"), list):
        return None
    kinds = {"string": str, "integer": int}
    values: list[Any] = list(dict.fromkeys(v for v in items["enum"] if isinstance(v, (str, int))))
    named = items.get("type")
    kind = (
        kinds.get(named) if isinstance(named, str) else type(values[0]) if values and named is None else None
    )
    is_plain = kind is not None and not items.keys() - (_NOTES | {"enum", "type"})
    is_whole = len(values) <= len(items["enum"]) and all(type(value) is kind for value in items["enum"])
    return values if is_plain and is_whole and values else None


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _without_property_names(schema: _Schema) -> _Schema:
    names = schema.get("propertyNames")
    rest = {key: value for key, value in schema.items() if key != "propertyNames"}
    if names is True or names == {}:
        return rest
    if not isinstance(names, dict) or "properties" in schema or "patternProperties" in schema:
        return schema
    said = names.keys() - (_NOTES | {"type"})
    if names.get("type", "string") != "string" or len(said) != 1:
        return schema
    value = rest.pop("additionalProperties", {})
    if said == {"pattern"}:
        return rest | {"patternProperties": {names["pattern"]: value}, "additionalProperties": False}
    known = names.get("enum")
    if not isinstance(known, list) or not all(isinstance(name, str) for name in known):
        return schema
    return rest | {"properties": dict.fromkeys(known, value), "additionalProperties": False}


def _without_unknown_format(schema: _Schema) -> _Schema:
    named = schema.get("format")
    if not isinstance(named, str) or named in _KNOWN_FORMATS:
        return schema
    return {key: value for key, value in schema.items() if key != "format"}


def _without_look_ahead(schema: _Schema) -> _Schema:
    """Say ``^(?!^[abc]*$)`` as a second pattern: there is a character that is none of these."""
    pattern = schema.get("pattern")
    if not isinstance(pattern, str) or "allOf" in schema:
        return schema
    found = _NOT_ALL_OF.match(pattern)
    if found is None:
        return schema
    others = {"type": "string", "pattern": f"[^{found.group(1)[1:]}"}
    return schema | {"pattern": f"^{pattern[found.end() :]}", "allOf": [others]}
