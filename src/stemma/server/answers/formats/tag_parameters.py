"""A call as a tag with its name, around a tag for each parameter: Qwen's, MiniMax's and DeepSeek's XML."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from stemma.server.answers import json_text
from stemma.server.answers.formats.forced import KeywordForm
from stemma.server.answers.formats.format import ReadCalls, Tools
from stemma.server.answers.formats.tagged import close
from stemma.server.answers.formats.typed import TypedArguments
from stemma.server.answers.parts import Parts
from stemma.server.answers.scanning import Markers, Reading, Scanner

_NAME = re.compile(r"[^\s<>\"']*")
_KEY = re.compile(r"[^<>\"\n]*")


@dataclass(frozen=True, slots=True)
class TagStyle:
    """The tags of one family."""

    opener: str
    """Stands before a call, or before several."""
    closer: str
    call: str
    """Begins a call, up to its name."""
    call_end: str
    parameter: str
    """Begins a parameter, up to its name."""
    parameter_end: str
    name_end: str = ">"
    """Stands behind both names."""
    typed_ends: tuple[str, ...] = ()
    """Stand behind a parameter's name and say whether its value is a string: the first says that it is."""
    trims: bool = False
    """Whether a line break at either end of a value is the format's."""

    @property
    def typed_end(self) -> str:
        """What stands behind a parameter's name, with STRING for whether its value is one."""
        return self.typed_ends[0].replace("true", "STRING") if self.typed_ends else ""


def tag_calls(style: TagStyle) -> ReadCalls:
    """Return what reads content, and calls in `style`."""
    openers = Markers(style.opener, style.call)
    closers = _closers(style)

    def read(scanner: Scanner, parts: Parts, tools: Tools) -> Reading[None]:
        while (marker := (yield from scanner.until(openers, parts.content))) is not None:
            scanner.record()
            if marker == style.opener:
                space = yield from _calls(scanner, parts, tools)
            else:
                found = yield from _call(scanner, parts, tools, known_only=True)
                space = (yield from _further(scanner, parts, tools)) if found else None
            unread = scanner.recorded()
            if space is None:
                parts.content(marker + unread)
            else:
                yield from close(scanner, parts, space, style.closer)

    def _calls(scanner: Scanner, parts: Parts, tools: Tools) -> Reading[str | None]:
        yield from scanner.space()
        if not (yield from scanner.accept(style.call)):
            return (yield from json_text.calls(scanner, parts))
        found = yield from _call(scanner, parts, tools)
        return (yield from _further(scanner, parts, tools)) if found else None

    def _further(scanner: Scanner, parts: Parts, tools: Tools) -> Reading[str]:
        """Read the calls behind the first; return what is content unless the closer follows."""
        while True:
            space = yield from scanner.space()
            if not (yield from scanner.accept(style.call)):
                return space
            scanner.record()
            if not (yield from _call(scanner, parts, tools)):
                return style.call + scanner.recorded()

    def _call(scanner: Scanner, parts: Parts, tools: Tools, *, known_only: bool = False) -> Reading[bool]:
        name = yield from scanner.word(_NAME)
        if not (yield from scanner.accept(style.name_end)) or not name:
            return False
        if known_only and name not in tools:
            return False
        scanner.recorded()
        parts.call(name)
        arguments = TypedArguments(parts, tools.get(name, {}))
        tag = ""
        while True:
            if not tag:
                yield from scanner.space()
                tag = yield from scanner.accept(style.parameter, style.call_end)
            if style.parameter not in tag:
                break
            key = yield from scanner.word(_KEY)
            end = yield from scanner.accept(style.name_end, *style.typed_ends)
            if not end:
                break
            if style.trims:
                yield from scanner.accept("\n")
            is_text = end == style.typed_ends[0] if end in style.typed_ends else None
            closer = yield from arguments.read(scanner, key.strip(), closers, is_text=is_text)
            if closer is None:
                return True
            tag = "" if style.parameter_end in closer else closer
        if not scanner.is_over or style.call_end in tag:
            arguments.end()
        return True

    return read


def tag_form(style: TagStyle, *, inner: bool = True) -> KeywordForm:
    """Return how templates write calls in `style`. `inner`: each call has the outer tags around it."""
    gap = "\n" if style.trims else ""
    form = KeywordForm(
        head=f"{style.call}NAME{style.name_end}\n",
        parameter=f"{style.parameter}KEY{style.typed_end or style.name_end}{gap}",
        value_end=f"{gap}{style.parameter_end}\n",
        tail=f"{style.call_end}\n",
    )
    if not inner:
        return replace(form, before=f"{style.opener}\n", after=style.closer)
    head, tail = f"{style.opener}\n{form.head}", f"{form.tail}{style.closer}"
    return replace(form, head=head, tail=tail, between="\n")


def _closers(style: TagStyle) -> Markers:
    """Return what ends a value: its closing tag, or where that is missing what can only come behind it."""
    ends = [style.parameter_end, "\n" + style.parameter]
    for gap in ("", "\n"):
        ends += [f"{style.call_end}{gap}{style.closer}", f"\n{style.call_end}{gap}{style.closer}"]
    if style.trims:
        ends.append("\n" + style.parameter_end)
    return Markers(*ends)
