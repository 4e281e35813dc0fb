"""Lint of prompts: planted faults are found in every template, and clean prompts have none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from packages.lab.tests import planted

from stemma.engine.trace_log import FinishedRequest, TraceHeader, TraceLog
from stemma.errors import ConfigError, StorageError, TraceError
from stemma.insight.prices import Price, PriceTable
from stemma.model.text.tokenizer import Tokenizer
from stemma.prefix.keys import DEFAULT_NAMESPACE
from stemma.types import Tier, as_tokens
from stemma_lab.lint import bodies
from stemma_lab.lint.bodies import read_bodies
from stemma_lab.lint.edits import Rule
from stemma_lab.lint.files import Reporter
from stemma_lab.lint.prompts import Renderer
from stemma_lab.lint.report import LintReport, lint
from stemma_lab.lint.verdict import ReuseBudget, judged, monthly_cost

ROOT = Path(__file__).parents[3]
WHOLE = sorted((ROOT / "tests" / "templates").glob("*.jinja"))
OF_CALLS = sorted((ROOT / "tests" / "server" / "answers" / "templates").glob("*.jinja"))
"""Most of these write no list of tools."""
WITHOUT_TOOLS = {path.name for path in OF_CALLS} - {"chatml_hermes.jinja"}
HERMES = next(path for path in OF_CALLS if path.name == "chatml_hermes.jinja")


@pytest.fixture(scope="module")
def renderer(tokenizer_path: Path) -> Renderer:
    return Renderer(Tokenizer(tokenizer_path, chat_template=HERMES), num_image_tokens=16)


@pytest.fixture
def linted(tmp_path: Path, renderer: Renderer):
    def run(given: list[Any], by: Renderer = renderer) -> LintReport:
        path = tmp_path / "prompts.jsonl"
        path.write_text(planted.lines(given))
        return lint(read_bodies(path), by)

    return run


@pytest.mark.one_in(6)
@pytest.mark.parametrize("template", [*WHOLE, *OF_CALLS], ids=lambda path: path.stem)
def test_planted_faults_are_found_and_clean_prompts_have_none(linted, tokenizer_path: Path, template: Path):
    by = Renderer(Tokenizer(tokenizer_path, chat_template=template), num_image_tokens=16)
    takes_tools = template.name not in WITHOUT_TOOLS
    assert linted(planted.clean(tools=takes_tools), by).findings == []
    assert linted(planted.image_last(), by).findings == []
    for rule, make in planted.FAULTS.items():
        if takes_tools or rule not in (Rule.TOOLS_REORDERED, Rule.TOOLS_CHANGED):
            report = linted(make(), by)
            assert [one.rule for one in report.findings] == [rule]
            assert report.reuse < report.reachable


def test_two_faults_of_one_prompt_are_both_found(linted):
    both = planted.timestamp()
    for body, other in zip(both, planted.reordered(), strict=True):
        body["tools"] = other["tools"]
    report = linted(both)
    assert {one.rule for one in report.findings} == {Rule.TIMESTAMP, Rule.TOOLS_REORDERED}


def test_a_value_behind_what_is_shared_costs_nothing(linted):
    assert (
        linted([planted.body(q, planted.SYSTEM + f" It is 0{n}:15.") for n, q in enumerate("abc")]).findings
        == []
    )


def test_agents_of_different_kinds_have_nothing_to_mend(linted):
    other = "Sort the letters that came today by department and name the sender of each. Write no greeting."
    report = linted([*planted.clean(tools=True), *(planted.body(q, other, planted.TOOLS[:1]) for q in "ab")])
    assert report.findings == []


def test_a_template_or_its_settings_that_change(linted):
    own = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    given = [planted.body(q, chat_template=own if n % 2 else None) for n, q in enumerate("abcd")]
    given = [{name: value for name, value in one.items() if value is not None} for one in given]
    assert [one.rule for one in linted(given[:2]).findings] == [Rule.TEMPLATE]
    old = [{"prompt": f"<|user|>\n{planted.SYSTEM}<|end|>{q}"} for q in "ab"]
    new = [{"prompt": f"<|start_user|>\n{planted.SYSTEM}<|end|>{q}"} for q in "ab"]
    assert [one.rule for one in linted([*old, *new]).findings] == [Rule.TEMPLATE]


def test_every_api_says_the_same(linted):
    """A conversation has the same tokens whichever API's body asks for it."""
    chat = planted.clean(tools=False)[0]
    _, user = chat["messages"]
    messages = {"model": "m", "max_tokens": 9, "system": planted.SYSTEM, "messages": [user]}
    response = {"model": "m", "instructions": planted.SYSTEM, "input": user["content"]}
    batch = {"custom_id": "1", "url": "/v1/chat/completions", "body": chat}
    report = linted([chat, messages, response, batch, {"path": "/v1/messages?beta=true", "body": messages}])
    assert report.reuse == 1.0
    assert report.num_prompts == 5


