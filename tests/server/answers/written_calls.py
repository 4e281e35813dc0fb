"""Small chat templates of our own, and calls as they write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import _compile_jinja_template

from stemma.errors import InvalidRequest
from stemma.server.answers.formats.registry import TOOL_FORMATS

TEMPLATES = Path(__file__).parent / "templates"
EXPECTED = {
    "chatml_hermes": ("hermes", "think"),
    "qwen3_coder": ("qwen3_coder", None),
    "glm": ("glm", "think"),
    "glm47": ("glm47", "think"),
    "harmony": ("harmony", "harmony"),
    "kimi_k2": ("kimi_k2", "think"),
    "minimax_m2": ("minimax_m2", "think"),
    "deepseek_v3": ("deepseek_v3", None),
    "deepseek_v31": ("deepseek_v31", "think"),
    "deepseek_v32": ("deepseek_v32", "think"),
    "mistral_list": ("mistral", None),
    "mistral_args": ("mistral_args", "mistral"),
    "gemma4": ("gemma4", "gemma4"),
    "seed_oss": ("seed_oss", "seed"),
    "mimo": ("mimo", "think"),
    "granite3": ("granite", None),
    "phi4": ("phi4", None),
    "nemotron": ("nemotron", None),
    "jamba": ("jamba", None),
    "lfm2": ("lfm2", None),
    "olmo3": ("olmo3", None),
    "llama4_pythonic": ("pythonic", None),
    "llama3_json": ("llama3_json", None),
    "internlm": ("internlm", None),
    "cohere": ("cohere", "cohere"),
    "no_calls": (None, None),
}


class Written:
    """A chat template, rendered as transformers does."""

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        try:
            template = _compile_jinja_template(self.chat_template)
            return template.render(
                messages=messages, tools=tools, add_generation_prompt=add_generation_prompt
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise InvalidRequest(str(error)) from error


def template(name: str) -> Written:
    return Written((TEMPLATES / f"{name}.jinja").read_text())


ONE_CALL = ("llama3_json",)
WRITERS = [name for name, (tools, _) in EXPECTED.items() if tools is not None and name != "llama4_pythonic"]
ENDS = (
    "<|im_end|>",
    "[e~[",
    "<｜end▁of▁sentence｜>",
    "</s>",
    "<turn|>",
    "<seed:eos>",
    "<|end_of_text|>",
    "<|end|>",
    "<|eom|>",
    "<|eot_id|>",
    "<|call|>",
    "<|END_OF_TURN|>",
)


def written(name: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Return `calls` as the template writes them."""
    form = TOOL_FORMATS[EXPECTED[name][0] or ""]
    told = []
    for number, (tool, arguments) in enumerate(calls):
        given = json.dumps(arguments, ensure_ascii=False) if name == "deepseek_v3" else arguments
        call_id = f"functions.{tool}:{number}"
        told.append({"id": call_id, "type": "function", "function": {"name": tool, "arguments": given}})
    question = {"role": "user", "content": "?"}
    answer = {"role": "assistant", "content": "", "tool_calls": told}
    text = template(name).render_chat([question, answer], add_generation_prompt=False).rstrip("\n")
    for end in ENDS:
        text = text.removesuffix(end)
    if name == "harmony":
        return text[text.index("<|start|>assistant") :].removeprefix("<|start|>assistant")
    return text[text.index(form.opens[0] if form.opens else '{"name"') :]
