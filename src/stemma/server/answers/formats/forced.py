"""Grammars of calls that a request demands, in the form that the family was taught.

A form says how one call is written; what reads a family's calls reads these too. Schemas that a form can't
hold (``anyOf`` at their root, patterns of bare strings, ...) are demanded as a JSON list, which holds all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from stemma.engine.sampling.grammar import JSON_OPTIONS, GrammarSpec
from stemma.engine.sampling.schemas import embedded
from stemma.server.answers.formats.escaped import escaped_lark, lark_of_regex
from stemma.server.answers.formats.typed import kinds_of

Schema = Mapping[str, Any]
_PLAIN_ROOT = frozenset(
    ("type", "properties", "required", "additionalProperties", "title", "description", "default", "examples")
) | {"$defs", "definitions", "$schema", "$id", "$comment", "strict"}
_BOUNDS_OF_TEXT = frozenset(("pattern", "minLength", "maxLength", "format", "allOf", "not", "if"))
_SCALARS = frozenset(("string", "integer", "number", "boolean", "null"))
_MAX_LITERALS = 1000
_QUOTE = '"'


class Lark:
    """Collects the rules of one grammar.

    No literal may be the beginning of another that can stand in its place: the longer would be waited for.
    """

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        """`token_ids`: markers that are special tokens, which no text can spell."""
        self._token_ids = token_ids
        self._split = re.compile("|".join(map(re.escape, token_ids)) or r"(?!)")
        self._rules: list[str] = []

    def literal(self, text: str) -> str:
        """Return what stands for `text`."""
        parts, at = [], 0
        for found in self._split.finditer(text):
            parts += [_quoted(text[at : found.start()]), f"<[{self._token_ids[found.group()]}]>"]
            at = found.end()
        return " ".join(part for part in (*parts, _quoted(text[at:])) if part)

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule and return its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def loose(self, text: str) -> str:
        """Return what stands for `text` with any white space where it has some, and before it."""
        return " ".join(f"{self.space()} {self.literal(word)}" for word in text.split())

    def space(self) -> str:
        """Return what stands for any white space, or none."""
        return r"/\s{0,16}/"

    def json(self, schema: Schema) -> str:
        """Return what stands for a JSON value."""
        return self.rule(f"%json {embedded(schema, JSON_OPTIONS)}")

    def text_up_to(self, end: str) -> str:
        """Return what stands for any text and then `end`."""
        if self._split.match(end):
            return f"{self.rule('/(?s:.*)/')} {self.literal(end)}"
        return self.rule("/(?s:.*)/", f"[suffix={json.dumps(end, ensure_ascii=False)}]")

    def nested(self, grammar: str) -> str:
        """Return what stands for a text of another grammar in Lark."""
        return self.rule(f"%lark {{\n{grammar}\n}}")

    def text(self, start: str) -> str:
        """Return the whole grammar, which begins with `start`."""
        return "\n".join((f"start: {start}", *self._rules)) + "\n"


def _is_marked(head: str) -> bool:
    """Whether `head` means nothing else anywhere in an answer."""
    return head.startswith(("<", "[TOOL_CALLS]"))


def _one_key(schema: Schema) -> str:
    """Return the name of the one argument, a text."""
    return str(next(iter(schema["properties"])))


def _in_quotes(lark: Lark, key: str) -> str:
    """Return what stands for a JSON object of one text, for which ``@answer`` stands."""
    begin = f"{{ {json.dumps(key)} : {_QUOTE}"
    return f"{lark.loose(begin)} @answer {lark.literal(_QUOTE)} {lark.loose('}')}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


@dataclass(frozen=True, slots=True)
class JsonForm:
    """Arguments are a JSON object. `pattern` has NAME, ARGUMENTS and, where calls are counted, NUMBER."""

    pattern: str
    before: str = ""
    between: str = ""
    after: str = ""
    may_repeat: bool = True
    other_heads: tuple[str, ...] = ()
    """What models also write before ARGUMENTS, with NAME."""
    text_is_escaped: ClassVar[bool] = True
    ends_names: ClassVar[bool] = True

    def heads(self, name: str) -> list[str]:
        """Return what calls of `name` begin with, up to their arguments or to a NUMBER."""
        parts = self._parts()
        head = next(part for part in parts if "NAME" in part)
        if head == parts[0] and not _is_marked(head):
            head, later = self.before + head, [f"{parts[-1]}{self.between}{head}"] if self.before else []
        else:
            later = []
        return [one.replace("NAME", json.dumps(name)[1:-1]) for one in (head, *later, *self.other_heads)]

    def rest(self, lark: Lark, name: str, schema: Schema, *, is_text: bool) -> str | None:
        """Return what stands for what follows one of `heads`, up to the end of the arguments; never None.

        `is_text`: the one argument is a text, for which ``@answer`` stands.
        """
        parts = self._parts()
        behind = parts[next(i for i, part in enumerate(parts) if "NAME" in part) + 1 : -1]
        value = _in_quotes(lark, _one_key(schema)) if is_text else f"{lark.space()} {lark.json(schema)}"
        given = {"ARGUMENTS": value, "NUMBER": "/[0-9]{1,3}/"}
        return " ".join(given.get(part) or lark.loose(part) for part in behind)

    def _parts(self) -> list[str]:
        """Return the pattern in parts; the last is what stands behind the arguments."""
        return re.split(r"(ARGUMENTS|NUMBER)", self.pattern)

    def call(self, lark: Lark, name: str, schema: Schema, text: str | None = None) -> str | None:
        """Return what stands for a call of `name`; never None. `text` stands for its one argument, a text."""
        parts = []
        for part in re.split(r"(ARGUMENTS|NUMBER)", self.pattern):
            if part == "ARGUMENTS" and text is not None:
                begin = f"{{{json.dumps(_one_key(schema))}: {_QUOTE}"
                parts.append(f"{lark.literal(begin)} {text} {lark.literal(_QUOTE + '}')}")
            elif part == "ARGUMENTS":
                parts.append(lark.json(schema))
            elif part == "NUMBER":
                parts.append("/[0-9]{1,3}/")
            else:
                parts.append(lark.literal(part.replace("NAME", json.dumps(name)[1:-1])))
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class KeywordForm:
    """Each argument has its own marks: ``head (parameter value value_end) ... tail``.

    `head` has NAME, `parameter` KEY, and STRING where it says whether the value is a string.
    """

    head: str
    parameter: str
    value_end: str
    tail: str
    separator: str = ""
    before: str = ""
    between: str = ""
    after: str = ""
    may_repeat: bool = True
    strings: Literal["bare", "json"] = "bare"
    """How strings are written: up to the value's end, or as JSON writes them."""
    quote: str = ""
    """Stands around bare strings; then other values are scalars."""
    words: tuple[str, str] = ("true", "false")

    @property
    def text_is_escaped(self) -> bool:
        """Whether texts stand in JSON strings."""
        return self.strings == "json"

    @property
    def ends_names(self) -> bool:
        """Whether `heads` say where the name ends."""
        return bool(self.head.partition("NAME")[2].strip())

    def heads(self, name: str) -> list[str]:
        """Return what calls of `name` begin with."""
        head = self.head.replace("NAME", name)
        if _is_marked(head) or not self.before:
            return [head]
        return [self.before + head, f"{self.tail}{self.between}{head}"]

    def rest(self, lark: Lark, name: str, schema: Schema, *, is_text: bool) -> str | None:
        """Return what stands for what follows one of `heads`; None if this form can't say it.

        `is_text`: the one argument is a text, for which ``@answer`` stands.
        """
        inner = self._one_text(lark, schema, "@answer") if is_text else self._arguments(lark, schema)
        return None if inner is None else f"{lark.space()} {inner} {lark.loose(self.tail)}"

    def call(self, lark: Lark, name: str, schema: Schema, text: str | None = None) -> str | None:
        """Return what stands for a call of `name`; None if this form can't say what `schema` demands.

        `text` stands for its one argument, a text.
        """
        inner = self._arguments(lark, schema) if text is None else self._one_text(lark, schema, text)
        if inner is None:
            return None
        return f"{lark.literal(self.head.replace('NAME', name))} {inner} {lark.literal(self.tail)}"

    def _one_text(self, lark: Lark, schema: Schema, text: str) -> str:
        quote = _QUOTE if self.text_is_escaped else self.quote
        begin = self.parameter.replace("STRING", "true").replace("KEY", _one_key(schema))
        return f"{lark.literal(begin + quote)} {text} {lark.literal(quote + self.value_end)}"

    def _arguments(self, lark: Lark, schema: Schema) -> str | None:
        if schema.keys() - _PLAIN_ROOT or schema.get("type", "object") != "object":
            return None
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not set(required) <= set(properties):
            return None
        given: dict[str, str] = {}
        for key in properties:
            parameter = self._parameter(lark, key, schema)
            if parameter is None:
                return None
            given[key] = lark.rule(parameter)
        return _in_order(lark, given, required, self.separator)

    def _parameter(self, lark: Lark, key: str, schema: Schema) -> str | None:
        kinds = kinds_of(schema, key)
        wanted = schema["properties"][key]
        if not isinstance(wanted, Mapping) or '"$ref": "#"' in json.dumps(wanted):
            return None
        is_text = "string" in kinds and self.strings == "bare"
        begin = self.parameter.replace("STRING", "true" if is_text else "false").replace("KEY", key)
        value = self._text(lark, wanted, kinds) if is_text else self._other(lark, wanted, kinds, schema)
        return None if value is None else f"{lark.literal(begin)} {value}"

    def _text(self, lark: Lark, wanted: Schema, kinds: frozenset[str]) -> str | None:
        """Return what stands for a bare string and what ends it; None if it has bounds."""
        end = self.quote + self.value_end
        begin = lark.literal(self.quote)
        values = wanted.get("enum", [wanted["const"]] if "const" in wanted else None)
        if isinstance(values, list) and 0 < len(values) <= _MAX_LITERALS:
            if not all(isinstance(value, str) for value in values):
                return None
            one_of = " | ".join(lark.literal(value + end) for value in values)
            return f"{begin} ({one_of})"
        bounds = json.dumps(wanted)
        if any(f'"{word}":' in bounds for word in _BOUNDS_OF_TEXT) or not kinds <= _SCALARS | {
            "array",
            "object",
        }:
            return None
        return f"{begin} {lark.text_up_to(end)}"

    def _other(self, lark: Lark, wanted: Schema, kinds: frozenset[str], schema: Schema) -> str | None:
        """Return what stands for a value that isn't bare text, and what ends it."""
        if kinds == {"boolean"} and not wanted.keys() & {"enum", "const"}:
            return f"({' | '.join(lark.literal(word + self.value_end) for word in self.words)})"
        if self.quote and not kinds <= _SCALARS:
            return None
        defs = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
        return f"{lark.json({**defs, **wanted})} {lark.literal(self.value_end)}"


