"""`stemma usage`: what tenants used and what the cache saved them, from the usage ledger."""

from __future__ import annotations

import csv
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Annotated, Any, cast, get_args

import orjson
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from stemma.errors import ConfigError
from stemma.insight.ledger import By, UsageRow, ledger_url, total, usage
from stemma.insight.prices import PriceTable
from stemma.terminal_text import visible
from stemma.types import Tier


def command(
    ledger: Annotated[str, typer.Argument(metavar="LEDGER", help="SQLite file, or a database URL.")],
    by: Annotated[str, typer.Option(help="tenant, day or model.")] = "tenant",
    since: Annotated[str, typer.Option(help="Date (2026-11-01) or age (24h, 7d); default: all.")] = "",
    until: Annotated[str, typer.Option(help="Date or age; default: now.")] = "",
    prices: Annotated[Path | None, typer.Option(metavar="FILE", help="Price table (TOML).")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Write CSV to standard output.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON to standard output.")] = False,
) -> None:
    """Sum the usage ledger: hit and miss tokens by tier, output tokens, and costs if prices are given."""
    if by not in get_args(By):
        raise ConfigError(f"--by is tenant, day or model, not {by!r}")
    group = cast(By, by)
    table = PriceTable.read(prices) if prices is not None else None
    end = moment(until) if until else None
    rows = usage(_url(ledger), group, moment(since) if since else 0.0, end)
    lines = [_line(row, group, table) for row in rows]
    if as_json:
        sys.stdout.write(orjson.dumps(lines, option=orjson.OPT_INDENT_2).decode() + "\n")
    elif as_csv:
        _write_csv(sys.stdout, lines, group)
    else:
        lines.append(_total_line(rows, lines, group))
        _print(Console(highlight=False, markup=False), lines, table.currency if table else "")


def moment(text: str) -> float:
    """Return seconds since the epoch of a date in UTC or an age before now. Raises ConfigError."""
    unit = {"h": "hours", "d": "days", "w": "weeks", "m": "minutes"}.get(text[-1:], "")
    try:
        if unit and text[:-1].isdigit():
            return (datetime.now(UTC) - timedelta(**{unit: int(text[:-1])})).timestamp()
        parsed = datetime.fromisoformat(text)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{text!r} is no date such as 2026-11-01 and no age such as 24h or 7d") from error
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()


def _url(ledger: str) -> str:
    if "://" not in ledger and not Path(ledger).is_file():
        raise ConfigError(f"there is no usage ledger at {ledger}; `stemma serve --ledger FILE` writes one")
    return ledger_url(ledger)


def _line(row: UsageRow, group: By, prices: PriceTable | None) -> dict[str, Any]:
    line: dict[str, Any] = {group: row.group, "model": row.model, "requests": row.num_requests}
    line |= {f"hit_{tier.value}": row.hit_tokens[tier] for tier in Tier}
    line |= {"miss": row.miss_tokens, "output": row.output_tokens}
    if prices is not None:
        hit = row.num_hit_tokens
        line["cost"] = prices.cost(row.model, hit, row.miss_tokens, row.output_tokens)
        line["saved"] = prices.saved(row.model, hit)
    return line


def _total_line(rows: list[UsageRow], lines: list[dict[str, Any]], group: By) -> dict[str, Any]:
    line = _line(total(rows), group, None)
    for name in ("cost", "saved"):
        if any(name in other for other in lines):
            line[name] = sum(other[name] or 0.0 for other in lines)
    return line


def _write_csv(out: IO[str], lines: list[dict[str, Any]], group: By) -> None:
    names = list(lines[0]) if lines else [group, "model", "requests"]
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)


def _print(console: Console, lines: list[dict[str, Any]], currency: str) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    unused = {f"hit_{tier.value}" for tier in Tier if not lines[-1][f"hit_{tier.value}"]}
    names = [name for name in lines[0] if name not in unused]
    for name in names:
        is_text = isinstance(lines[0][name], str)
        title = f"{name} ({currency})" if name in ("cost", "saved") else name.replace("_", " ")
        table.add_column(title, justify="left" if is_text else "right")
    for line in lines:
        table.add_row(*(_cell(line[name]) for name in names))
    console.print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.4f}"
    return f"{value:,}" if isinstance(value, int) else visible(str(value))
