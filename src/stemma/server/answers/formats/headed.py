"""Calls with a head that names the tool, then JSON, between markers that mean nothing else in an answer."""

from __future__ import annotations

import re
from dataclasses import replace

from stemma.server.answers import json_text
from stemma.server.answers.formats.forced import JsonForm
from stemma.server.answers.formats.format import ToolFormat, Tools, shape
from stemma.server.answers.parts import Parts
from stemma.server.answers.scanning import Markers, Reading, Scanner

_UP_TO_JSON = re.compile(r"[^{\[<]*")


def json_arguments(scanner: Scanner, parts: Parts, ends: Markers) -> Reading[None]:
    """Read the arguments of a call that has begun; what isn't JSON, up to `ends`, is passed on as it is."""
    yield from scanner.space()
    if (yield from scanner.peek()) in ("{", "[", '"'):
        yield from json_text.arguments(scanner, parts.arguments)
        return
    text, end = yield from scanner.take(ends)
    if end is not None:
        scanner.back(end)
    parts.arguments(text.strip() or ("" if end is None else "{}"))


_KIMI_CALL, _KIMI_JSON, _KIMI_END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
_KIMI_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_KIMI_MARKERS = Markers(_KIMI_CALL, _KIMI_END, *_KIMI_SECTION)
_KIMI_HEAD_ENDS = Markers(_KIMI_JSON, _KIMI_END, _KIMI_SECTION[1])


def _read_kimi(scanner: Scanner, parts: Parts, tools: Tools) -> Reading[None]:
    while (marker := (yield from scanner.until(_KIMI_MARKERS, parts.content))) is not None:
        if marker != _KIMI_CALL:
            continue
        head, end = yield from scanner.take(_KIMI_HEAD_ENDS)
        if end != _KIMI_JSON:
            parts.content(marker + head + (end or ""))
            continue
        call_id = head.strip()
        name, colon, number = call_id.removeprefix("functions.").rpartition(":")
        parts.call(name if colon and number.isdigit() else call_id, call_id)
        yield from json_arguments(scanner, parts, _KIMI_HEAD_ENDS)


KIMI = ToolFormat(
    "kimi_k2",
    _read_kimi,
    shape(r'<\|tool_call_begin\|> \S+ <\|tool_call_argument_begin\|> \{ "KEY" : "VALUE" \} '),
    (_KIMI_SECTION[0], _KIMI_CALL),
    (_KIMI_SECTION[1], _KIMI_JSON, _KIMI_END),
    JsonForm(
        f"{_KIMI_CALL}functions.NAME:NUMBER{_KIMI_JSON}ARGUMENTS{_KIMI_END}",
        before=_KIMI_SECTION[0],
        after=_KIMI_SECTION[1],
    ),
)
"""``functions.name:0`` heads a call, and is its id."""

_DEEPSEEK_CALL, _DEEPSEEK_SEP, _DEEPSEEK_END = (
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
)
_DEEPSEEK_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_MARKERS = Markers(_DEEPSEEK_CALL, _DEEPSEEK_END, *_DEEPSEEK_CALLS)
_DEEPSEEK_HEAD_ENDS = Markers(_DEEPSEEK_SEP, _DEEPSEEK_END, _DEEPSEEK_CALLS[1])


def _read_deepseek(scanner: Scanner, parts: Parts, tools: Tools) -> Reading[None]:
    while (marker := (yield from scanner.until(_DEEPSEEK_MARKERS, parts.content))) is not None:
        if marker != _DEEPSEEK_CALL:
            continue
        first, end = yield from scanner.take(_DEEPSEEK_HEAD_ENDS)
        if end != _DEEPSEEK_SEP:
            parts.content(marker + first + (end or ""))
            continue
        scanner.record()
        second = yield from scanner.word(_UP_TO_JSON)
        unread = scanner.recorded()
        if scanner.is_over and second.strip():
            parts.content(marker + first + end + unread)
            continue
        parts.call(second.replace("```json", "").strip() or first.strip())
        yield from json_arguments(scanner, parts, _DEEPSEEK_HEAD_ENDS)
        if "```" in second:
            yield from scanner.space()
            yield from scanner.accept("```")


