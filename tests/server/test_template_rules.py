"""Conversations in the form that a template takes: found by probing it, the same as they grow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from stemma.config.settings import Settings
from stemma.model.text.tokenizer import Tokenizer
from stemma.server.app import create_app
from stemma.server.schemas.openai import Message
from stemma.server.turn.template_messages import template_messages
from stemma.server.turn.template_rules import TemplateRules
from tests.server.scripted_engine import ScriptedEngine

_CALLS = "{% for call in m.tool_calls or [] %}!{{ call.function.name }} {{ ARGUMENTS }}{% endfor %}"
_TURN = "<{{ m.role }}>{{ m.content }}" + _CALLS.replace("ARGUMENTS", "call.function.arguments | tojson")
STRICT = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    + _TURN
    + "{{ '\n' }}{% endfor %}<assistant>"
)
"""A system message only first, as Qwen3.5."""
ALTERNATING = (
    "{% set ns = namespace(turns=0) %}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.turns % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "{% set ns.turns = ns.turns + 1 %}{% endif %}"
    "{% for call in m.tool_calls or [] %}{% if call.id | length != 9 %}{{ raise_exception('id') }}{% endif %}"
    "{% endfor %}" + _TURN + "{{ '\n' }}{% endfor %}<assistant>"
)
"""No system, turns that alternate, ids of nine letters: Gemma 2's and Mistral's rules."""
DROPPING = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant', 'tool'] or (m.role == 'developer' and "
    "loop.first) %}"
    "{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
    "{% if m.thinking %}({{ m.thinking }}){% endif %}"
    + _TURN
    + "{{ '\n' }}{% endif %}{% endfor %}<assistant>"
)
"""`developer` first, other roles dropped without a word, `thinking`: GPT-OSS's rules."""
TEXTUAL = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ '!' + call.function.name + ' ' + call.function.arguments }}{% endfor %}"
    "{{ '\n' }}{% endfor %}<assistant>"
)
"""Arguments as text: DeepSeek-V3's rule."""
PYTHONIC = TEXTUAL.replace("{{ '!' + call.function.name + ' ' + call.function.arguments }}", "{{ call }}")

With = Callable[[str], Tokenizer]


@pytest.fixture
def with_template(tokenizer_path: Path, tmp_path: Path) -> With:
    def made(template: str) -> Tokenizer:
        raw = AutoTokenizer.from_pretrained(str(tokenizer_path))
        raw.chat_template = template
        raw.save_pretrained(str(tmp_path))
        return Tokenizer(tmp_path)

    return made


def rendered(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> str:
    rules = TemplateRules.of(tokenizer, sees=False)
    told = [Message.model_validate(one) for one in messages]
    return tokenizer.render_chat(template_messages(told, sees=False, rules=rules)[0])


def says(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def calling(arguments: str = "{}", call_id: str = "call_123", **more: Any) -> list[dict[str, Any]]:
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call], **more},
        {"role": "tool", "tool_call_id": call_id, "content": "4"},
    ]


def test_what_the_templates_take(with_template: With) -> None:
    strict = TemplateRules.of(with_template(STRICT), sees=False)
    assert (strict.system, strict.several_system, strict.late_system) == (True, False, False)
    assert (strict.developer, strict.repeated_user, strict.argument_objects) == (False, True, True)
    alternating = TemplateRules.of(with_template(ALTERNATING), sees=False)
    for wrong in ("system", "repeated_user", "user_after_tool", "long_ids"):
        assert not getattr(alternating, wrong)
    assert alternating.argument_objects
    dropping = TemplateRules.of(with_template(DROPPING), sees=False)
    assert (dropping.developer, dropping.system) == (True, False)
    assert not dropping.reasoning_and_text
    for template in (TEXTUAL, PYTHONIC):
        assert not TemplateRules.of(with_template(template), sees=False).argument_objects
    assert TemplateRules.of(with_template("{{ raise_exception('no') }}"), sees=False) == TemplateRules()


def test_system_messages_around_the_first_words_become_one_and_later_ones_join_a_turn(
    with_template: With,
) -> None:
    messages = [says("system", "a"), says("developer", "b"), says("user", "c"), says("system", "d")]
    assert rendered(with_template(STRICT), messages) == ("<system>a\n\nb\n\nd\n<user>c\n<assistant>")
    later = [says("user", "c"), says("assistant", "d"), says("system", "e"), says("system", "f")]
    assert rendered(with_template(STRICT), [*later, says("user", "g")]).endswith(
        "<user><system>\ne\n</system>\n\n<system>\nf\n</system>\n\ng\n<assistant>"
    )
    assert rendered(with_template(STRICT), later).endswith("</system>\n<assistant>")


def test_a_template_without_system_gets_its_text_in_the_first_turn(with_template: With) -> None:
    messages = [says("system", "a"), says("system", "b"), says("user", "c"), says("user", "d")]
    assert rendered(with_template(ALTERNATING), messages) == "<user>a\n\nb\n\nc\n\nd\n<assistant>"
    after = [says("user", "a"), *calling(), says("user", "b")]
    assert rendered(with_template(ALTERNATING), after).endswith("<tool>4\n\nb\n<assistant>")
    answers = [says("user", "a"), says("assistant", "b"), says("assistant", "c"), says("user", "d")]
    assert rendered(with_template(ALTERNATING), answers) == "<user>a\n<assistant>b\n\nc\n<user>d\n<assistant>"
    alone = [says("system", "a"), says("assistant", "b")]
    assert rendered(with_template(ALTERNATING), alone) == "<user>a\n<assistant>b\n<assistant>"


def test_developer_messages_go_where_the_template_shows_them(with_template: With) -> None:
    messages = [says("developer", "a"), says("system", "b"), says("user", "c"), says("developer", "d")]
    text = rendered(with_template(DROPPING), messages)
    assert all(word in text for word in "abcd")


