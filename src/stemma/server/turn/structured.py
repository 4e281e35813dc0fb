"""Form that an answer must have: the fields of OpenAI, vLLM, SGLang and TGI, as one grammar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from stemma.engine.sampling.grammar import GrammarSpec
from stemma.errors import InvalidRequest
from stemma.server.schemas.openai import OpenAIRequest, ResponseFormat
from stemma.server.schemas.shared import StructuredOutputs


def requested_grammar(body: OpenAIRequest) -> GrammarSpec | None:
    """Return the one grammar that `body` asks for. Raises InvalidRequest if there are several."""
    found = [
        *_of_format(body.response_format),
        *_of_structured(body.structured_outputs),
        *_json(body.guided_json, "guided_json"),
        *_json(body.json_schema, "json_schema"),
        *_text("regex", body.guided_regex, "guided_regex"),
        *_text("regex", body.regex, "regex"),
        *_choice(body.guided_choice, "guided_choice"),
        *_text("grammar", body.guided_grammar, "guided_grammar"),
        *_text("grammar", body.ebnf, "ebnf"),
    ]
    return only_one(found)


def only_one(found: list[GrammarSpec]) -> GrammarSpec | None:
    """Return the only grammar, or None. Raises InvalidRequest naming the second one's field."""
    if len(found) > 1:
        raise InvalidRequest(
            f"{found[0].param} and {found[1].param} can't be combined: an answer has one form",
            param=found[1].param,
        )
    return found[0] if found else None


def structured_grammar(wanted: StructuredOutputs | None) -> GrammarSpec | None:
    """Return vLLM's ``structured_outputs`` as a grammar. Raises InvalidRequest if it asks for several."""
    return only_one(_of_structured(wanted))


def tgi_grammar(grammar: Mapping[str, Any] | None) -> GrammarSpec | None:
    """Return TGI's ``grammar``: ``{"type": "json" | "json_schema" | "regex", "value": ...}``."""
    where = "parameters.grammar"
    if grammar is None:
        return None
    kind, value = grammar.get("type"), grammar.get("value")
    if kind == "regex" and isinstance(value, str):
        return GrammarSpec("regex", value, param=where)
    if kind == "json_schema" and isinstance(value, Mapping):
        value = value.get("schema", value)
    if kind in ("json", "json_schema") and isinstance(value, Mapping | str):
        return _json(value, where)[0]
    raise InvalidRequest(f"{where} needs a type (json, json_schema or regex) and a value", param=where)


def _of_format(wanted: ResponseFormat | None) -> list[GrammarSpec]:
    if wanted is None or wanted.type == "text":
        return []
    if wanted.type == "json_object":
        return [GrammarSpec("json_object")]
    schema = None if wanted.json_schema is None else wanted.json_schema.schema_
    if schema is None:
        message = "response_format of type json_schema needs json_schema.schema"
        raise InvalidRequest(message, param="response_format")
    return _json(schema, "response_format")


def _of_structured(wanted: StructuredOutputs | None) -> list[GrammarSpec]:
    if wanted is None:
        return []
    where = "structured_outputs"
    found = [
        *_json(wanted.json_, where),
        *_text("regex", wanted.regex, where),
        *_choice(wanted.choice, where),
        *_text("grammar", wanted.grammar, where),
    ]
    if wanted.json_object:
        found.append(GrammarSpec("json_object", param=where))
    return found


def _json(schema: Mapping[str, Any] | str | None, where: str) -> list[GrammarSpec]:
    if schema is None:
        return []
    text = schema if isinstance(schema, str) else orjson.dumps(schema).decode()
    return [GrammarSpec("json_schema", text, param=where)]


def _text(kind: Any, text: str | None, where: str) -> list[GrammarSpec]:
    return [] if text is None else [GrammarSpec(kind, text, param=where)]


def _choice(choices: list[str] | None, where: str) -> list[GrammarSpec]:
    return [] if choices is None else [GrammarSpec("choice", orjson.dumps(choices).decode(), param=where)]
