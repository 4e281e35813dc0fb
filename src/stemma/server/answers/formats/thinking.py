"""How families write their thinking, and how it is split from the answer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from stemma.engine.sampling.thinking import ThinkingMarks, ThinkingTokens
from stemma.server.answers.events import parse
from stemma.server.answers.formats.forced import Lark
from stemma.server.answers.formats.format import ReadCalls, Tools
from stemma.server.answers.parts import Parts, ReadingParser
from stemma.server.answers.scanning import Markers, Reading, Scanner, Tell

Encode = Callable[[str], Sequence[int]]
Calls = Literal["none", "may", "must"]
"""Whether an answer holds calls."""
_LINE_BREAKS = re.compile(r"\n*")


@dataclass(frozen=True, slots=True)
class _Spelled:
    """A vocabulary: the tokens of a text, and the bytes of tokens."""

    encode: Encode
    spelled: Mapping[int, bytes]

    def ids(self, text: str) -> tuple[int, ...]:
        """Return the tokens of `text`, without a space that only the beginning of a text has."""
        ids = tuple(self.encode(text))
        is_added = bool(ids) and self.spelled[ids[0]] == b" " and not text.startswith(" ")
        return ids[1:] if is_added else ids

    def joined(self, ids: Sequence[int]) -> bytes:
        """Return the text of `ids`."""
        return b"".join(self.spelled[token] for token in ids)


@dataclass(frozen=True, slots=True)
class ThinkingFormat:
    """What stands around the thinking of one family."""

    name: str
    opener: str
    closer: str
    others: tuple[str, ...] = ()
    """Further markers of the format."""
    behind: str = "\n\n"
    """What templates write between the end of the thinking and the answer."""
    behind_for_calls: str = ""
    """The same where calls may follow and `behind` would begin text."""
    may_return: bool = False
    """Whether there may be more thinking later in an answer."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Tokens that must stay in the text."""
        return (self.opener, self.closer, *self.others)

    def tokens(
        self, encode: Encode, spelled: Mapping[int, bytes], *, is_open: bool, calls: Calls
    ) -> ThinkingTokens | None:
        """Return what a budget of thinking is kept by; None if the vocabulary can't write the thinking's end.

        `spelled`: the bytes of each token. `calls`: whether the answer may hold calls.
        """
        before, behind, again = "" if self.may_return else "\n", self.behind, ""
        if self.behind_for_calls and calls != "none":
            behind, again = self.behind_for_calls, self.closer + self.behind if calls == "may" else ""
        spell = _Spelled(encode, spelled)
        end, whole = self.closer.encode(), spell.ids(before + self.closer + behind)
        if end not in spell.joined(whole):
            return None
        rests = [self._rest(spell, number, behind) or whole for number in range(1, len(end))]
        marks = self.marks(is_open=is_open)
        return ThinkingTokens(marks, (whole, *rests), spelled, spell.ids(again))

    def marks(self, *, is_open: bool) -> ThinkingMarks:
        """Return what the engine knows the thinking by."""
        return ThinkingMarks(self.opener.encode(), self.closer.encode(), is_open, self.may_return)

    def _rest(self, spell: _Spelled, number: int, behind: str) -> tuple[int, ...]:
        """Return the tokens of the thinking's end behind its first `number` bytes; empty: none would do."""
        rest = self.closer.encode()[number:]
        if len(spell.ids(self.closer)) == 1 or rest[0] & 0xC0 == 0x80:
            return ()  # what looks like the end's beginning is text; or it is no whole character
        ids = spell.ids(self.closer + behind)
        cut = next((i for i in range(len(ids)) if len(spell.joined(ids[:i])) == number), None)
        ids = spell.ids(rest.decode() + behind) if cut is None else ids[cut:]
        return ids if spell.joined(ids).startswith(rest) else ()

    def before_grammar(self, token_ids: Mapping[str, int], *, is_open: bool, is_call: bool) -> str:
        """Return a grammar in Lark of the thinking, if any, and then ``@answer``, which is a call or text."""
        lark = Lark(token_ids)
        thought = lark.text_up_to(self.closer)
        if not self.may_return:
            thought += " " + lark.rule(r"/\s{0,4}/")
        else:
            thought += " " + lark.literal(self.behind_for_calls)
        begin = thought if is_open else f"({lark.literal(self.opener)} {thought})?"
        final = lark.literal(self.behind.removeprefix(self.behind_for_calls)) if self.may_return else ""
        return lark.text(f"{begin} {'' if is_call else final} @answer")

    def is_open_at(self, prompt_end: str) -> bool:
        """Return whether an answer to a prompt that ends so begins inside the thinking."""
        return prompt_end.rstrip().endswith(self.opener.rstrip())


