"""`stemma explain`: why a request of a running server wasn't served from cache."""

from __future__ import annotations

from typing import Annotated, Any

import httpx
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stemma.errors import ConfigError, StorageError


def command(
    request: Annotated[str, typer.Argument(metavar="[ID]", help="The id of an answer.")] = "",
    last: Annotated[bool, typer.Option("--last", help="The last request that the server started.")] = False,
    url: Annotated[str, typer.Option(help="A running server.")] = "http://127.0.0.1:8000",
    admin_key: Annotated[str | None, typer.Option(envvar="STEMMA_ADMIN_KEY", help="Its admin key.")] = None,
) -> None:
    """Tell what a request got from the cache, where it parts from what is cached, and why."""
    if bool(request) == last:
        raise ConfigError("give either the id of an answer or --last")
    show(Console(highlight=False), _fetch(url, request, admin_key))


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
    console.print(table)
    if found["reason"] is not None:
        console.print(Text.assemble((found["reason"], "bold"), ": ", found["detail"] or ""))
    place = found["parts_at"]
    if place is not None:
        console.print(Text(f"At token {place['token']:,} of {place['of']:,}:"))
        for side, colour in (("cached", "green"), ("yours", "yellow")):
            if place[side] is not None:
                console.print(
                    _quoted(side, place["common"], place[side], colour, is_start=place["token"] == 1)
                )


def _quoted(side: str, common: str, text: str, colour: str, *, is_start: bool) -> Text:
    """Return a line with what both have in common dim, and the rest in `colour`."""
    shared = common if text.startswith(common) else ""
    lead = "" if is_start else "..."
    return Text.assemble(
        f"  {side:6} ", (lead + visible(shared), "dim"), (visible(text[len(shared) :]), f"bold {colour}")
    )


def visible(text: str) -> str:
    """Return `text` on one line, with control characters escaped: a terminal must not obey them."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _fetch(url: str, request: str, admin_key: str | None) -> dict[str, Any]:
    headers = {} if admin_key is None else {"authorization": f"Bearer {admin_key}"}
    params = {"request": request} if request else {}
    try:
        response = httpx.get(
            f"{url.rstrip('/')}/admin/explain", params=params, headers=headers, timeout=30.0, trust_env=False
        )
        found = response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise StorageError(f"{url}: {error}") from error
    if response.status_code != 200:
        try:
            message = str(found["error"]["message"])
        except (KeyError, TypeError):
            message = f"the server answered with status {response.status_code}"
        raise StorageError(f"{url}: {message}")
    return dict(found)
