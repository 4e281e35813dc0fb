"""An agent of openai-agents over ten turns with a tool; prints a line of JSON for each request that it sends.

``python openai_agents_turns.py URL``. Run by `test_agents.py`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import urllib.request
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunHooks,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

NUM_TURNS = 10


@function_tool
def water_level(city: Literal["Basel", "Vienna"]) -> str:
    """Level of a river at a city, in centimetres."""
    return {"Basel": "512", "Vienna": "241"}[city]


class Explains(RunHooks[Any]):  # type: ignore[misc]
    """Says what each request computed, and waits as a tool or a person would."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._num_asked = 0

    async def on_llm_end(self, *_: Any, **__: Any) -> None:
        """Print why the last request computed what it did."""
        self._num_asked += 1
        print(json.dumps(json.loads(self._get("/admin/explain"))), flush=True)
        end = time.monotonic() + 20
        while self._num_looked_at() < self._num_asked and time.monotonic() < end:
            await asyncio.sleep(0.02)

    def _num_looked_at(self) -> float:
        lines = self._get("/metrics").splitlines()
        counts = [line for line in lines if line.startswith("stemma_prepared_turns_total")]
        return sum(float(line.split()[-1]) for line in counts)

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(self._url + path) as answer:
            text: str = answer.read().decode()
        return text


async def main(url: str) -> None:
    """Ask ten questions in one session; each begins with a call of the tool."""
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    agent = Agent(
        name="Ranger",
        instructions="You watch rivers.",
        model=OpenAIChatCompletionsModel("tiny", client),
        model_settings=ModelSettings(
            temperature=1.0,
            max_tokens=200,
            tool_choice="required",
            parallel_tool_calls=False,
            extra_body={"seed": 5},
        ),
        tools=[water_level],
    )
    session, hooks = SQLiteSession("rivers"), Explains(url)
    for turn in range(NUM_TURNS):
        await Runner.run(agent, f"Question {turn}: how high is it now?", session=session, hooks=hooks)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
