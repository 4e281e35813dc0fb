"""`stemma lint` from the command line: exit codes, and reports that others read."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from packages.lab.tests import planted
from typer.testing import CliRunner

from stemma.cli import make_app
from stemma.errors import ConfigError
from stemma_lab.lint.bodies import BodyPlace
from stemma_lab.lint.edits import Rule
from stemma_lab.lint.report import Finding, LintReport
from stemma_lab.lint.sarif import as_sarif
from stemma_lab.lint.verdict import LintVerdict
from stemma_lab.lint.written import as_markdown, as_text

ROOT = Path(__file__).parents[3]
HOSTILE = "a|b\n# c [d](e) @someone <img src=x> `f` \x1b[31m"


def run(*arguments: object):
    return CliRunner().invoke(make_app(), ["lint", *map(str, arguments)])


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text(planted.lines(planted.clean(tools=False)))
    bad.write_text(planted.lines(planted.timestamp()))
    return good, bad


def test_exit_codes(files, tokenizer_path):
    good, bad = files
    model = ("--model", tokenizer_path)
    assert run(good, *model, "--min-reuse", "50%").exit_code == 0
    result = run(bad, *model, "--before", good, "--max-regression", "1%")
    assert result.exit_code == 1
    assert "bad.jsonl:2: timestamp: messages[0] (system)" in result.output
    assert "budget missed: shared tokens fell" in result.output
    assert isinstance(run(good).exception, ConfigError)
    assert isinstance(run(good, *model, "--min-reuse", "nine").exception, ConfigError)


def test_reports(files, tokenizer_path, tmp_path):
    _, bad = files
    paths = [tmp_path / name for name in ("r.json", "r.sarif", "r.md")]
    options = zip(("--json", "--sarif", "--markdown"), paths, strict=True)
    result = run(
        bad,
        *("--model", tokenizer_path, "--prices", ROOT / "examples" / "prices.toml", "--min-reuse", "0.99"),
        *(word for pair in options for word in pair),
    )
    assert result.exit_code == 1
    values, sarif = json.loads(paths[0].read_text()), json.loads(paths[1].read_text())
    assert values["findings"][0]["rule"] == "timestamp"
    assert values["findings"][0]["cost_per_month"] > 0
    assert [one["ruleId"] for one in sarif["runs"][0]["results"]] == ["timestamp", "reuse-budget"]
    assert "**Budget missed:**" in paths[2].read_text()


def hostile_verdict() -> LintVerdict:
    places = [BodyPlace("a b|c/p.jsonl", 3), BodyPlace("/abs/q.jsonl", 4)]
    finding = Finding(Rule.NONCE, HOSTILE, HOSTILE, HOSTILE, BodyPlace("x.jsonl", 1), places, 2, 500)
    return LintVerdict(LintReport(2, 900, 100, 0.1, 0.6, ("m",), [], [finding]), misses=(HOSTILE,))


def test_texts_of_prompts_are_no_markup():
    text = as_markdown(hostile_verdict())
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 3
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {9}
    assert "@someone" not in text
    assert "<img" not in text
    assert "](e)" not in text
    assert "\x1b" not in text + as_text(hostile_verdict())


def test_sarif_has_the_form_of_2_1_0():
    """The parts of the schema that concern us: who checks the whole needs the schema's file."""
    log = as_sarif(hostile_verdict(), Path("p.jsonl"))
    [run_] = log["runs"]
    assert log["version"] == "2.1.0"
    rules = [rule["id"] for rule in run_["tool"]["driver"]["rules"]]
    assert len(set(rules)) == len(rules)
    for result in run_["results"]:
        assert rules[result["ruleIndex"]] == result["ruleId"]
        assert result["level"] in ("none", "note", "warning", "error")
        for location in result["locations"] + result.get("relatedLocations", []):
            physical = location["physicalLocation"]
            assert re.fullmatch(r"(file://)?[\w./%-]+", physical["artifactLocation"]["uri"])
            assert physical["region"]["startLine"] >= 1


def test_the_action_passes_what_it_is_given_as_words_of_the_command(tmp_path):
    action = yaml.safe_load((ROOT / "packages" / "lab" / "action" / "action.yml").read_text())
    [step] = [one for one in action["runs"]["steps"] if one.get("id") == "lint"]
    assert "${{" not in step["run"], "a value in a script is a script"
    assert {name for name in step["env"].values()} == {
        f"${{{{ inputs.{name} }}}}" for name in action["inputs"]
    }
    fake = tmp_path / "stemma"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$SEEN"; echo "### Prefix reuse" > lint.md; exit 1\n')
    fake.chmod(0o755)
    values = {name: "" for name in step["env"]}
    values |= {"PROMPTS": "a.jsonl\nb c.jsonl", "MODEL": "m; rm x", "MIN_REUSE": "90%"}
    environ = {**values, "PATH": f"{tmp_path}:/usr/bin:/bin", "SEEN": str(tmp_path / "seen")}
    environ |= {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary")}
    done = subprocess.run(["bash", "-c", step["run"]], env=environ, cwd=tmp_path, check=False)
    assert done.returncode == 1
    seen = (tmp_path / "seen").read_text().splitlines()
    assert seen[:3] == ["lint", "a.jsonl", "b c.jsonl"]
    assert seen[seen.index("--model") + 1] == "m; rm x"
    assert "--before" not in seen
    assert "Prefix reuse" in (tmp_path / "summary").read_text()


def test_the_hook_calls_the_command():
    [hook] = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert hook["entry"] == "stemma lint"
    assert {"id", "name", "language"} <= hook.keys()
