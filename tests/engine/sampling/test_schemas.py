"""Rewritten schemas: llguidance compiles them, and what they allow the originals allow."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher

from stemma.engine.sampling.grammar import JSON_OPTIONS
from stemma.engine.sampling.schemas import advice, rewritten

DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
"""As pydantic writes it."""
COLOURS = {"enum": ["red", "green", "blue"]}
REWRITTEN: list[dict[str, Any]] = [
    {"type": "array", "items": COLOURS, "uniqueItems": True},
    {"type": "array", "items": COLOURS, "uniqueItems": True, "minItems": 1, "maxItems": 2},
    {"type": "array", "items": {"type": "integer", "enum": [1, 2]}, "uniqueItems": True},
    {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "maxItems": 1},
    {"type": "array", "items": {"type": "string"}, "uniqueItems": False},
    {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
    {"type": "object", "propertyNames": {"pattern": "^a+$"}},
    {"properties": {"x": {"type": "array", "items": COLOURS, "uniqueItems": True}}, "type": "object"},
    {"anyOf": [{"type": "object", "propertyNames": {"pattern": "^a+$"}}, {"type": "null"}]},
    {"type": "string", "format": "path"},
    {"type": "object", "properties": {"a": {"type": "integer", "format": "int32"}}},
    {"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL}]},
    {"type": "string", "pattern": DECIMAL},
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "object", "propertyNames": {"minLength": 2}}, "propertyNames works with"),
    ({"not": {"type": "string"}}, "write what is allowed"),
    ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, "anyOf of two whole"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "both required"),
]
ARRAYS = [list(items) for n in range(4) for items in product(["red", "green", "blue", 1, 2, True], repeat=n)]
OBJECTS = [dict.fromkeys(names, 1) for names in (["a"], ["b"], ["a", "b"], ["aa"], ["c"], ["a", "c"], [])]
INSTANCES = [*ARRAYS, *OBJECTS, *({"x": array} for array in ARRAYS), None, 1, "a", "+", "-1.5", "."]


@pytest.mark.parametrize("schema", REWRITTEN, ids=lambda schema: json.dumps(schema)[:60])
def test_what_is_rewritten_compiles_and_allows_nothing_more(schema: dict[str, Any]) -> None:
    text = rewritten(json.dumps(schema))
    assert not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(text))
    original, changed = Draft202012Validator(schema), Draft202012Validator(json.loads(text))
    valid = [instance for instance in INSTANCES if changed.is_valid(instance)]
    assert valid
    assert all(original.is_valid(instance) for instance in valid)


LOOSENED: list[dict[str, Any]] = [
    {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    {"type": "array", "items": {"enum": list(range(9))}, "uniqueItems": True},
    {"type": "array", "items": {"enum": [1, True]}, "uniqueItems": True},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
]


@pytest.mark.parametrize("schema", LOOSENED, ids=str)
def test_what_no_grammar_can_hold_is_accepted_loosely(schema: dict[str, Any]) -> None:
    """Pydantic's ``set`` and overlapping alternatives come from every client library."""
    made = LLMatcher.grammar_from_json_schema(rewritten(json.dumps(schema)), overrides=JSON_OPTIONS)  # type: ignore[arg-type]
    assert not LLMatcher.validate_grammar(made)


@pytest.mark.parametrize(("schema", "words"), REFUSED, ids=lambda part: str(part)[:40])
def test_what_cannot_be_said_is_refused_with_advice(schema: dict[str, Any], words: str) -> None:
    text = rewritten(json.dumps(schema))
    reason = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(text))
    assert words in advice(reason)


def test_values_that_look_like_keywords_stay() -> None:
    schema = {"const": {"uniqueItems": True, "items": {"enum": ["a"]}}}
    assert json.loads(rewritten(json.dumps(schema))) == schema


@pytest.mark.parametrize("text", ['{"uniqueItems"', '{"uniqueItems": 1}', "[" * 60_000 + '"uniqueItems"'])
def test_what_is_no_schema_stays(text: str) -> None:
    assert json.loads(rewritten(text)) if text.endswith("}") else rewritten(text) == text
