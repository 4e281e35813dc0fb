"""The steps of the demo, in order. To add one: write a function of the stage, and add it to `STEPS`."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable

from rich.text import Text

from stemma.cli.bench.workloads import TextMaker
from stemma.cli.demo import texts
from stemma.cli.demo.stage import Stage, bar

Step = Callable[[Stage], Awaitable[None]]
_ANSWER_TOKENS = 48
_NUM_FILLERS = 8
_FILLER_WORDS = 400


async def miss_and_hit(stage: Stage) -> None:
    """The same prompt twice, then another question after the same long text."""
    stage.title("1. A miss, then hits", "A handbook with a question; the same again; another question.")
    first, second = texts.HANDBOOK_QUESTIONS
    miss = await stage.complete("new prompt", texts.HANDBOOK + first)
    hit = await stage.complete("the same prompt", texts.HANDBOOK + first)
    shared = await stage.complete("another question", texts.HANDBOOK + second)
    stage.show([miss, hit, shared])
    if miss.text == hit.text:
        stage.console.print(f"First token {miss.seconds / hit.seconds:.0f} x sooner, and the same answer.")


async def partial_hit(stage: Stage) -> None:
    """Two prompts share less than one block."""
    stage.title(
        "2. Less than a block",
        "A block holds 64 tokens. These two prompts share fewer; what they share is reused all the same.",
    )
    first, second = texts.SHORT_QUESTIONS
    stage.show(
        [
            await stage.complete("one question", texts.SHORT_PREFIX + first),
            await stage.complete("another", texts.SHORT_PREFIX + second),
        ]
    )


async def dialogue(stage: Stage) -> None:
    """Two rounds over /generate: the second prompt is first question + first answer + second question."""
    stage.title(
        "3. A dialogue of two rounds",
        "The second prompt is the first question, its answer, and a second question.",
    )
    example = json.dumps({"inputs": "Question: ...", "parameters": {"max_new_tokens": _ANSWER_TOKENS}})
    command = f"curl {stage.server.url}/generate -H 'Content-Type: application/json' -d '{example}'"
    stage.console.print(Text(command, style="yellow"), soft_wrap=True)
    first = await stage.generate("first round", texts.DIALOGUE_FIRST, _ANSWER_TOKENS)
    prompt = texts.DIALOGUE_FIRST + first.text + texts.DIALOGUE_SECOND
    second = await stage.generate("second round", prompt, _ANSWER_TOKENS)
    stage.show([first, second])
    stage.console.print(
        "[dim]Times are of whole requests here. The weights are random, and so is the text: read back it may "
        "be other tokens than were written, and then the reuse ends inside the answer.[/]",
    )


async def few_shot(stage: Stage) -> None:
    """Sixteen questions at once after the same worked examples: the examples are computed once."""
    stage.title(
        "4. Sixteen few-shot prompts at once",
        "The same eight worked examples, sixteen questions, all sent together: one request computes the "
        "examples, the others wait for it instead of computing them again.",
    )
    prefix = texts.few_shot_prefix()
    started = time.perf_counter()
    outcomes = await asyncio.gather(
        *(
            stage.complete(f"question {number}", f"{prefix}Question: {question}\nAnswer:")
            for number, question in enumerate(texts.QUESTIONS, 1)
        )
    )
    seconds = time.perf_counter() - started
    for outcome in outcomes:
        share = bar(outcome.num_cached_tokens, outcome.num_prompt_tokens, 30)
        counts = f" {outcome.num_cached_tokens:>4} of {outcome.num_prompt_tokens} from cache"
        stage.console.print(Text(f"{outcome.label:<12} ") + share + Text(counts))
    total = sum(outcome.num_prompt_tokens for outcome in outcomes)
    cached = sum(outcome.num_cached_tokens for outcome in outcomes)
    stage.console.print(
        f"{total} prompt tokens, [bold]{cached} from cache[/], {total - cached} computed, in {seconds:.2f} s."
    )


async def tree(stage: Stage) -> None:
    """Draw what is cached now."""
    stage.title("5. The tree", "Everything above is now one tree; it branches where prompts part.")
    drawing = (await stage.http.get("/admin/cache/tree", params={"max_tokens": 10})).text
    stage.console.print(Text(drawing, style="green"), no_wrap=True, overflow="ellipsis")


async def totals(stage: Stage) -> None:
    """Say what the cache saved."""
    stage.title("In total", "By the server's own counters: /admin/stats, and /metrics for Prometheus.")
    stats = (await stage.http.get("/admin/stats")).json()
    cached = sum(stats["cached_tokens_by_tier"].values())
    total = stats["num_prompt_tokens"]
    stage.console.print(bar(cached, total, 60))
    stage.console.print(
        f"{total} prompt tokens: [bold green]{cached} from cache ({100 * cached / total:.0f} %)[/], "
        f"[red]{total - cached} computed[/]."
    )


async def demotion(stage: Stage) -> None:
    """Push the handbook out of the device tier, and ask about it again."""
    stage.title(
        "6. Out of memory, not out of reach",
        "New prompts need the blocks. What they push out of the device tier moves one tier down, to DRAM "
        "(host), and comes back when it is asked for.",
    )
    before = (await stage.http.get("/admin/stats")).json()["num_evicted_blocks"]
    maker = TextMaker(random.Random(0))
    for number in range(_NUM_FILLERS):
        await stage.complete("filler", f"{number}. {maker.text(_FILLER_WORDS)}", max_tokens=1)
    after = (await stage.http.get("/admin/stats")).json()["num_evicted_blocks"]
    stage.console.print(f"{_NUM_FILLERS} long new prompts; {after - before} blocks moved down.")
    question = texts.HANDBOOK_QUESTIONS[0]
    stage.show([await stage.complete("the handbook", texts.HANDBOOK + question)])


async def crash(stage: Stage) -> None:
    """Kill the server, start it again: what was on disk is a hit."""
    stage.title(
        "7. kill -9 and a restart",
        "Full blocks are on disk as well. The server is killed and started again on the same directory.",
    )
    seconds = await stage.restart()
    stage.console.print(f"Killed; ready again after {seconds:.0f} s, most of it importing torch.")
    await stage.complete("warm-up", "Hello")
    question = texts.HANDBOOK_QUESTIONS[0]
    again = await stage.complete("after the restart", texts.HANDBOOK + question)
    stage.show([again, await stage.complete("the same prompt", texts.HANDBOOK + question)])


CACHE_STEPS: tuple[Step, ...] = (miss_and_hit, partial_hit, dialogue, few_shot, tree, totals)
"""Need nothing but a server."""
TIER_STEPS: tuple[Step, ...] = (demotion, crash)
"""Need a server process of our own, with a small device tier and tiers below it."""
STEPS = (*CACHE_STEPS, *TIER_STEPS)
