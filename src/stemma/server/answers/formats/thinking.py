"""How families write their thinking, and how it is split from the answer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stemma.engine.sampling.thinking import ThinkingTokens
from stemma.server.answers.events import parse
from stemma.server.answers.formats.forced import Lark
from stemma.server.answers.formats.format import ReadCalls, Tools
from stemma.server.answers.parts import Parts, ReadingParser
from stemma.server.answers.scanning import Markers, Reading, Scanner, Tell

_LINE_BREAKS = re.compile(r"\n*")


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
    may_return: bool = False
    """Whether there may be more thinking later in an answer."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Tokens that must stay in the text."""
        return (self.opener, self.closer, *self.others)

    def tokens(self, encode: Callable[[str], Sequence[int]], *, is_open: bool) -> ThinkingTokens | None:
        """Return the tokens by which a budget of thinking is kept; None if its end isn't a token."""
        end_ids = tuple(encode(self.closer))
        if len(end_ids) != 1:
            return None
        before = "" if self.may_return else "\n"
        forced = tuple(encode(f"{before}{self.closer}{self.behind}"))
        return ThinkingTokens(tuple(encode(self.opener)), end_ids[0], forced, is_open, self.may_return)

    def before_grammar(self, token_ids: Mapping[str, int], *, is_open: bool, is_call: bool) -> str:
        """Return a grammar in Lark of the thinking, if any, and then ``@answer``, which is a call or text."""
        lark = Lark(token_ids)
        thought = lark.text_up_to(self.closer)
        if not self.may_return:
            thought += " " + lark.rule(r"/\s{0,4}/")
        else:
            thought += " " + lark.literal("<|start|>assistant")
        begin = thought if is_open else f"({lark.literal(self.opener)} {thought})?"
        final = "" if is_call or not self.may_return else lark.literal("<|channel|>final<|message|>")
        return lark.text(f"{begin} {final} @answer")

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
