"""What a chat template takes, found out by rendering small conversations with it, once.

A template may refuse a second system message, drop a `developer` without a word, or write arguments only
from text. What it shows of a probe, in order, it takes; all else is brought into a form that it takes
(`template_roles.py`), the same way each time, so that a growing conversation's prompt keeps its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stemma.errors import InvalidRequest
from stemma.model.text.tokenizer import Tokenizer
from stemma.model.vision.sources import in_parts

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]
_A, _B, _C, _D = "Qaone", "Qbtwo", "Qcthree", "Qdfour"
_LONG_ID, _SHORT_ID = "call_0123456789abcdef01234567", "abcdEF123"


@dataclass(frozen=True, slots=True)
class TemplateRules:
    """What a template takes."""

    system: bool = True
    """A system message at the beginning."""
    several_system: bool = True
    """Two of them there."""
    late_system: bool = True
    """One at any place."""
    developer: bool = True
    """The role `developer`, shown as another than any role that it doesn't know."""
    repeated_user: bool = True
    """Two user's turns in a row."""
    user_after_tool: bool = True
    """A user's turn behind the results of tools."""
    long_ids: bool = True
    """Ids of calls that aren't nine letters and digits."""
    argument_objects: bool = True
    """Arguments of calls as objects, written as JSON; else as text."""
    reasoning_and_text: bool = True
    """Reasoning and text before a call."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, sees: bool) -> TemplateRules:
        """Probe the template of `tokenizer`. `sees`: it reads contents as lists of parts."""
        if not tokenizer.has_chat_template:
            return cls()

        def render(messages: Sequence[Message]) -> str:
            return tokenizer.render_chat([in_parts(one) if sees else one for one in messages])

        return _Probes(render).rules(tokenizer.chat_template or "")


class _Probes:
    """Asks one template."""

    def __init__(self, render: Render) -> None:
        self._render = render

    def rules(self, template: str) -> TemplateRules:
        """Return what it takes. One that renders not even a question is left alone."""
        if not self._shows([_user(_A)], _A):
            return TemplateRules()
        objects = self._writes_json({"Qkey": _A})
        arguments: Any = {"Qkey": _A} if objects else f'{{"Qkey": "{_A}"}}'
        ids = not self._takes_calls(_SHORT_ID, arguments) or self._takes_calls(_LONG_ID, arguments)
        call = _calling(_LONG_ID if ids else _SHORT_ID, arguments)
        both = {**call[1], "content": _B, "reasoning_content": _C}
        return TemplateRules(
            system=self._shows([_system(_A), _user(_B)], _A, _B),
            several_system=self._shows([_system(_A), _system(_B), _user(_C)], _A, _B, _C),
            late_system=self._takes_late_system(call),
            developer="developer" in template and self._shows([_developer(_A), _user(_B)], _A, _B),
            repeated_user=self._shows([_user(_A), _user(_B)], _A, _B),
            user_after_tool=self._shows([*call, _user(_D)], _D),
            long_ids=ids,
            argument_objects=objects,
            reasoning_and_text=self._rendered([call[0], both, call[2]]) is not None,
        )

    def _takes_late_system(self, call: Sequence[Message]) -> bool:
        return (
            self._shows([_user(_A), _system(_B)], _A, _B)
            and self._shows([_user(_A), _assistant(_B), _system(_C), _user(_D)], _A, _B, _C, _D)
            and self._shows([*call, _system(_D)], _D)
        )

    def _writes_json(self, arguments: Mapping[str, str]) -> bool:
        """Whether it writes an object as JSON or in its own way; not if it fails, or as Python does."""
        for call_id in (_LONG_ID, _SHORT_ID):
            text = self._rendered(_calling(call_id, arguments))
            if text is not None:
                return "{'Qkey'" not in text
        return not any(self._takes_calls(one, '{"Qkey": 1}') for one in (_LONG_ID, _SHORT_ID))

    def _takes_calls(self, call_id: str, arguments: Any) -> bool:
        return self._rendered(_calling(call_id, arguments)) is not None

    def _shows(self, messages: Sequence[Message], *words: str) -> bool:
        """Whether all words are in the prompt, in this order."""
        rest = self._rendered(messages)
        for word in words:
            if rest is None or word not in rest:
                return False
            rest = rest.partition(word)[2]
        return True

    def _rendered(self, messages: Sequence[Message]) -> str | None:
        try:
            return self._render(messages)
        except InvalidRequest:
            return None


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _system(text: str) -> Message:
    return {"role": "system", "content": text}


def _developer(text: str) -> Message:
    return {"role": "developer", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _calling(call_id: str, arguments: Any) -> list[Message]:
    """Return a question, a call and its result."""
    call = {"id": call_id, "type": "function", "function": {"name": "Qname", "arguments": arguments}}
    return [
        _user("Qquestion"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "name": "Qname", "content": "Qresult"},
    ]