CallForm = JsonForm | KeywordForm
"""How a family writes calls: ``before call between call ... after``."""
JSON_LIST = JsonForm('{"name": "NAME", "arguments": ARGUMENTS}', "[", ", ", "]")
"""What is demanded where a family's own form can't be."""


def _in_order(lark: Lark, given: Mapping[str, str], required: Collection[str], separator: str) -> str:
    """Return what stands for all of `given` that are `required`, and any of the others.

    With a `separator` between neighbours the required ones come first.
    """
    if not separator:
        return " ".join(rule if key in required else f"{rule}?" for key, rule in given.items())
    between = lark.literal(separator)
    rest = ""
    beginnings: list[str] = []
    for rule in reversed([rule for key, rule in given.items() if key not in required]):
        beginnings.append(f"{rule} {rest}")
        rest = lark.rule(f"({between} {rule})? {rest}")
    first = f" {between} ".join(rule for key, rule in given.items() if key in required)
    if first:
        return f"{first} {rest}"
    return f"({' | '.join(beginnings)})?" if beginnings else ""


@dataclass(frozen=True, slots=True)
class TextGrammar:
    """The form of a text that is the one argument of a tool."""

    kind: Literal["lark", "regex"]
    definition: str

    def lark(self, form: CallForm) -> str:
        """Return it in Lark, as texts stand in calls of `form`. Raises ValueError if that can't be said."""
        plain = lark_of_regex(self.definition) if self.kind == "regex" else self.definition
        return escaped_lark(plain) if form.text_is_escaped else plain


