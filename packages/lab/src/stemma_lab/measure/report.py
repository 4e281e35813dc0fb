"""The results: percentiles, throughput and the cached share, as a table and as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from stemma.cli.client import StreamedAnswer
from stemma_lab.measure.driver import Record


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution of one duration over the requests, milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Summary:
    """What one run of a bench measured: times, tokens, shares from the cache."""

    num_requests: int
    num_failed: int
    wall_s: float
    num_prompt_tokens: int | None
    """None if the server doesn't say."""
    num_cached_tokens: int | None
    """None if the server doesn't say."""
    num_generated_tokens: int
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    gap_ms: Spread | None
    """Between two pieces of text of one answer."""
    e2e_ms: Spread | None

    @property
    def cached_share(self) -> float | None:
        """Prompt tokens served from cache, 0..1; None if unknown."""
        if self.num_cached_tokens is None or not self.num_prompt_tokens:
            return None
        return self.num_cached_tokens / self.num_prompt_tokens

    @property
    def output_tokens_per_s(self) -> float:
        """Generated tokens over wall-clock time."""
        return self.num_generated_tokens / self.wall_s if self.wall_s else 0.0

    @property
    def requests_per_s(self) -> float:
        """Successful requests over wall-clock time."""
        return (self.num_requests - self.num_failed) / self.wall_s if self.wall_s else 0.0


def summarize(records: Sequence[Record], wall_s: float) -> Summary:
    """Return the summary of a run's records."""
    answers = [record.answer for record in records if record.answer is not None]
    gaps = [
        1000 * (after - before)
        for answer in answers
        for before, after in zip(answer.piece_times, answer.piece_times[1:], strict=False)
    ]
    return Summary(
        num_requests=len(records),
        num_failed=len(records) - len(answers),
        wall_s=wall_s,
        num_prompt_tokens=_total(answers, lambda answer: answer.num_prompt_tokens),
        num_cached_tokens=_total(answers, lambda answer: answer.num_cached_tokens),
        num_generated_tokens=sum(answer.num_generated_tokens for answer in answers),
        ttft_ms=_spread([1000 * answer.ttft_s for answer in answers]),
        tpot_ms=_spread([1000 * answer.tpot_s for answer in answers if answer.tpot_s is not None]),
        gap_ms=_spread(gaps),
        e2e_ms=_spread([1000 * answer.e2e_s for answer in answers]),
    )


def _total(answers: Sequence[StreamedAnswer], value: Callable[[StreamedAnswer], int | None]) -> int | None:
    known = [number for answer in answers if (number := value(answer)) is not None]
    return sum(known) if known else None


def _spread(values: list[float]) -> Spread | None:
    if not values:
        return None
    ordered = sorted(values)

    def percentile(share: float) -> float:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    return Spread(sum(ordered) / len(ordered), percentile(0.5), percentile(0.9), percentile(0.99))


def as_json(summary: Summary, records: Sequence[Record], setup: dict[str, Any]) -> dict[str, Any]:
    """Return all of a run: how it was set up, the summary, and each request."""
    derived = {
        "cached_share": summary.cached_share,
        "output_tokens_per_s": summary.output_tokens_per_s,
        "requests_per_s": summary.requests_per_s,
    }
    return {
        "setup": setup,
        "summary": {**asdict(summary), **derived},
        "requests": [_request_json(record) for record in records],
    }


def _request_json(record: Record) -> dict[str, Any]:
    row: dict[str, Any] = {"session": record.session, "turn": record.turn, "error": record.error}
    if record.answer is not None:
        answer = record.answer
        row |= {
            "ttft_s": answer.ttft_s,
            "tpot_s": answer.tpot_s,
            "e2e_s": answer.e2e_s,
            "num_prompt_tokens": answer.num_prompt_tokens,
            "num_cached_tokens": answer.num_cached_tokens,
            "num_generated_tokens": answer.num_generated_tokens,
            "miss_reason": answer.miss_reason,
        }
    return row


def times_table(summary: Summary) -> Table:
    """Return the table of durations."""
    table = Table(title="milliseconds", title_justify="left", title_style="dim")
    for heading in ("", "mean", "p50", "p90", "p99"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, spread in (
        ("time to first token", summary.ttft_ms),
        ("time per output token", summary.tpot_ms),
        ("gap between pieces", summary.gap_ms),
        ("whole request", summary.e2e_ms),
    ):
        if spread is not None:
            values = (spread.mean, spread.p50, spread.p90, spread.p99)
            table.add_row(name, *(f"{value:,.1f}" for value in values))
    return table


def totals_table(summary: Summary) -> Table:
    """Return the table of counts and rates."""
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    failed = f" ({summary.num_failed} failed)" if summary.num_failed else ""
    table.add_row("requests", f"{summary.num_requests}{failed}")
    table.add_row("wall-clock time", f"{summary.wall_s:.2f} s")
    table.add_row("requests per second", f"{summary.requests_per_s:.2f}")
    table.add_row("output tokens per second", f"{summary.output_tokens_per_s:,.1f}")
    table.add_row("generated tokens", f"{summary.num_generated_tokens:,}")
    prompt = summary.num_prompt_tokens
    table.add_row("prompt tokens", "not reported" if prompt is None else f"{prompt:,}")
    share = summary.cached_share
    cached = "not reported" if share is None else f"{summary.num_cached_tokens:,} ({100 * share:.1f} %)"
    table.add_row("[bold]prompt tokens from cache[/]", f"[bold]{cached}[/]")
    return table
