"""`stemma top`: what a running server does, live in the terminal."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stemma.cli.admin_client import DEFAULT_URL, AdminKey, ask
from stemma.errors import StorageError
from stemma.terminal_text import visible

_MAX_SHOWN = 12
_BAR_CHARS = 24
_TIER_STYLES = {"device": "green", "host": "cyan", "disk": "blue", "pool": "magenta"}
_LEVELS = " ▁▂▃▄▅▆▇█"


def command(
    url: Annotated[str, typer.Option(help="A running server.")] = DEFAULT_URL,
    admin_key: AdminKey = None,
    every_s: Annotated[float, typer.Option(min=0.2, max=60.0, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one look and end.")] = False,
) -> None:
    """Show requests, hits by tier, tiers and tenants of a running server. q or Ctrl-C ends it."""
    console = Console(highlight=False, markup=False)
    view = TopView()
    view.update(ask(url, "GET", "/admin/live/now", admin_key))
    if once:
        console.print(view.render())
        return
    with (
        suppress(KeyboardInterrupt),
        _typed_keys() as keys,
        Live(view.render(), console=console, screen=True, auto_refresh=False) as live,
    ):
        while keys.next(every_s) != "q":
            _look(view, url, admin_key)
            live.update(view.render(), refresh=True)


class _Keys:
    """The keys that the user presses, one by one."""

    def __init__(self, file: int | None) -> None:
        self._file = file

    def next(self, timeout_s: float) -> str | None:
        """Wait for a key; return it, None after `timeout_s`."""
        if self._file is None:
            time.sleep(timeout_s)
            return None
        ready, _, _ = select.select([self._file], [], [], timeout_s)
        if not ready:
            return None
        key = os.read(self._file, 1)
        if not key:  # the terminal is gone
            self._file = None
        return key.decode(errors="replace")


@contextmanager
def _typed_keys() -> Iterator[_Keys]:
    """Let keys arrive without Enter, unseen, while this is open; without a terminal there are none."""
    if not sys.stdin.isatty():
        yield _Keys(None)
        return
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    tty.setcbreak(file)
    try:
        yield _Keys(file)
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


def _look(view: TopView, url: str, admin_key: str | None) -> None:
    """Update the view; a server that doesn't answer is shown as such, and asked again."""
    try:
        view.update(ask(url, "GET", "/admin/live/now", admin_key, params={"since": str(view.last_number)}))
    except StorageError as error:
        view.problem = str(error)