def test_a_prompt_that_grows_keeps_its_beginning(with_template: With) -> None:
    turns = [
        says("system", "a"),
        says("user", "b"),
        says("system", "c"),
        *calling(),
        says("system", "d"),
        says("assistant", "e"),
        says("system", "f"),
        says("user", "g"),
        says("assistant", "h"),
    ]
    ends = [3, 6, 9]  # a request ends before each answer
    for template in (STRICT, ALTERNATING, DROPPING, TEXTUAL):
        tokenizer = with_template(template)
        prompts = [rendered(tokenizer, turns[:end]).removesuffix("<assistant>") for end in ends]
        whole = rendered(tokenizer, turns)
        assert all(whole.startswith(prompt) for prompt in prompts), template


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_goes_where_the_template_reads_it(with_template: With, field: str) -> None:
    answer = calling(**{field: "hm"})
    assert "(hm)" in rendered(with_template(DROPPING), [says("user", "a"), *answer])
    answer[0]["content"] = "I look."
    assert "(hm\n\nI look.)" in rendered(with_template(DROPPING), [says("user", "a"), *answer])


def test_openrouters_list_of_reasoning_is_read(with_template: With) -> None:
    details = [{"type": "reasoning.text", "text": "h"}, {"type": "reasoning.encrypted", "data": "x"}]
    answer = calling(reasoning_details=[*details, {"type": "reasoning.summary", "summary": "m"}])
    assert "(hm)" in rendered(with_template(DROPPING), [says("user", "a"), *answer])


def test_ids_of_calls_are_always_the_same_short_ones(with_template: With) -> None:
    rules = TemplateRules.of(with_template(ALTERNATING), sees=False)
    told = [
        Message.model_validate(one) for one in [says("user", "a"), *calling(), *calling(call_id="abcdefgh9")]
    ]
    messages, _ = template_messages(told, sees=False, rules=rules)
    first, second = messages[1]["tool_calls"][0]["id"], messages[3]["tool_calls"][0]["id"]
    assert (len(first), first, second) == (9, messages[2]["tool_call_id"], "abcdefgh9")


BROKEN = ['{"a": "x\ny"}', '{"a": "cut', '{"a": [1, ', "no JSON", "[1]", "", '{"a": 1', "\ud800"]


@pytest.mark.parametrize("arguments", BROKEN)
@pytest.mark.parametrize("template", [STRICT, ALTERNATING, DROPPING, TEXTUAL, PYTHONIC])
def test_broken_arguments_are_always_the_same_prompt(
    with_template: With, template: str, arguments: str
) -> None:
    tokenizer = with_template(template)
    messages = [says("user", "a"), *calling(arguments), says("user", "b")]
    assert rendered(tokenizer, messages) == rendered(tokenizer, messages)


def test_a_tool_result_knows_the_name_of_its_call(with_template: With) -> None:
    told = [Message.model_validate(one) for one in [says("user", "a"), *calling()]]
    messages, _ = template_messages(told, sees=False, rules=TemplateRules())
    assert messages[-1]["name"] == "f"


@pytest.mark.parametrize("arguments", BROKEN[:-1])
@pytest.mark.parametrize("template", [STRICT, ALTERNATING, TEXTUAL])
async def test_no_api_refuses_what_the_server_wrote(
    with_template: With, settings: Settings, template: str, arguments: str
) -> None:
    """A call as it may end at the limit, with the thinking alone before it, in all three shapes."""
    engine = ScriptedEngine(with_template(template))
    transport = httpx.ASGITransport(app=create_app(engine, settings))
    chat = [
        says("user", "a"),
        *calling(arguments),
        says("assistant", None, reasoning="hm"),
        says("user", "b"),
    ]
    items = [
        says("user", "a"),
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments},
        {"type": "function_call_output", "call_id": "c", "output": "4"},
        says("assistant", [{"type": "output_text", "text": ""}]),
        says("user", "b"),
    ]
    blocks = [
        says("user", "a"),
        says("assistant", [{"type": "tool_use", "id": "c", "name": "f", "input": arguments}]),
        says("user", [{"type": "tool_result", "tool_use_id": "c", "content": "4"}]),
        says("assistant", [{"type": "thinking", "thinking": "hm", "signature": ""}]),
        says("user", "b"),
    ]
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for path, body in (
            ("/v1/chat/completions", {"messages": chat}),
            ("/v1/responses", {"input": items}),
            ("/v1/messages", {"messages": blocks, "max_tokens": 4}),
        ):
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, (path, answer.text)


TEMPLATES = sorted((Path(__file__).resolve().parents[1] / "templates").glob("*.jinja"))


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_every_familys_template_takes_what_agents_send(with_template: With, path: Path) -> None:
    """Roles anywhere, a call with text and thinking, broken arguments: shown, and the same as it grows."""
    tokenizer = with_template(path.read_text())
    answer = calling('{"a": "cut', content="I look.", reasoning="hm")
    turns = [says("system", "Sa"), says("developer", "Sb"), says("user", "Uc"), says("system", "Sd"), *answer]
    turns += [says("user", "Ue"), says("assistant", "Af"), says("system", "Sg"), says("user", "Uh")]
    whole = rendered(tokenizer, turns)
    words = ("Sa", "Sb", "Sd", "Uc", "cut", "Ue", "Af", "Sg", "Uh")
    places = [whole.index(word) for word in words]
    assert places == sorted(places)
    prompt = rendered(tokenizer, turns[:4])
    shared = next(
        (n for n, (one, other) in enumerate(zip(prompt, whole, strict=False)) if one != other), None
    )
    assert shared is None or shared > prompt.index("Uc"), "the answer's turn may begin in another way"
