"""A verdict as text, JSON and Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from stemma.terminal_text import visible
from stemma_lab.lint.report import Finding
from stemma_lab.lint.verdict import LintVerdict

_MARKUP = re.compile(r"([\\`*_{}\[\]()#+!|<>~@:&$-])")
_MAX_CELL_CHARS = 120


def as_text(verdict: LintVerdict) -> str:
    """Return the report for a terminal."""
    return "\n".join(_text_lines(verdict)) + "\n"


def _text_lines(verdict: LintVerdict) -> Iterator[str]:
    report = verdict.report
    yield _summary(verdict)
    if verdict.cost is not None:
        yield _cost(verdict)
    for one in report.shared:
        ends = visible(one.ends_with)
        yield f"  {one.num_tokens:,} tokens begin {one.num_prompts:,} prompts, up to: ...{ends}"
    for finding in report.findings:
        yield ""
        yield f"{_place(finding)}: {finding.rule}: {visible(finding.where)}{_lost(verdict, finding)}"
        yield f"  earlier ({finding.earlier.line})  {visible(finding.theirs)}"
        yield f"  here  {visible(finding.yours)}"
        yield f"  -> {finding.advice}"
    for miss in verdict.misses:
        yield ""
        yield f"budget missed: {visible(miss)}"


def _summary(verdict: LintVerdict) -> str:
    report = verdict.report
    text = (
        f"{report.num_prompts:,} prompts, {report.num_tokens:,} tokens: {report.reuse:.1%} begin as an "
        f"earlier prompt does"
    )
    if report.findings:
        text += f", {report.reachable:.1%} with what is found here mended"
    if verdict.before is not None:
        text += f"; before {verdict.before.reuse:.1%}"
    return text + "."


def _cost(verdict: LintVerdict) -> str:
    cost = verdict.cost
    assert cost is not None
    return (
        f"A month of such prompts costs {cost.now:,.2f} {cost.currency}; of that {cost.wasted:,.2f} "
        "for what is found here."
    )


def _place(finding: Finding) -> str:
    return f"{visible(finding.places[0].path)}:{finding.places[0].line}"


def _lost(verdict: LintVerdict, finding: Finding) -> str:
    text = f", {finding.num_prompts:,} prompts, {finding.lost_tokens:,} tokens"
    cost = verdict.cost_of(finding)
    if cost is not None and verdict.cost is not None:
        text += f", {cost:,.2f} {verdict.cost.currency} a month"
    return text


def as_values(verdict: LintVerdict) -> dict[str, Any]:
    """Return the report for JSON."""
    found = asdict(verdict.report)
    for values, finding in zip(found["findings"], verdict.report.findings, strict=True):
        values |= {"advice": finding.advice, "cost_per_month": verdict.cost_of(finding)}
    return found | {
        "reuse_before": None if verdict.before is None else verdict.before.reuse,
        "cost_per_month": None if verdict.cost is None else asdict(verdict.cost),
        "budgets_missed": list(verdict.misses),
    }


def as_markdown(verdict: LintVerdict) -> str:
    """Return the report for a pull request. Every text of a prompt is escaped."""
    lines = ["### Prefix reuse", "", _summary(verdict)]
    if verdict.cost is not None:
        lines.append(_cost(verdict))
    lines += [f"- **Budget missed:** {cell(miss)}" for miss in verdict.misses]
    if verdict.report.findings:
        lines += ["", "| where | what | prompts | tokens | by month | earlier | here | do |"]
        lines.append("|---|---|---:|---:|---:|---|---|---|")
        lines += [_row(verdict, finding) for finding in verdict.report.findings]
    return "\n".join(lines) + "\n"


def _row(verdict: LintVerdict, finding: Finding) -> str:
    cost = verdict.cost_of(finding)
    money = "" if cost is None or verdict.cost is None else f"{cost:,.2f} {cell(verdict.cost.currency)}"
    first = finding.places[0]
    cells = (
        f"{cell(first.path)}:{first.line}",
        f"{finding.rule}<br>{cell(finding.where)}",
        f"{finding.num_prompts:,}",
        f"{finding.lost_tokens:,}",
        money,
        cell(finding.theirs),
        cell(finding.yours),
        finding.advice,
    )
    return f"| {' | '.join(cells)} |"


def cell(text: str) -> str:
    """Return a text that stands in a cell of a table as it is: no markup, mention or line of its own."""
    return (
        _MARKUP.sub(r"\\\1", visible(text[:_MAX_CELL_CHARS]))
        .replace("\n", " ")
        .replace("\\@", "&#64;")
        .replace("\\<", "&lt;")
    )
