"""`stemma lint`: what prompts share, where they part, what that costs, and what to move; a budget for CI."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stemma.cli.json_file import write_json
from stemma.errors import ConfigError, StorageError

_BUDGET_MISSED = 1


def command(
    prompts: Annotated[
        list[Path],
        typer.Argument(
            metavar="PROMPTS...", help="Request bodies: JSONL, a JSON list; a recording, a trace."
        ),
    ],
    model: Annotated[
        Path | None,
        typer.Option(help="Checkpoint whose tokenizer and template render: a path, `demo`, a hub's name."),
    ] = None,
    template: Annotated[
        Path | None, typer.Option(help="A chat template that takes the place of the checkpoint's.")
    ] = None,
    before: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The prompts as they were, to compare with.")
    ] = None,
    min_reuse: Annotated[
        str | None, typer.Option(metavar="SHARE", help="Exit with 1 below: 0.9 or 90%.")
    ] = None,
    max_regression: Annotated[
        str | None,
        typer.Option(metavar="SHARE", help="Exit with 1 if reuse fell by more: 1%."),
    ] = None,
    prices: Annotated[
        Path | None, typer.Option(help="Prices per million tokens; examples/prices.toml shows a file.")
    ] = None,
    requests_per_month: Annotated[
        float, typer.Option(min=1.0, help="With --prices: how many such requests a month has.")
    ] = 1_000_000.0,
    image_tokens: Annotated[int, typer.Option(min=4, max=65536, help="Tokens of an image.")] = 256,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write as JSON.")] = None,
    sarif_path: Annotated[
        Path | None, typer.Option("--sarif", metavar="FILE", help="Write as SARIF 2.1.0.")
    ] = None,
    markdown_path: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write as Markdown for a pull request.")
    ] = None,
) -> None:
    """Say what prompts share, where they part, what that costs, and what to move; a budget for CI."""
    from stemma.insight.prices import PriceTable
    from stemma_lab.lint.files import Reporter  # torch takes seconds to import
    from stemma_lab.lint.sarif import as_sarif
    from stemma_lab.lint.verdict import ReuseBudget, judged, monthly_cost
    from stemma_lab.lint.written import as_markdown, as_text, as_values

    budget = ReuseBudget(_share("--min-reuse", min_reuse), _share("--max-regression", max_regression))
    table = None if prices is None else PriceTable.read(prices)
    reporter = Reporter(model, template, image_tokens)
    report = reporter.report(prompts)
    earlier = None if before is None else reporter.report([before])
    cost = None if table is None else monthly_cost(report, table, requests_per_month)
    verdict = judged(report, earlier, budget, cost)
    typer.echo(as_text(verdict), nl=False)
    if json_path is not None:
        write_json(json_path, as_values(verdict))
    if sarif_path is not None:
        write_json(sarif_path, as_sarif(verdict, prompts[0]))
    if markdown_path is not None:
        _write(markdown_path, as_markdown(verdict))
    if verdict.misses:
        raise typer.Exit(_BUDGET_MISSED)


def _share(option: str, given: str | None) -> float | None:
    """Return a share given as ``0.9`` or ``90%``."""
    if given is None:
        return None
    try:
        share = float(given.removesuffix("%")) / (100.0 if given.endswith("%") else 1.0)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        raise ConfigError(f"{option} is a share such as 0.9 or 90%, not {given!r}")
    return share


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"can't write {path}: {error.strerror or error}") from error