THINK = ThinkingFormat("think", "<think>", "</think>")
_ALL = (
    THINK,
    ThinkingFormat("seed", "<seed:think>", "</seed:think>", behind="\n"),
    ThinkingFormat("mistral", "[THINK]", "[/THINK]", behind=""),
    ThinkingFormat("kimi_vl", "◁think▷", "◁/think▷", behind=""),
    ThinkingFormat("gemma4", "<|channel>thought\n", "<channel|>", ("<|channel>",), behind=""),
    ThinkingFormat("granite", "Here is my thought process:", "Here is my response:"),
    ThinkingFormat("cohere", "<|START_THINKING|>", "<|END_THINKING|>", behind=""),
    ThinkingFormat(
        "harmony",
        "<|channel|>analysis<|message|>",
        "<|end|>",
        ("<|channel|>", "<|message|>", "<|start|>", "<|call|>", "<|return|>", "<|constrain|>"),
        behind="<|start|>assistant<|channel|>final<|message|>",
        behind_for_calls="<|start|>assistant",
        may_return=True,
    ),
)
THINKING_FORMATS: Mapping[str, ThinkingFormat] = {form.name: form for form in _ALL}
HARMONY_THINKING = THINKING_FORMATS["harmony"]


@dataclass(frozen=True, slots=True)
class Thinking:
    """Thinking before an answer: its format, and whether the prompt ends inside it."""

    form: ThinkingFormat
    is_open: bool


def read_after_thinking(
    scanner: Scanner, parts: Parts, tools: Tools, thinking: Thinking, rest: ReadCalls | None, opens: Markers
) -> Reading[None]:
    """Read thinking, then what `rest` reads; None: text alone.

    A call inside the thinking is thinking, unless the answer ends with it: then the model forgot to close the
    thinking. `opens`: markers that begin calls, and the thinking's end.
    """
    text = parts.plain if rest is None else parts.content
    space = yield from scanner.space()
    opened = yield from scanner.accept(thinking.form.opener)
    if opened or thinking.is_open:
        yield from _think(scanner, parts, tools, thinking.form, rest, opens)
    elif space:
        text(space)
    if rest is None:
        yield from scanner.all(text)
    else:
        yield from rest(scanner, parts, tools)


def _think(
    scanner: Scanner,
    parts: Parts,
    tools: Tools,
    form: ThinkingFormat,
    rest: ReadCalls | None,
    opens: Markers,
) -> Reading[None]:
    thought = _Trimmed(parts.reasoning)
    yield from scanner.run(_LINE_BREAKS, _drop)
    marker = yield from scanner.until(opens, thought.tell)
    while marker is not None and marker != form.closer:
        text, end = yield from scanner.take(Markers(form.closer))
        if end is None and rest is not None and _replayed(marker + text, parts, tools, rest):
            return
        thought.tell(marker + text)
        marker = end
    if marker is None:
        thought.end()
    yield from scanner.run(_LINE_BREAKS, _drop)


def _replayed(text: str, parts: Parts, tools: Tools, rest: ReadCalls) -> bool:
    """Take `text` as calls if it is whole ones and nothing else; return whether it is."""
    answer = parse(ReadingParser(lambda scanner, inner: rest(scanner, inner, tools)), text)
    if answer.content or not answer.calls or not all(_is_json(call.arguments) for call in answer.calls):
        return False
    for call in answer.calls:
        parts.call(call.name, call.call_id)
        parts.arguments(call.arguments)
    return True


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


class _Trimmed:
    """Tells text without the line breaks at its end."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._held: list[str] = []

    def tell(self, text: str) -> None:
        """Take the next piece."""
        body = text.rstrip("\n")
        if body:
            self._tell("".join(self._held) + body)
            self._held = []
        if len(body) < len(text):
            self._held.append(text[len(body) :])

    def end(self) -> None:
        """The line breaks at the end belong to the text after all: it was cut off."""
        if self._held:
            self._tell("".join(self._held))


def _drop(text: str) -> None:
    pass
