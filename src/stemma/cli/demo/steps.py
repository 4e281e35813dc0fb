"""The steps of the demo, in order. To add one: write a function of the stage, and add it to `STEPS`."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable

from rich.padding import Padding
from rich.text import Text

from stemma.cli.demo import texts
from stemma.cli.demo.stage import Stage, bar
from stemma.cli.random_text import TextMaker

Step = Callable[[Stage], Awaitable[None]]
_ANSWER_TOKENS = 48
_NUM_FILLERS = 8
_FILLER_WORDS = 1200


async def miss_and_hit(stage: Stage) -> None:
    """The same prompt twice, then another question after the same long text."""
    stage.title("1. A miss, then hits", "A handbook with a question; the same again; another question.")
    first, second = map(texts.about_handbook, texts.HANDBOOK_QUESTIONS)
    miss = await stage.chat("new prompt", first)
    hit = await stage.chat("the same prompt", first)
    shared = await stage.chat("another question", second)
    stage.show([miss, hit, shared])
    same = ", and the same answer" if miss.text == hit.text else ""
    stage.console.print(f"First token {miss.seconds / hit.seconds:.0f} x sooner{same}.")


async def partial_hit(stage: Stage) -> None:
    """Two prompts share less than one block."""
    stage.title(
        "2. Less than a block",
        "A block holds 64 tokens. These two prompts share fewer; what they share is still reused.",
    )
    first, second = map(texts.to_keeper, texts.KEEPER_QUESTIONS)
    stage.show([await stage.chat("one question", first), await stage.chat("another", second)])


async def dialogue(stage: Stage) -> None:
    """Two rounds over /generate: the second prompt is first question + first answer + second question."""
    stage.title(
        "3. A dialogue of two rounds",
        "The second prompt is the first question, its answer, and a second question. Times are of whole "
        "requests here.",
    )
    first, second = texts.DIALOGUE
    example = json.dumps({"inputs": texts.dialogue("..."), "parameters": {"max_new_tokens": _ANSWER_TOKENS}})
    command = f"curl {stage.server.url}/generate -H 'Content-Type: application/json' -d '{example}'"
    stage.console.print(Text(command, style="yellow"), soft_wrap=True)
    opening = await stage.generate("first round", texts.dialogue(first), _ANSWER_TOKENS)
    prompt = texts.dialogue(first, opening.text, second)
    stage.show([opening, await stage.generate("second round", prompt, _ANSWER_TOKENS)])


async def few_shot(stage: Stage) -> None:
    """Sixteen questions at once after the same worked examples: the examples are computed once."""
    stage.title(
        "4. Sixteen few-shot prompts at once",
        "The same eight worked examples, sixteen questions, all sent together: one request computes the "
        "examples, the others wait for it instead of computing them again.",
    )
    started = time.perf_counter()
    outcomes = await asyncio.gather(
        *(
            stage.complete(f"question {number}", texts.few_shot(question), max_tokens=24)
            for number, question in enumerate(texts.QUESTIONS, 1)
        )
    )
    seconds = time.perf_counter() - started
    for outcome in outcomes:
        counts = f" {outcome.num_cached_tokens:>4} of {outcome.num_prompt_tokens} from cache  "
        share = bar(outcome.num_cached_tokens, outcome.num_prompt_tokens, 12)
        line = Text(f"{outcome.label:<12} ") + share + Text(counts) + Text(outcome.answer, style="italic")
        stage.console.print(line, no_wrap=True, overflow="ellipsis")
    total = sum(outcome.num_prompt_tokens for outcome in outcomes)
    cached = sum(outcome.num_cached_tokens for outcome in outcomes)
    stage.console.print(
        f"{total} prompt tokens, [bold]{cached} from cache[/], {total - cached} computed; "
        f"all answered in {seconds:.2f} s."
    )


async def drafts(stage: Stage) -> None:
    """The same question from another session: what was said before is the draft."""
    stage.title(
        "5. Drafts",
        "Somebody else asks what was asked before. The tree knows how the answer went on then; the model "
        "checks up to 16 of those tokens in one step, and keeps those that it would have chosen itself.",
    )
    question = [{"role": "user", "content": texts.REPEATED_QUESTION}]
    for label in ("first asked", "asked again"):
        before = await stage.stats()
        outcome = await stage.chat(label, question, max_tokens=96)
        after = await stage.stats()
        drafted, held = (
            after[name] - before[name] for name in ("num_draft_tokens", "num_accepted_draft_tokens")
        )
        stage.console.print(
            f"{label:<17} {outcome.num_generated_tokens} tokens in [bold]{1000 * outcome.total_s:.0f} ms[/]; "
            f"{held} of {drafted} draft tokens held"
        )
        stage.console.print(Padding(Text(outcome.answer, style="italic"), (0, 0, 0, 18)))


async def tree(stage: Stage) -> None:
    """Draw what is cached now."""
    stage.title("6. The tree", "Everything above is now one tree; it branches where prompts part.")
    drawing = (await stage.http.get("/admin/cache/tree", params={"max_tokens": 10})).text
    stage.console.print(Text(drawing, style="green"), no_wrap=True, overflow="ellipsis")


async def totals(stage: Stage) -> None:
    """Say what the cache saved."""
    stage.title("In total", "By the server's own counters: /admin/stats, and /metrics for Prometheus.")
    stats = await stage.stats()
    cached = sum(stats["cached_tokens_by_tier"].values())
    total = stats["num_prompt_tokens"]
    stage.console.print(bar(cached, total, 60))
    stage.console.print(
        f"{total} prompt tokens: [bold green]{cached} from cache ({100 * cached / total:.0f} %)[/], "
        f"[red]{total - cached} computed[/]."
    )


async def demotion(stage: Stage) -> None:
    """Evict the handbook from the device tier, and ask about it again."""
    stage.title(
        "7. Out of memory, not out of reach",
        "New prompts need the blocks. What they push out of the device tier moves one tier down, to DRAM "
        "(host), and comes back when it is asked for.",
    )
    before = (await stage.stats())["num_evicted_blocks"]
    maker = TextMaker(random.Random(0))
    for number in range(_NUM_FILLERS):
        await stage.complete("filler", f"{number}. {maker.text(_FILLER_WORDS)}", max_tokens=1)
    after = (await stage.stats())["num_evicted_blocks"]
    stage.console.print(f"{_NUM_FILLERS} long new prompts; {after - before} blocks moved down.")
    question = texts.about_handbook(texts.HANDBOOK_QUESTIONS[0])
    stage.show([await stage.chat("the handbook", question)])


async def crash(stage: Stage) -> None:
    """Kill the server, start it again: what was on disk is a hit."""
    stage.title(
        "8. kill -9 and a restart",
        "Full blocks are on disk as well. The server is killed and started again on the same directory.",
    )
    seconds = await stage.restart()
    stage.console.print(f"Killed; ready again after {seconds:.0f} s, most of it importing torch.")
    await stage.complete("warm-up", "Hello")
    question = texts.about_handbook(texts.HANDBOOK_QUESTIONS[0])
    again = await stage.chat("after the restart", question)
    stage.show([again, await stage.chat("the same prompt", question)])


CACHE_STEPS: tuple[Step, ...] = (miss_and_hit, partial_hit, dialogue, few_shot, drafts, tree, totals)
"""Need nothing but a server."""
TIER_STEPS: tuple[Step, ...] = (demotion, crash)
"""Need a server process of our own, with a small device tier and tiers below it."""
STEPS = (*CACHE_STEPS, *TIER_STEPS)
