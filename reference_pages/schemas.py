"""What a value may be, in words, from its JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]
_BOUNDS = (
    ("minimum", "from {}"),
    ("exclusiveMinimum", "above {}"),
    ("gt", "above {}"),
    ("maximum", "up to {}"),
    ("exclusiveMaximum", "below {}"),
    ("minLength", "at least {} long"),
    ("maxLength", "at most {} long"),
    ("minItems", "at least {}"),
    ("maxItems", "at most {}"),
    ("maxProperties", "at most {} entries"),
)


def kind(schema: Schema) -> str:
    """Return a type with its bounds: ``integer, from 1, up to 64``; null is left out."""
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[1]
    if (choices := schema.get("anyOf") or schema.get("oneOf")) is not None:
        kinds = dict.fromkeys(kind(one) for one in choices if one.get("type") != "null")
        return " or ".join(kinds)
    return ", ".join([_plain(schema), *bounds(schema)])


def bounds(schema: Schema) -> list[str]:
    """Return the limits that a schema says."""
    return [words.format(f"{schema[key]:,}") for key, words in _BOUNDS if key in schema]


def _plain(schema: Schema) -> str:
    name = str(schema.get("type", "any"))
    if name == "array":
        return f"list of {kind(schema.get('items', {}))}"
    return "path" if schema.get("format") == "path" else name
