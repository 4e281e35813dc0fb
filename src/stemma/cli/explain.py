"""`stemma explain`: why a request of a running server wasn't served from cache."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stemma.cli.admin_client import DEFAULT_URL, AdminKey, ask
from stemma.errors import ConfigError
from stemma.terminal_text import format_duration, visible

_INSTEAD = {"tools reordered": "in one order", "tools": "with one list"}


def command(
    request: Annotated[str, typer.Argument(metavar="[ID]", help="The id of an answer.")] = "",
    last: Annotated[bool, typer.Option("--last", help="The last request that the server started.")] = False,
    divergences: Annotated[
        bool,
        typer.Option(
            "--divergences",
            help="Where a window's prompts part, and what that costs; by stemma-lab beside the server.",
        ),
    ] = False,
    refused: Annotated[
        bool, typer.Option("--refused", help="The last requests that the server refused, and why.")
    ] = False,
    window_s: Annotated[float, typer.Option(min=1.0, help="The window's seconds.")] = 86400.0,
    url: Annotated[str, typer.Option(help="A running server.")] = DEFAULT_URL,
    admin_key: AdminKey = None,
) -> None:
    """Tell what a request got from the cache, where it parts from what is cached, and why."""
    if (bool(request), last, divergences, refused).count(True) != 1:
        raise ConfigError("give the id of an answer, --last, --divergences, or --refused")
    console = Console(highlight=False, markup=False)
    if refused:
        show_refused(console, ask(url, "GET", "/admin/refusals", admin_key)["refusals"])
        return
    if divergences:
        found = ask(url, "GET", "/admin/divergences", admin_key, params={"window_s": str(window_s)})
        show_divergences(console, found)
        return
    params = {"request": request} if request else {}
    show(console, ask(url, "GET", "/admin/explain", admin_key, params=params))


def show(console: Console, found: dict[str, Any]) -> None:
    """Print an explanation as ``/admin/explain`` gives it."""
    console.print(Text(found["request"], style="bold"))
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("prompt tokens")
    table.add_column("", justify="right")
    total = max(1, found["prompt_tokens"])
    for name, count in [*found["cached_tokens_by_tier"].items(), ("computed", found["computed_tokens"])]:
        label = name if name == "computed" else f"from {name}"
        table.add_row(label, f"{count:,}", f"{100 * count / total:.1f} %")
    if found.get("public_tokens"):
        count = found["public_tokens"]
        table.add_row("of these public", f"{count:,}", f"{100 * count / total:.1f} %")
    if found.get("prepared_tokens"):
        count = found["prepared_tokens"]
        table.add_row("of these prepared", f"{count:,}", f"{100 * count / total:.1f} %")
    console.print(table)
    if found["reason"] is not None:
        console.print(Text.assemble((found["reason"], "bold"), ": ", found["detail"] or ""))
    if (changed := found.get("changed")) is not None and changed["part"] != "nothing":
        text = f"Since the nearest conversation: {changed['part']} {changed['detail']}".rstrip()
        missed = f"; without that {changed['missed_tokens']:,} more tokens would have been found"
        console.print(Text(visible(text + missed + ".")))
    place = found["parts_at"]
    if place is not None:
        console.print(Text(f"At token {place['token']:,} of {place['of']:,}:"))
        for side, colour in (("cached", "green"), ("yours", "yellow")):
            if place[side] is not None:
                console.print(
                    _quoted(side, place["common"], place[side], colour, is_start=place["token"] == 1)
                )


def show_refused(console: Console, refusals: list[dict[str, Any]]) -> None:
    """Print refused requests as ``/admin/refusals`` gives them."""
    if not refusals:
        console.print("No request was refused.")
    for one in refusals:
        when = datetime.fromtimestamp(one["at"], UTC).strftime("%Y-%m-%d %H:%M:%S")
        head = f"{when}  {one['status']} {one['reason']}  {one['route']}"
        console.print(Text(visible(f"{head}  {one['field']}"), style="bold"))
        console.print(Text(f"  {visible(one['message'])}"))
        told = [(name, one[name]) for name in ("client", "tenant", "x_request_id") if one[name]]
        console.print(Text("  " + "  ".join(f"{name} {visible(value)}" for name, value in told), style="dim"))


def _quoted(side: str, common: str, text: str, colour: str, *, is_start: bool) -> Text:
    """Return a line with what both have in common dim, and the rest in `colour`."""
    shared = common if text.startswith(common) else ""
    lead = "" if is_start else "..."
    return Text.assemble(
        f"  {side:6} ", (lead + visible(shared), "dim"), (visible(text[len(shared) :]), f"bold {colour}")
    )


def show_divergences(console: Console, found: dict[str, Any]) -> None:
    """Print the costliest divergences as ``/admin/divergences`` gives them."""
    console.print(
        f"{found['num_requests']:,} requests in {format_duration(found['seconds'])}: "
        f"{found['num_missed_tokens']:,} of {found['num_prompt_tokens']:,} prompt tokens were computed."
    )
    reasons = ", ".join(f"{name} {count:,}" for name, count in found["missed_tokens_by_reason"].items())
    console.print(f"Computed tokens by reason: {reasons or 'none'}.")
    for one in found["divergences"]:
        console.print()
        console.print(Text(one["advice"], style="bold"))
        example = one["example"]
        for side, colour in (("cached", "green"), ("yours", "yellow")):
            if example[side] is not None:
                console.print(_quoted(side, example["common"], example[side], colour, is_start=False))
        if (replay := one["replay"]) is not None:
            instead = _INSTEAD.get(one["shape"], "with it at the end")
            console.print(
                f"  Replayed {replay['num_prompts']:,} prompts, {replay['num_changed']:,} of them with it: "
                f"{replay['num_cached_tokens']:,} tokens cached; {instead} "
                f"{replay['num_cached_tokens_moved']:,}.",
                style="dim",
            )
