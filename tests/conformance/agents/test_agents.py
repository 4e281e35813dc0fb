"""Agent frameworks over ten turns with a tool: each request computes its new text, and `explain` says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from tests.e2e.conftest import Served, start_server
from tests.e2e.preparing import looked_at, wait_for_turns, write_model_with_template

NUM_TURNS = 10
NEW_TOKENS = 40
"""More than a message, what the template puts around it, and what isn't worth a step of its own."""
TEMPLATE = (
    "{%- if tools -%}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif -%}"
    "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}"
    "{%- for call in message.tool_calls or [] -%}"
    "{{ '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}{%- endfor -%}"
    "{{ '<|im_end|>\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
"""Writes a call otherwise than a forced one is generated, as Qwen's does."""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    model = write_model_with_template(tmp_path / "tiny", TEMPLATE)
    made, stop = start_server(model, prepare_turns="on", kv_cache_memory="8MB", tool_parser="hermes")
    yield made
    stop()


def check(told: list[dict[str, Any]]) -> None:
    """Hold the explanations of an agent's requests, two for each turn, against what is promised."""
    assert len(told) == 2 * NUM_TURNS
    sizes = [one["prompt_tokens"] for one in told]
    assert sizes == sorted(sizes)
    assert sizes[-1] > 1000  # computing a prompt anew would be seen
    for number, one in enumerate(told[1:], start=1):
        assert one["computed_tokens"] <= NEW_TOKENS, (number, one)
        assert one["reason"] is not None
        assert one["detail"]
    assert told[-1]["exact_history_tokens"] > 0
    assert any(one["prepared_tokens"] > 0 for one in told)


@pytest.mark.slow
def test_openai_agents(served: Served) -> None:
    pytest.importorskip("agents")
    script = Path(__file__).parent / "openai_agents_turns.py"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(script), served.url],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    check([json.loads(line) for line in done.stdout.splitlines()])


@pytest.mark.slow
def test_langchain(served: Served) -> None:
    openai = pytest.importorskip("langchain_openai")
    from langchain_core.messages import BaseMessage, HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from pydantic import SecretStr

    @tool
    def water_level(city: Literal["Basel", "Vienna"]) -> str:
        """Level of a river at a city, in centimetres."""
        return {"Basel": "512", "Vienna": "241"}[city]

    model = openai.ChatOpenAI(
        base_url=f"{served.url}/v1",
        api_key=SecretStr("none"),
        model="tiny",
        max_retries=0,
        max_tokens=200,
        temperature=1.0,
        seed=5,
    )
    calls = model.bind_tools([water_level], tool_choice="any", strict=True, parallel_tool_calls=False)
    answers = model.bind_tools([water_level], strict=True, parallel_tool_calls=False)
    messages: list[BaseMessage] = []
    told: list[dict[str, Any]] = []

    def ask(bound: Any) -> Any:
        before = looked_at(served)
        answer = bound.invoke(messages)
        messages.append(answer)
        told.append(httpx.get(f"{served.url}/admin/explain").json())
        wait_for_turns(served, before + 1)  # as a tool or a person would
        return answer

    for turn in range(NUM_TURNS):
        messages.append(HumanMessage(f"Question {turn}: how high is it now?"))
        [call] = ask(calls).tool_calls
        messages.append(ToolMessage(water_level.invoke(call["args"]), tool_call_id=call["id"]))
        ask(answers)
    check(told)