def forced_grammar(
    form: CallForm | None,
    tools: Mapping[str, Schema],
    token_ids: Mapping[str, int],
    *,
    single: bool,
    texts: Mapping[str, TextGrammar] | None = None,
) -> str:
    """Return the grammar of one call of `tools`, or of several, in Lark; as a JSON list without `form`.

    `texts`: forms of tools that take one text. Raises ValueError for one that can't stand in such a call.
    """
    lark, texts = Lark(token_ids), texts or {}
    form = form or JSON_LIST
    inner = {name: lark.nested(text.lark(form)) for name, text in texts.items() if name in tools}
    calls = [form.call(lark, name, schema, inner.get(name)) for name, schema in tools.items()]
    if not all(calls):
        return forced_grammar(JSON_LIST, tools, token_ids, single=single, texts=texts)
    call = lark.rule(" | ".join(lark.rule(one) for one in calls if one))
    several = call if single or not form.may_repeat else f"{call} ({lark.literal(form.between)} {call})*"
    return lark.text(f"{lark.literal(form.before)} {several} {lark.literal(form.after)}")


def grammar_behind_head(
    form: CallForm | None,
    name: str,
    tools: Mapping[str, Schema],
    text: TextGrammar | None,
    token_ids: Mapping[str, int],
) -> tuple[list[str], GrammarSpec]:
    """Return the heads of calls of `name`, and the grammar of what follows. `text`: that of its one argument.

    Raises ValueError for what `form` can't hold.
    """
    if form is None:
        raise ValueError("this format has no form of calls")
    if not form.ends_names and any(other.startswith(name) for other in tools if other != name):
        raise ValueError(
            "another tool's name begins with its name, and this format doesn't say where one ends"
        )
    lark = Lark(token_ids)
    rest = form.rest(lark, name, tools[name], is_text=text is not None)
    if rest is None:
        raise ValueError("this format of calls can't hold its schema")
    if text is None:
        return form.heads(name), GrammarSpec("grammar", lark.text(rest), param="tools")
    return form.heads(name), GrammarSpec("grammar", text.lark(form), before=lark.text(rest), param="tools")
