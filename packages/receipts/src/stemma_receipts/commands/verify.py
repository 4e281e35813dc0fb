"""`stemma verify`: compute the answers of receipts again."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated, Any

import typer

from stemma.cli.json_file import write_json
from stemma.config.words import split_named_paths
from stemma.errors import ConfigError
from stemma.terminal_text import visible

_DIFFERS, _UNCHECKED = 1, 3


def command(
    receipts: Annotated[
        Path, typer.Argument(help="JSON or JSONL with receipts: answers, results of batches, logs.")
    ],
    model: Annotated[Path, typer.Option(help="The checkpoint that they were computed with.")],
    key: Annotated[Path, typer.Option(help="The server's public key, in PEM.")],
    lora: Annotated[str, typer.Option(metavar="NAME=DIR,...", help="Adapters.")] = "",
    image: Annotated[list[Path] | None, typer.Option(help="An image of a prompt; may be repeated.")] = None,
    sample: Annotated[str, typer.Option(metavar="SHARE", help="Check so many, by chance: 1%.")] = "100%",
    num_threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    kv_cache_memory: Annotated[str | None, typer.Option(help="Memory for KV.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write as JSON.")] = None,
) -> None:
    """Compute the answers of receipts again, and say of each: same, differs at a token, or why it can't be.

    Exit code 1: one differs, or isn't signed by the key; 3: one can't be checked here.
    """
    from stemma_receipts.checking import check_files
    from stemma_receipts.verifier import CheckOutcome

    settings: dict[str, Any] = {"num_threads": num_threads, "kv_cache_memory": kv_cache_memory}
    found = check_files(
        receipts,
        key,
        model,
        share=_share(sample),
        chance=random.SystemRandom(),
        adapters=_adapters(lora),
        images=image or [],
        **{name: value for name, value in settings.items() if value is not None},
    )
    for one in found:
        typer.echo(visible(f"{one.id}: {one.outcome}{': ' if one.why else ''}{one.why}"))
    counts = {outcome: sum(one.outcome is outcome for one in found) for outcome in CheckOutcome}
    typer.echo(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    if json_path is not None:
        write_json(json_path, found)
    if counts[CheckOutcome.DIFFERS]:
        raise typer.Exit(_DIFFERS)
    if counts[CheckOutcome.UNCHECKED]:
        raise typer.Exit(_UNCHECKED)


def _adapters(given: str) -> dict[str, Path]:
    try:
        return {name: Path(path) for name, path in split_named_paths(given).items()}
    except ValueError as error:
        raise ConfigError(f"--lora: {error}") from error


def _share(given: str) -> float:
    try:
        share = float(given.removesuffix("%")) / (100.0 if given.endswith("%") else 1.0)
    except ValueError:
        share = -1.0
    if not 0.0 < share <= 1.0:
        raise ConfigError(f"--sample is a share such as 1% or 0.01, not {given!r}")
    return share
