"""`stemma keys`: the file of API keys and tenants."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from stemma.server.door.keyfile import KeyFile, add_key

app = typer.Typer(no_args_is_help=True, help="API keys and the tenants that they belong to.")

File = Annotated[Path, typer.Argument(metavar="FILE", help="Key file, as given to --api-keys-file.")]


@app.command("new")
def new(path: File, tenant: Annotated[str, typer.Option(help="Whose key it is.")]) -> None:
    """Add a key to the file and print it. The file holds only its hash: it can't be printed again."""
    print(add_key(path, tenant))


@app.command("list")
def show(path: File) -> None:
    """List the tenants with their limits."""
    table = Table()
    for name in ("tenant", "keys", "requests/min", "tokens/min", "at once", "cache"):
        table.add_column(name)
    for tenant in KeyFile(path).tenants:
        entry = tenant.entry
        limits = (entry.requests_per_minute, entry.tokens_per_minute, entry.max_concurrent)
        cells = ["-" if limit is None else f"{limit:,}" for limit in limits]
        cache = ", ".join(f"{tier.value} {size:,}" for tier, size in entry.cache_bytes.items()) or "-"
        table.add_row(tenant.name, str(len(entry.keys)), *cells, cache)
    Console(highlight=False, markup=False).print(table)
