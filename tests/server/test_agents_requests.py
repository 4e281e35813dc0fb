"""What coding agents send: never refused; what the server can't do is skipped and counted."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from stemma.config.settings import Settings
from stemma.server.app import create_app
from tests.server.openai_requests import counted
from tests.server.scripted_engine import ScriptedEngine

HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
READ = {"name": "Read", "description": "Read a file.", "input_schema": SCHEMA}
PATCH_GRAMMAR = 'start: "*** Begin" LF /[a-z]+/ LF "*** End"\n%import common.LF\n'
CODEX_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "exec", "parameters": SCHEMA, "strict": False},
    {"type": "web_search", "external_web_access": False},
    {"type": "image_generation", "output_format": "png"},
    {
        "type": "custom",
        "name": "apply",
        "description": "Change files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR},
    },
    {
        "type": "namespace",
        "name": "crm",
        "description": "Customers.",
        "tools": [
            {"type": "function", "name": "find", "parameters": SCHEMA},
            {"type": "custom", "name": "note"},
        ],
    },
    {"type": "local_shell"},
]


def prompt_of(engine: ScriptedEngine) -> str:
    return engine.tokenizer.decode(engine.requests[-1].prompt_token_ids.tolist())


async def claude(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await client.post("/v1/messages", json={"max_tokens": 9, "messages": HELLO, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def respond(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await client.post("/v1/responses", json={"input": "Hello", **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_edits_of_the_context_are_counted_and_answered(client: httpx.AsyncClient) -> None:
    before = await counted(client, "context_management")
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    found = await claude(client, context_management=edits, betas=["x"], speed="fast", diagnostics={})
    assert found["context_management"] == {"applied_edits": []}
    assert "context_management" not in await claude(client)
    assert await counted(client, "context_management") == before + 1
    body = {"max_tokens": 9, "messages": HELLO, "stream": True, "context_management": edits}
    events = (await client.post("/v1/messages", json=body)).text
    last = next(line for line in events.splitlines() if '"message_delta"' in line and "data:" in line)
    assert json.loads(last.removeprefix("data: "))["context_management"] == {"applied_edits": []}


async def test_a_nonce_of_claude_code_is_no_part_of_the_prompt(
    client: httpx.AsyncClient, engine: ScriptedEngine, settings: Settings
) -> None:
    def system(nonce: str) -> list[dict[str, str]]:
        line = f"x-anthropic-billing-header: cc_version=2.1; cch={nonce};"
        return [{"type": "text", "text": line}, {"type": "text", "text": "You write code."}]

    await claude(client, system=system("aaaa"))
    first = prompt_of(engine)
    await claude(client, system=system("bbbb"))
    assert prompt_of(engine) == first
    assert first.startswith("<|system|>You write code.\n<|user|>")
    await claude(client, system="x-anthropic-billing-header: cch=1;\nYou write code.")
    assert prompt_of(engine) == first

    told: list[dict[str, Any]] = [{"role": "system", "content": system("cccc")}, *HELLO]
    await client.post("/v1/chat/completions", json={"messages": told, "max_tokens": 9})
    assert prompt_of(engine) == first, "as a proxy in front translates it"
    told[0]["content"] = "\n".join(part["text"] for part in system("dddd"))
    await client.post("/v1/chat/completions", json={"messages": told, "max_tokens": 9})
    assert prompt_of(engine) == first
    alone = [{"role": "system", "content": system("eeee")[:1]}, *HELLO]
    await client.post("/v1/chat/completions", json={"messages": alone, "max_tokens": 9})
    assert "<|system|>" not in prompt_of(engine)

    server = settings.server.model_copy(update={"strip_client_nonces": False})
    kept = httpx.ASGITransport(app=create_app(engine, settings.model_copy(update={"server": server})))
    async with httpx.AsyncClient(transport=kept, base_url="http://localhost") as other:
        await claude(other, system=system("cccc"))
    assert "cch=cccc" in prompt_of(engine)


async def test_tools_that_anthropic_runs_are_skipped(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    hosted = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        {"type": "code_execution_20260521", "name": "code_execution"},
        {"type": "mcp_toolset", "mcp_server_name": "x"},
        {"type": "something_new_20300101", "name": "y"},
    ]
    before = await counted(client, "tools.web_search"), await counted(client, "tools.other")
    await claude(client, tools=[*hosted, READ], mcp_servers=[{"url": "x"}])
    assert "<|tools|>1" in prompt_of(engine)
    assert await counted(client, "tools.web_search") == before[0] + 1
    assert await counted(client, "tools.other") == before[1] + 1
    await claude(client, tools=hosted)
    assert "<|tools|>" not in prompt_of(engine)
    choice = {"type": "tool", "name": "web_search"}
    body = {"max_tokens": 9, "messages": HELLO, "tools": hosted, "tool_choice": choice}
    refused = await client.post("/v1/messages", json=body)
    assert (refused.status_code, "web_search" in refused.text) == (400, True)


async def test_tools_that_anthropic_defines_and_clients_run_are_offered(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    tools = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 9},
        {"type": "memory_20250818", "name": "memory"},
    ]
    await claude(client, tools=tools, tool_choice={"type": "tool", "name": "bash"})
    assert "<|tools|>3" in prompt_of(engine)
    grammar = engine.requests[-1].params.grammar
    assert grammar is not None
    assert "restart" in grammar.text


async def test_blocks_of_anthropics_servers_are_skipped_and_texts_are_spoken(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    document = {"type": "document", "title": "T", "source": {"type": "text", "data": "Rivers."}}
    result = {
        "type": "search_result",
        "title": "R",
        "source": "s",
        "content": [{"type": "text", "text": "r"}],
    }
    call = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}}
    found = {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []}
    answer = [{"type": "redacted_thinking", "data": "x"}, call, found, {"type": "text", "text": "A."}]
    later = [{"type": "tool_reference", "tool_name": "Read"}]
    turns = [
        {"role": "user", "content": [document, result, {"type": "new", "text": "Anew."}]},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": later}]},
    ]
    await claude(client, messages=turns)
    assert prompt_of(engine) == (
        "<|user|>T\nRivers.\nR\ns\nr\nAnew.\n<|assistant|>A.\n<|tool|>Read\n<|assistant|>"
    )


@pytest.mark.parametrize(
    "block",
    [
        {"type": "document", "source": {"type": "base64", "data": "x", "media_type": "application/pdf"}},
        {"type": "container_upload", "file_id": "x"},
        {"type": "search_result", "title": "t", "source": "s", "content": [{"type": "hologram"}]},
        {"type": "document", "source": {"type": "content", "content": [3]}},
        {"type": "hologram"},
        {},
    ],
)
async def test_content_that_no_model_would_see_is_refused_by_name(
    client: httpx.AsyncClient, block: dict[str, Any]
) -> None:
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": [block]}]}
    answer = await client.post("/v1/messages", json=body)
    assert answer.status_code == 400
    assert "messages[0].content[0]" in answer.json()["error"]["message"]


@pytest.mark.parametrize("content", [[{"type": "thinking", "thinking": "", "signature": ""}], []])
async def test_an_answer_of_nothing_but_thinking_comes_back(
    client: httpx.AsyncClient, engine: ScriptedEngine, content: list[dict[str, Any]]
) -> None:
    await claude(client, messages=[*HELLO, {"role": "assistant", "content": content}, *HELLO])
    assert prompt_of(engine).count("<|user|>Hello") == 2


async def test_what_codex_sends_is_answered(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    before = await counted(client, "tools.web_search")
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be short."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"},
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "q"}},
        {
            "type": "custom_tool_call",
            "call_id": "c1",
            "name": "apply",
            "input": "*** x",
            "status": "completed",
        },
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {
            "type": "local_shell_call",
            "call_id": "c2",
            "status": "completed",
            "action": {"type": "exec", "command": ["ls"], "env": {}},
        },
        {"type": "function_call_output", "call_id": "c2", "output": "files"},
        {"type": "function_call", "call_id": "c3", "name": "find", "namespace": "crm", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c3", "output": [{"type": "input_text", "text": "none"}]},
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "agent_message", "author": "a", "content": [{"type": "input_text", "text": "From a."}]},
        {"type": "ghost_snapshot", "ghost_commit": {}},
        {"type": "something_new"},
    ]
    await respond(client, instructions="Write code.", input=items, tools=CODEX_TOOLS, store=False)
    assert prompt_of(engine) == (
        "<|system|>Write code.\n<|system|>Be short.\n<|user|>Hi\n<|assistant|>\n<|tool|>done\n<|assistant|>\n"
        "<|tool|>files\n<|assistant|>\n<|tool|>none\n<|user|>From a.\n<|tools|>5\n<|assistant|>"
    )
    assert await counted(client, "tools.web_search") == before + 1


async def test_a_forced_tool_of_plain_text_has_its_grammar_and_its_own_item(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script.reply = '*** Begin\n"abc"\n*** End'
    choice = {"type": "custom", "name": "apply"}
    found = await respond(client, tools=CODEX_TOOLS, tool_choice=choice)
    grammar = engine.requests[-1].params.grammar
    assert grammar is not None
    assert (grammar.kind, grammar.text) == ("grammar", PATCH_GRAMMAR)
    [item] = found["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply", engine.script.reply)
    assert "<|tools|>5" in prompt_of(engine)


@pytest.mark.parametrize("choice", [{"type": "web_search"}, {"type": "mcp", "server_label": "x"}])
async def test_a_choice_of_what_is_not_offered_is_refused(
    client: httpx.AsyncClient, choice: dict[str, Any]
) -> None:
    answer = await client.post(
        "/v1/responses", json={"input": "Hello", "tools": CODEX_TOOLS, "tool_choice": choice}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_item_has_one_id_in_events_answer_and_store(
    client: httpx.AsyncClient, engine: ScriptedEngine, stream: bool
) -> None:
    engine.script.reply = "*** Begin"
    made = (await client.post("/v1/conversations", json={})).json()
    choice = {"type": "custom", "name": "apply"}
    body = {"input": "Hello", "tools": CODEX_TOOLS, "tool_choice": choice, "conversation": made["id"]}
    answer = await client.post("/v1/responses", json={**body, "stream": stream})
    told = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    response = told[-1]["response"] if stream else answer.json()
    [item] = response["output"]
    assert {each["item"]["id"] for each in told if "item" in each} <= {item["id"]}
    assert {each["item_id"] for each in told if "item_id" in each} <= {item["id"]}
    assert {each["response"]["id"] for each in told if "response" in each} <= {response["id"]}
    stored = (await client.get(f"/v1/responses/{response['id']}")).json()
    assert stored == response
    asked = (await client.get(f"/v1/responses/{response['id']}/input_items")).json()["data"]
    kept = (await client.get(f"/v1/conversations/{made['id']}/items")).json()["data"]
    assert [one["id"] for one in kept] == [item["id"], *(one["id"] for one in asked)]
    assert kept[0] == item


async def test_more_tools_than_any_prompt_holds(client: httpx.AsyncClient) -> None:
    tools = [{"type": "function", "name": f"f{number}"} for number in range(700)]
    both = [{"type": "namespace", "name": name, "tools": tools} for name in ("a", "b")]
    answer = await client.post("/v1/responses", json={"input": "x", "tools": both})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")


async def test_tools_that_an_item_adds_are_offered(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    more = {
        "type": "additional_tools",
        "role": "developer",
        "tools": [CODEX_TOOLS[0], {"type": "web_search"}],
    }
    await respond(client, input=[{"role": "user", "content": "x"}, more])
    assert "<|tools|>1" in prompt_of(engine)
