"""A verdict as SARIF 2.1.0, which code hosts show beside the lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

from stemma import __version__
from stemma_lab.lint.bodies import BodyPlace
from stemma_lab.lint.edits import Rule
from stemma_lab.lint.report import ADVICE, Finding
from stemma_lab.lint.verdict import LintVerdict

_BUDGET = "reuse-budget"


def as_sarif(verdict: LintVerdict, first: Path) -> dict[str, Any]:
    """Return the log. Budgets that were missed stand at the first line of the file `first`."""
    rules = [{"id": rule.value, "shortDescription": {"text": ADVICE[rule]}} for rule in Rule]
    rules.append({"id": _BUDGET, "shortDescription": {"text": "share as many tokens as was agreed"}})
    results = [_result(one) for one in verdict.report.findings]
    results += [
        {
            "ruleId": _BUDGET,
            "ruleIndex": len(Rule),
            "level": "error",
            "message": {"text": miss},
            "locations": [_location(BodyPlace(str(first), 1))],
        }
        for miss in verdict.misses
    ]
    driver = {"name": "stemma lint", "semanticVersion": __version__, "rules": rules}
    return {
        "version": "2.1.0",
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "runs": [{"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}],
    }


def _result(finding: Finding) -> dict[str, Any]:
    text = (
        f"{finding.where}: {finding.lost_tokens:,} tokens of {finding.num_prompts:,} prompts are not shared. "
        f"Here: {_plain(finding.yours)}. Earlier: {_plain(finding.theirs)}. To do: {finding.advice}."
    )
    return {
        "ruleId": finding.rule.value,
        "ruleIndex": list(Rule).index(finding.rule),
        "level": "warning",
        "message": {"text": text},
        "locations": [_location(finding.places[0])],
        "relatedLocations": [_location(one) for one in (finding.earlier, *finding.places[1:])],
        "partialFingerprints": {"stemma/v1": f"{finding.rule.value}:{finding.where}"},
    }


def _plain(text: str) -> str:
    """Return a text without what a message reads as a link to a place."""
    return text.replace("[", "(").replace("]", ")").replace("{", "(").replace("}", ")")


def _location(place: BodyPlace) -> dict[str, Any]:
    path = Path(place.path)
    uri = path.as_uri() if path.is_absolute() else quote(path.as_posix())
    return {"physicalLocation": {"artifactLocation": {"uri": uri}, "region": {"startLine": place.line}}}
