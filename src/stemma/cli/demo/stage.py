"""Shared by all steps of the demo: the server, a client, and the display of requests."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from stemma.cli.client import make_http, stream_answer
from stemma.cli.demo.texts import Messages
from stemma.cli.server_process import ServerProcess

_BAR_CELLS = 16


@dataclass(frozen=True, slots=True)
class StageOutcome:
    """One request, as the client saw it."""

    label: str
    num_prompt_tokens: int
    num_cached_tokens: int
    seconds: float
    """Time to the first token; of the whole request if nothing is streamed."""
    text: str
    miss_detail: str | None = None
    tiers: tuple[str, ...] = ()
    """Where the cached tokens came from."""
    num_generated_tokens: int = 0
    total_s: float = 0.0
    """To the last token, where the answer is streamed."""

    @property
    def answer(self) -> str:
        """The text on one line, in quotation marks."""
        return f'"{" ".join(self.text.split())}"'

    @property
    def source(self) -> str:
        """The tiers that the cached tokens came from, in words, if the device tier wasn't all."""
        lower = set(self.tiers) - {"device"}
        return f"from {' and '.join(self.tiers)}" if lower else "from cache"


@dataclass(slots=True)
class Stage:
    """Passed from step to step."""

    console: Console
    server: ServerProcess
    http: httpx.AsyncClient
    model: str

    def title(self, heading: str, explanation: str) -> None:
        """Begin a step."""
        self.console.print()
        self.console.rule(f"[bold]{heading}[/]", align="left", style="cyan")
        self.console.print(f"[dim]{explanation}[/]")

    async def chat(self, label: str, messages: Messages, max_tokens: int = 48) -> StageOutcome:
        """Ask over OpenAI's chat API, greedy and streamed."""
        return await self._ask(
            label, "/v1/chat/completions", {"messages": messages, "max_tokens": max_tokens}
        )

    async def complete(self, label: str, prompt: str, max_tokens: int = 8) -> StageOutcome:
        """Ask over OpenAI's completions API, greedy and streamed; the answer ends with its line."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "stop": "\n"}
        return await self._ask(label, "/v1/completions", body)

    async def _ask(self, label: str, path: str, body: dict[str, Any]) -> StageOutcome:
        common = {"model": self.model, "temperature": 0.0, "stream_options": {"include_usage": True}}
        answer = await stream_answer(self.http, path, {**common, **body})
        return StageOutcome(
            label,
            answer.num_prompt_tokens or 0,
            answer.num_cached_tokens or 0,
            answer.ttft_s,
            answer.text,
            answer.miss_detail,
            tuple(tier for tier, count in answer.cached_by_tier.items() if count),
            answer.num_generated_tokens,
            answer.e2e_s,
        )

    async def stats(self) -> dict[str, Any]:
        """Return the server's own counters."""
        response = await self.http.get("/admin/stats")
        response.raise_for_status()
        stats: dict[str, Any] = response.json()
        return stats

    async def generate(self, label: str, inputs: str, max_new_tokens: int) -> StageOutcome:
        """Ask over TGI's ``/generate``, whole; the time is that of the whole request."""
        body = {"inputs": inputs, "parameters": {"max_new_tokens": max_new_tokens, "details": True}}
        started = time.perf_counter()
        response = await self.http.post("/generate", json=body)
        seconds = time.perf_counter() - started
        response.raise_for_status()
        answer = response.json()
        details = answer["details"]
        return StageOutcome(
            label,
            details["prompt_tokens"],
            details["stemma"]["cached_tokens"],
            seconds,
            answer["generated_text"],
            details["stemma"]["miss_detail"],
        )

    async def restart(self) -> float:
        """End the server as a crash would and start it again; return the seconds until it takes requests."""
        self.server.kill()
        started = time.perf_counter()
        self.server.start()
        await self.http.aclose()
        self.http = make_http(self.server.url)
        return time.perf_counter() - started

    def show(self, outcomes: list[StageOutcome]) -> None:
        """Print each request: what was reused, its time, why the rest was computed, and the answer."""
        for outcome in outcomes:
            line = Text.assemble(
                f"{outcome.label:<17} ",
                bar(outcome.num_cached_tokens, outcome.num_prompt_tokens),
                (f" {outcome.num_cached_tokens:>4}", "bold"),
                f" of {outcome.num_prompt_tokens:>4} {outcome.source}",
                (f"{1000 * outcome.seconds:>8.0f} ms", "bold"),
            )
            self.console.print(line)
            if outcome.miss_detail:
                self.console.print(Padding(Text(outcome.miss_detail, style="dim"), (0, 0, 0, 18)))
            self.console.print(Padding(Text(outcome.answer, style="italic"), (0, 0, 0, 18)))


def bar(part: int, whole: int, cells: int = _BAR_CELLS) -> Text:
    """Return a bar whose full share is ``part / whole``; some but not all never looks like none or all."""
    filled = round(cells * part / whole) if whole else 0
    if 0 < part < whole:
        filled = min(cells - 1, max(1, filled))
    return Text.assemble(("█" * filled, "green"), ("░" * (cells - filled), "red"))