def test_ids_and_texts_of_completions(linted):
    report = linted(
        [{"prompt": ["abcd" * 40, "abcd" * 40]}, {"prompt": [[1, 2, 3], [1, 2, 4]]}, {"prompt": [1]}]
    )
    assert report.num_prompts == 5
    assert report.num_shared_tokens == 160 + 2 + 1


@pytest.mark.parametrize("file", sorted((ROOT / "tests" / "recordings").glob("*.json")), ids=lambda f: f.stem)
@pytest.mark.one_in(5)
def test_recordings_of_agents(tokenizer_path: Path, file: Path):
    report = Reporter(tokenizer_path, HERMES, 16).report([file])
    assert report.num_prompts >= 13
    assert report.findings == []
    assert report.reuse > 0.6


def test_a_trace_has_hashes_alone(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    with TraceLog(path, TraceHeader(16, 64, 4096, "lru")) as log:
        for number in range(4):
            prompt = as_tokens([*range(64), 1000 + number, *range(15)])
            log.record(
                FinishedRequest(1.0 + number, DEFAULT_NAMESPACE, prompt, as_tokens([1]), {Tier.DEVICE: 0})
            )
    report = Reporter(None, None, 16).report([path])
    assert (report.num_prompts, report.num_tokens, report.num_shared_tokens) == (4, 320, 192)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"messages": [', "line 2: x.jsonl: the line is not valid JSON"),
        (b"[" * 5000 + b"]" * 5000, "line 2: x.jsonl: the line is not valid JSON|nested more than"),
        (b'{"a":' * 80 + b"1" + b"}" * 80, "line 2: x.jsonl: the line is nested more than 64 levels deep"),
        (b'{"messages": [{"role": "user"}]}', r"line 2: x.jsonl: messages\[0\]"),
        (b'{"messages": {"role": "user"}}', "line 2: x.jsonl: neither messages"),
        (b"[1, 2]", "line 2: x.jsonl: not a JSON object"),
        (b'{"prompt": [[1], "a", -1]}', "line 2: x.jsonl: prompt must be"),
        (b'{"prompt": "' + b"a" * 3000 + b'"}', "line 2: x.jsonl: more than 0 MiB in one line"),
        (b'{"x": "\xff"}', "line 2: x.jsonl: the line is not valid JSON"),
    ],
)
def test_a_hostile_line_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renderer, line, words):
    monkeypatch.setattr(bodies, "MAX_LINE_BYTES", 2500 if len(line) < 5000 else 20_000)
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n' + line + b"\n")
    with pytest.raises(TraceError, match=words) as caught:
        lint(read_bodies(path), renderer)
    assert caught.value.line_number == 2


def test_a_line_of_100_mb_is_refused_before_it_is_read(tmp_path: Path, renderer):
    path = tmp_path / "x.jsonl"
    with path.open("wb") as file:
        file.write(b'{"prompt": "')
        file.seek(100 << 20)
        file.write(b'"}\n')
    with pytest.raises(TraceError, match=r"line 1: x.jsonl: more than 32 MiB"):
        lint(read_bodies(path), renderer)
    with pytest.raises(StorageError):
        lint(read_bodies(tmp_path / "none.jsonl"), renderer)


@pytest.mark.parametrize("broken", [{"texts": [[5, 1, 2]]}, {"requests": [{}]}, {"parts": [{"~part": 0}]}])
def test_a_broken_recording_is_named(tmp_path: Path, renderer, broken):
    path = tmp_path / "r.json"
    whole = {
        "agent": "a",
        "texts": [],
        "ids": [],
        "parts": [],
        "requests": [{"path": "/", "body": {"~part": 0}}],
    }
    path.write_text(json.dumps(whole | broken))
    with pytest.raises(TraceError, match="recording"):
        lint(read_bodies(path), renderer)


def test_budgets_and_costs(linted):
    good, bad = linted(planted.clean(tools=False)), linted(planted.timestamp())
    assert judged(good, None, ReuseBudget(min_reuse=0.5)).misses == ()
    assert "less than 90.0%" in judged(bad, None, ReuseBudget(min_reuse=0.9)).misses[0]
    assert judged(good, good, ReuseBudget(max_regression=0.0)).misses == ()
    assert "fell from" in judged(bad, good, ReuseBudget(max_regression=0.01)).misses[0]
    with pytest.raises(ConfigError, match="--before"):
        judged(good, None, ReuseBudget(max_regression=0.01))
    prices = PriceTable("EUR", None, {"m": Price(hit=0.0, miss=1.0, output=2.0)})
    cost = monthly_cost(bad, prices, 1e6)
    missed = bad.num_tokens - bad.num_shared_tokens
    assert cost.now == pytest.approx(missed / bad.num_prompts)
    assert cost.wasted == pytest.approx(bad.lost_tokens / bad.num_prompts)
    with pytest.raises(ConfigError, match="no"):
        monthly_cost(linted([{"prompt": "a"}]), prices, 1e6)
