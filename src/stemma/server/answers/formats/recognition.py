"""Which formats a chat template writes: it is shown a call and thinking that are marked, and what it makes of
them is looked at. Templates that fail, or leave both out, are searched for the formats' words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, Protocol

from stemma.errors import InvalidRequest
from stemma.server.answers.formats.format import KEY, NAME, VALUE, ToolFormat
from stemma.server.answers.formats.registry import TOOL_FORMATS
from stemma.server.answers.formats.thinking import THINKING_FORMATS, ThinkingFormat

_THOUGHT, _ANSWER = "marked_thought", "marked_answer"
_QUESTION = {"role": "user", "content": "marked_question"}
_TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "A tool.",
        "parameters": {
            "type": "object",
            "properties": {KEY: {"type": "string", "description": "A text."}},
            "required": [KEY],
        },
    },
}
_THOUGHTS = {"reasoning_content": _THOUGHT, "reasoning": _THOUGHT, "thinking": _THOUGHT}
_WORDS = (
    (("<tool_call>", "<function=", "<parameter="), "qwen3_coder"),
    (("<tool_call>", "<arg_key>"), "glm"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("DSML", "function_calls"), "deepseek_v32"),
    (("DSML", "tool_calls"), "deepseek_v4"),
    (("<|tool_call_argument_begin|>",), "kimi_k2"),
    (("[TOOL_CALLS]", "[ARGS]"), "mistral_args"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|channel|>", "to=functions."), "harmony"),
    (("<|tool_call>call:",), "gemma4"),
    (("<|tool_call|>",), "granite"),
    (("functools",), "phi4"),
    (("<TOOLCALL>",), "nemotron"),
    (("<tool_calls>",), "jamba"),
    (("<|plugin|>",), "internlm"),
    (("<function_calls>",), "olmo3"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|tool_list_start|>",), "lfm2"),
    (("List of tools: [",), "lfm2"),
    (("<|START_ACTION|>",), "cohere"),
    (("<tool_call>",), "hermes"),
    (("<|python_start|>",), "pythonic"),
    (("[func_name1(",), "pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (('"parameters": dictionary of argument name',), "llama3_json"),
)
"""Words of templates that all must occur, each with a format; the first that fits counts."""


class Template(Protocol):
    """What is asked of a tokenizer."""

    @property
    def chat_template(self) -> str | None:
        """The template's text."""
        ...

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation; raise InvalidRequest if the template fails."""
        ...


def recognized(template: Template) -> tuple[ToolFormat | None, ThinkingFormat | None]:
    """Return the formats of calls and of thinking that `template` writes; None where it writes none."""
    source = template.chat_template
    if source is None:
        return None, None
    written = list(_renderings(template))
    return _tools(written, source), _thinking(written, source)


def _tools(written: list[str], source: str) -> ToolFormat | None:
    for form in TOOL_FORMATS.values():
        if any(form.shape.search(text) for text in written):
            return form
    for words, name in _WORDS:
        if all(word in source for word in words):
            return TOOL_FORMATS[name]
    return None


def _thinking(written: list[str], source: str) -> ThinkingFormat | None:
    for form in THINKING_FORMATS.values():
        closer = re.escape(form.closer)
        around = re.compile(rf"{re.escape(form.opener.rstrip())}\s*{_THOUGHT}\s*{closer}")
        if any(around.search(text) for text in written):
            behind = re.compile(rf"{_THOUGHT}\s*{closer}(.{{0,64}}?){_ANSWER}", re.DOTALL)
            found = next((match for text in written if (match := behind.search(text))), None)
            return form if found is None else replace(form, behind=found.group(1))
    for form in THINKING_FORMATS.values():
        if form.opener.rstrip() in source and form.closer in source:
            return form
    return None


def _renderings(template: Template) -> Iterator[str]:
    """Yield what the template writes of conversations with marked parts, as far as it doesn't fail."""
    thoughtful = {"role": "assistant", "content": _ANSWER, **_THOUGHTS}
    conversations: list[tuple[list[dict[str, Any]], bool]] = [([_QUESTION, thoughtful], False)]
    for arguments, thoughts in product(({KEY: VALUE}, f'{{"{KEY}": "{VALUE}"}}'), (_THOUGHTS, {})):
        function = {"name": NAME, "arguments": arguments}
        call = {"id": "markedid1", "type": "function", "function": function}
        calling = {"role": "assistant", "content": "", "tool_calls": [call], **thoughts}
        result = {"role": "tool", "tool_call_id": "markedid1", "name": NAME, "content": "marked_result"}
        conversations.append(([_QUESTION, calling, result], True))
    for messages, has_tools in conversations:
        try:
            yield template.render_chat(
                messages, tools=[_TOOL] if has_tools else None, add_generation_prompt=False
            )
        except InvalidRequest:
            continue