class TopView:
    """The last two snapshots of `/admin/live/now`, and the requests that ended."""

    def __init__(self) -> None:
        self.problem: str | None = None
        self._now: dict[str, Any] = {}
        self._before: dict[str, Any] = {}
        self._ended: deque[dict[str, Any]] = deque(maxlen=200)
        self._ratios: deque[float] = deque(maxlen=60)
        self.last_number = 0

    def update(self, shown: dict[str, Any]) -> None:
        """Take a snapshot. A server that was restarted counts from the beginning."""
        is_restart = bool(self._now) and shown["started_at"] != self._now["started_at"]
        self._before = {} if is_restart else self._now
        self._now, self.problem = shown, None
        self._ended.extend(shown["ended"])
        self.last_number = shown["last_number"]
        if self._before and (prompt := self._rate("num_prompt_tokens")) > 0:
            cached = sum(self._by_tier().values())
            self._ratios.append(cached / prompt)

    def render(self) -> RenderableType:
        """Return the whole view."""
        parts: list[RenderableType] = [self._head()]
        if self.problem is not None:
            parts.append(Text(visible(self.problem), style="bold red"))
        parts += [self._tiers(), self._under_way(), self._last()]
        if self._now["tenants"]:
            parts.append(self._tenants())
        return Group(*parts)

    def _head(self) -> Text:
        engine, now = self._now["engine"], self._now
        ratio = self._total_ratio()
        head = Text.assemble(
            (visible(now["model"]), "bold"),
            f"  up {timedelta(seconds=int(now['time'] - now['started_at']))}  "
            f"{datetime.fromtimestamp(now['time']):%H:%M:%S}\n",
            f"running {engine['num_running']}  waiting {engine['num_waiting']}  "
            f"prompt {self._rate('num_prompt_tokens'):,.0f} tok/s  "
            f"generated {self._rate('num_generated_tokens'):,.0f} tok/s\n",
            ("hit ratio ", ""),
            (f"{ratio:.1%}", "bold green"),
            " since the start",
        )
        if self._ratios:
            head.append(f", {self._ratios[-1]:.1%} now  ")
            head.append(
                "".join(_LEVELS[round(min(1.0, r) * (len(_LEVELS) - 1))] for r in self._ratios), "green"
            )
        if regretted := engine["num_regretted_blocks"]:
            head.append(f"\n{regretted:,} blocks evicted from the device came back within a minute")
        dropped = (engine.get("transfer") or {}).get("dropped_writes", {})
        if told := ", ".join(
            f"{count:,} {reason.replace('_', ' ')}" for reason, count in dropped.items() if count
        ):
            head.append(f"\nblocks not written to the tiers below: {told}", "yellow")
        if now["failure"]:
            head.append(f"\n{visible(now['failure'])}", "bold red")
        return head

    def _tiers(self) -> Table:
        engine = self._now["engine"]
        table = _table("tier", "", "blocks", "hit tokens", "tok/s", "evicted")
        rates = self._by_tier()
        held = {"device": (engine["num_cached_blocks"], engine["num_blocks"], engine["num_evicted_blocks"])}
        shares: dict[str, float] = {}
        for name, tier in (engine.get("transfer") or {}).get("tiers", {}).items():
            held[name] = (tier["num_blocks"], tier["capacity_blocks"], tier["num_evicted_blocks"])
            if tier["num_blocks"] and tier["stored_bytes"] is not None:
                shares[name] = tier["stored_bytes"] / (tier["num_blocks"] * tier["block_bytes"])
        for name, (num_blocks, capacity, evicted) in held.items():
            style = _TIER_STYLES.get(name, "white")
            blocks = "shared" if num_blocks is None else f"{num_blocks:,} / {capacity or 0:,}"
            if shares.get(name, 1.0) < 1.0:
                blocks += f" at {shares[name]:.0%}"
            table.add_row(
                Text(name, style=style),
                _bar((num_blocks or 0) / capacity if capacity else 0.0, style),
                blocks,
                f"{engine['cached_tokens_by_tier'].get(name, 0):,}",
                f"{rates.get(name, 0.0):,.0f}",
                f"{evicted:,}",
            )
        return table

    def _under_way(self) -> Table:
        table = _table("under way", "tenant", "age", "prompt", "cached", "", "generated")
        for one in self._now["under_way"][:_MAX_SHOWN]:
            cached = one["cached_tokens"]
            share = 0.0 if not cached else cached / max(1, one["prompt_tokens"])
            table.add_row(
                visible(one["request"])[:28],
                visible(one["tenant"] or "-")[:16],
                f"{one['age_s']:.1f} s",
                f"{one['prompt_tokens']:,}",
                "waits" if cached is None else f"{cached:,}",
                _bar(share, "green", 12),
                f"{one['generated_tokens']:,}",
            )
        more = len(self._now["under_way"]) - _MAX_SHOWN
        if more > 0:
            table.add_row(f"and {more} more")
        return table

    def _last(self) -> Table:
        table = _table("ended", "outcome", "prompt", "cached", "miss", "first token", "total")
        for one in list(self._ended)[-_MAX_SHOWN:][::-1]:
            cached, first = one["cached_tokens"], one["first_token_s"]
            table.add_row(
                visible(one["request"])[:28],
                Text(one["outcome"], style="" if one["outcome"] == "ok" else "red"),
                f"{one['prompt_tokens']:,}",
                "-" if cached is None else f"{cached / max(1, one['prompt_tokens']):.0%}",
                one["miss"] or "-",
                "-" if first is None else f"{1000 * first:,.0f} ms",
                f"{1000 * one['total_s']:,.0f} ms",
            )
        return table

    def _tenants(self) -> Table:
        table = _table("tenant", "requests", "prompt tokens", "hit ratio")
        tenants = sorted(self._now["tenants"], key=lambda one: one["prompt_tokens"], reverse=True)
        for one in tenants[:_MAX_SHOWN]:
            ratio = one["cached_tokens"] / max(1, one["prompt_tokens"])
            table.add_row(
                visible(one["name"]), f"{one['requests']:,}", f"{one['prompt_tokens']:,}", f"{ratio:.1%}"
            )
        return table

    def _rate(self, counter: str) -> float:
        if not self._before:
            return 0.0
        span = max(1e-3, float(self._now["time"] - self._before["time"]))
        now, before = float(self._now["engine"][counter]), float(self._before["engine"][counter])
        return (now - before) / span

    def _by_tier(self) -> dict[str, float]:
        """Return cached tokens a second by tier."""
        if not self._before:
            return {}
        span = max(1e-3, self._now["time"] - self._before["time"])
        now, before = (one["engine"]["cached_tokens_by_tier"] for one in (self._now, self._before))
        return {tier: float(count - before.get(tier, 0)) / span for tier, count in now.items()}

    def _total_ratio(self) -> float:
        engine = self._now["engine"]
        return float(sum(engine["cached_tokens_by_tier"].values()) / max(1, engine["num_prompt_tokens"]))


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    numbers: Iterable[str] = ("age", "prompt", "cached", "generated", "first token", "total", "requests")
    for name in columns:
        is_number = name in numbers or "tokens" in name or name in ("blocks", "tok/s", "evicted", "hit ratio")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
    return table


def _bar(share: float, style: str, width: int = _BAR_CHARS) -> Text:
    filled = round(min(1.0, max(0.0, share)) * width)
    return Text.assemble(("█" * filled, style), ("░" * (width - filled), "dim"))