def _deepseek(name: str, head: str, form: JsonForm) -> ToolFormat:
    return ToolFormat(
        name,
        _read_deepseek,
        shape(rf'<｜tool▁call▁begin｜>{head} \{{ "KEY" : "VALUE" \}} '),
        (_DEEPSEEK_CALLS[0], _DEEPSEEK_CALL),
        (_DEEPSEEK_CALLS[1], _DEEPSEEK_SEP, _DEEPSEEK_END),
        form,
    )


_DEEPSEEK_FORM = JsonForm(
    f"{_DEEPSEEK_CALL}NAME{_DEEPSEEK_SEP}ARGUMENTS{_DEEPSEEK_END}",
    before=_DEEPSEEK_CALLS[0],
    after=_DEEPSEEK_CALLS[1],
)
DEEPSEEK_V3 = _deepseek(
    "deepseek_v3",
    "function<｜tool▁sep｜>NAME ```json",
    replace(
        _DEEPSEEK_FORM,
        pattern=f"{_DEEPSEEK_CALL}function{_DEEPSEEK_SEP}NAME\n```json\nARGUMENTS\n```{_DEEPSEEK_END}",
        between="\n",
    ),
)
"""V3 and R1: ``function<sep>name``, and the arguments in a code block."""
DEEPSEEK_V31 = _deepseek("deepseek_v31", "NAME<｜tool▁sep｜>", _DEEPSEEK_FORM)

_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_OPENERS = Markers(_MISTRAL)
_MISTRAL_HEAD = re.compile(r"[^{\[]*")
_MISTRAL_ENDS = Markers(_MISTRAL)


def _read_mistral(scanner: Scanner, parts: Parts, tools: Tools) -> Reading[None]:
    while (yield from scanner.until(_MISTRAL_OPENERS, parts.content)) is not None:
        scanner.record()
        yield from scanner.space()
        if (yield from scanner.peek()) in ("[", "{"):
            space = yield from json_text.calls(scanner, parts)
        else:
            space = yield from _mistral_call(scanner, parts)
        unread = scanner.recorded()
        parts.content(_MISTRAL + unread if space is None else space)


def _mistral_call(scanner: Scanner, parts: Parts) -> Reading[str | None]:
    """Read ``name[CALL_ID]id[ARGS]{...}``; the id and both markers may be missing."""
    name = (yield from scanner.word(_MISTRAL_HEAD)).strip()
    call_id = ""
    if (yield from scanner.accept("[CALL_ID]")):
        call_id = yield from scanner.word(_MISTRAL_HEAD)
    has_arguments = yield from scanner.accept("[ARGS]")
    is_call = bool(has_arguments) or (yield from scanner.peek()) == "{"
    if len(name.split()) != 1 or not is_call:
        return None
    scanner.recorded()
    parts.call(name, call_id.strip())
    yield from json_arguments(scanner, parts, _MISTRAL_ENDS)
    return ""


def _mistral(name: str, written: str, form: JsonForm) -> ToolFormat:
    others = ("[ARGS]", "[CALL_ID]")
    return ToolFormat(name, _read_mistral, shape(written), (_MISTRAL,), others, form, short_ids=True)


MISTRAL = _mistral(
    "mistral",
    r'\[TOOL_CALLS\] (\[ )?\{ [^[]*?"name" : "NAME"',
    JsonForm('{"name": "NAME", "arguments": ARGUMENTS}', f"{_MISTRAL}[", ", ", "]"),
)
MISTRAL_ARGS = _mistral(
    "mistral_args",
    r"\[TOOL_CALLS\]NAME(\[CALL_ID\] \w+ )?(\[ARGS\])? \{",
    JsonForm(f"{_MISTRAL}NAME[ARGS]ARGUMENTS"),
)
"""Since 2025."""
