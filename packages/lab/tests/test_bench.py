"""The open bench: intervals, packaged traces, policies of one's own, its page."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from stemma.cli import make_app
from stemma_lab.bench import BASELINE, bench, groups_of, sizes_of
from stemma_lab.commands.lab import PUBLIC
from stemma_lab.replay import replay
from stemma_lab.savings import PrefillModel
from stemma_lab.traces.columns import Trace, collect
from stemma_lab.traces.request import TraceRequest

EXAMPLE = Path(__file__).parents[3] / "examples" / "policies" / "used_again.py"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(make_app(), ["lab", "bench", *map(str, arguments)])


def trace_of(num_sessions: int = 20, *, with_sessions: bool = True) -> Trace:
    """Return chats that grow by two blocks a turn, in turn."""
    requests: list[TraceRequest] = []
    for turn in range(6):
        for session in range(num_sessions):
            ids = session * 1000 + np.arange(2 * (turn + 1))
            number = session if with_sessions else None
            requests.append(
                TraceRequest(float(len(requests)), ids, 16 * len(ids), 16, len(ids), session=number)
            )
    return collect("chats", lambda: 16, requests)


def test_rows_are_those_of_a_replay() -> None:
    trace, model = trace_of(), PrefillModel()
    rows = bench(trace, ["hazard", "min"], [60, 120], model)
    assert [(row.capacity_blocks, row.policy) for row in rows] == [
        (size, policy) for size in (60, 120) for policy in ("hazard", "min")
    ]
    for row in rows:
        alone = replay(trace, row.policy, row.capacity_blocks)
        assert row.hit_ratio.value == pytest.approx(alone.block_hit_ratio(trace))
        assert row.hit_ratio.low <= row.hit_ratio.value <= row.hit_ratio.high
        all_s = float(model.seconds(np.zeros(trace.num_requests), trace.input_tokens).sum())
        left_s = all_s - alone.prefill_seconds_saved(trace, model)
        assert row.prefill_s.value == pytest.approx(left_s)


def test_a_policy_saves_nothing_beside_itself() -> None:
    [row] = bench(trace_of(), [BASELINE], [60], PrefillModel())
    assert (row.saved.value, row.saved.low, row.saved.high) == (0.0, 0.0, 0.0)


def test_equal_sessions_have_no_interval() -> None:
    """All sessions alike: drawing others changes nothing."""
    [row] = bench(trace_of(), ["lru"], [10_000], PrefillModel())
    assert row.hit_ratio.low == pytest.approx(row.hit_ratio.high)


def test_groups_are_sessions_or_slices_of_time() -> None:
    assert len(set(groups_of(trace_of(7)).tolist())) == 7
    slices = groups_of(trace_of(20, with_sessions=False))
    assert slices.tolist() == sorted(slices.tolist())
    assert slices.max() == 59


@pytest.mark.parametrize("name", PUBLIC)
def test_traces_of_the_package(name: str, tmp_path: Path) -> None:
    rows, page = tmp_path / "rows.json", tmp_path / "page.html"
    own = f"{EXAMPLE}:UsedAgain"
    options = ("--policy", f"lru,{own},min", "--limit", 300, "--json", rows, "--html", page)
    result = run(name, *options)
    assert result.exit_code == 0, result.output
    found = json.loads(rows.read_text())
    assert {row["policy"] for row in found} == {"lru", own, "min"}
    assert found[0]["trace"]["num_requests"] == 300
    assert len(found[0]["trace"]["sha256"]) == 64
    for size in {row["capacity_blocks"] for row in found}:
        ratios = {r["policy"]: r["hit_ratio"]["value"] for r in found if r["capacity_blocks"] == size}
        assert max(ratios.values()) == ratios["min"]
    text = page.read_text()
    assert "Plotly.newPlot" in text
    assert 'src="http' not in text


def test_sizes_are_shares_of_distinct_blocks() -> None:
    assert sizes_of(trace_of(), (0.1, 0.5)) == [24, 120]


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (None, "A", "there is no file"),
        ("1 +", "A", "can't be run"),
        ("A = 1", "A", "no class A"),
        ("class A: pass", "A", "no class A"),
        (
            "from stemma.prefix.eviction.lru import LRUPolicy\n"
            "class A(LRUPolicy):\n    def __init__(self, size): pass",
            "A",
            "size",
        ),
    ],
)
def test_files_without_a_policy(tmp_path: Path, content: str | None, name: str, message: str) -> None:
    file = tmp_path / "mine.py"
    if content is not None:
        file.write_text(content)
    result = run("agents", "--policy", f"{file}:{name}")
    assert result.exit_code != 0
    assert message in " ".join(str(result.exception or result.output).split())


def test_an_unlimited_cache_is_refused() -> None:
    result = run("agents", "--capacity", "unlimited")
    assert result.exit_code != 0
    assert "sizes in blocks" in str(result.exception or result.output)
