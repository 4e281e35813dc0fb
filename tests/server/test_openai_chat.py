from __future__ import annotations

import httpx

from tests.server.openai_requests import CHAT_URL, HELLO, chat, stream, texts_of
from tests.server.scripted_engine import ScriptedEngine


def prompt_text(engine: ScriptedEngine) -> str:
    return engine.tokenizer.decode(engine.requests[-1].prompt_token_ids.tolist())


async def test_renders_the_template_and_answers(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    answer = await chat(client, max_tokens=5)

    assert prompt_text(engine) == "<|user|>Hello\n<|assistant|>"
    [choice] = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == engine.tokenizer.decode(engine.reply_ids(engine.requests[0], 0))
    assert choice["finish_reason"] == "length"


async def test_without_a_limit_the_context_is_the_limit(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    await chat(client)
    await chat(client, max_tokens=5, max_completion_tokens=3)

    assert [request.params.max_tokens for request in engine.requests] == [None, 3]


async def test_stream_is_role_text_finish_usage(client: httpx.AsyncClient) -> None:
    whole = await chat(client, max_tokens=8, n=2)
    chunks = await stream(
        client, CHAT_URL, messages=HELLO, max_tokens=8, n=2, stream_options={"include_usage": True}
    )

    assert [chunk["choices"][0]["delta"] for chunk in chunks[:2]] == [
        {"role": "assistant", "content": ""}
    ] * 2
    assert texts_of(chunks) == {i: whole["choices"][i]["message"]["content"] for i in (0, 1)}
    ends = [
        choice["finish_reason"]
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["finish_reason"] is not None
    ]
    assert ends == ["length", "length"]
    assert chunks[-1]["usage"]["completion_tokens"] == 16


async def test_content_parts_are_joined(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await chat(client, messages=[{"role": "user", "content": parts}])

    assert prompt_text(engine) == "<|user|>a\nb\n<|assistant|>"


async def test_tools_go_to_the_template(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    await chat(client, tools=[tool, tool])
    assert "<|tools|>2" in prompt_text(engine)

    await chat(client, tools=[tool], tool_choice="none")
    assert "<|tools|>" not in prompt_text(engine)


async def test_tool_calls_in_the_history_are_accepted(client: httpx.AsyncClient) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "seen"},
    ]
    await chat(client, messages=messages)


async def test_template_arguments(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    await chat(client, chat_template_kwargs={"enable_thinking": False}, add_generation_prompt=False)

    assert prompt_text(engine) == "<|user|>Hello\n"


async def test_logprobs(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    answer = await chat(client, max_tokens=2, logprobs=True, top_logprobs=1)

    content = answer["choices"][0]["logprobs"]["content"]
    first = content[0]
    assert len(content) == 2
    assert first["logprob"] == -0.5
    assert first["top_logprobs"] == [{"token": first["token"], "logprob": -0.5, "bytes": first["bytes"]}]
    assert bytes(first["bytes"]).decode() == first["token"]
