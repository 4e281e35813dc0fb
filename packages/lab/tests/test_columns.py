"""What the order of a table's columns saves."""

from __future__ import annotations

import json
from itertools import pairwise, permutations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from stemma.cli import make_app
from stemma.errors import ConfigError
from stemma_lab.columns import advise_columns, num_shared, read_table

Table = dict[str, list[str]]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(make_app(), ["order", *map(str, arguments)])


def brute(table: Table, order: tuple[str, ...]) -> int:
    """Sort the rows and count the characters of equal leading columns."""
    rows = sorted(zip(*(table[name] for name in order), strict=True))
    total = 0
    for before, one in pairwise(rows):
        for a, b in zip(before, one, strict=True):
            if a != b:
                break
            total += len(a)
    return total


@st.composite
def tables(draw: st.DrawFn) -> Table:
    num_rows = draw(st.integers(1, 12))
    values = st.lists(st.sampled_from(["", "x", "yy", "zzz"]), min_size=num_rows, max_size=num_rows)
    return {name: draw(values) for name in "abc"[: draw(st.integers(1, 3))]}


@given(tables())
@settings(max_examples=100, deadline=None)
def test_shared_tokens_are_those_of_sorted_rows(table: Table) -> None:
    lengths = {name: [len(one) for one in column] for name, column in table.items()}
    for order in permutations(table):
        assert num_shared(table, order, lengths) == brute(table, order)
    found = advise_columns(table, len)
    assert found.num_shared_given == brute(table, tuple(table))
    assert found.num_shared_better == brute(table, found.better) >= found.num_shared_given


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_the_column_that_repeats_comes_first(tmp_path: Path, suffix: str) -> None:
    rows = [{"id": f"{n}", "text": "long text " * 9 + str(n % 2), "shop": "s"} for n in range(10)]
    file, result_path = tmp_path / f"table{suffix}", tmp_path / "out.json"
    if suffix == ".csv":
        lines = ["id,text,shop", *(",".join(row.values()) for row in rows)]
    else:
        lines = [json.dumps(row) for row in rows]
    file.write_text("\n".join(lines))
    result = run("--columns", file, "--json", result_path)
    assert result.exit_code == 0, result.output
    found = json.loads(result_path.read_text())
    assert found["num_shared_given"] == 0
    assert found["better"] == ["text", "shop", "id"]
    assert "tokens less" in " ".join(result.output.split())


@pytest.mark.parametrize(
    "content", ["", "a,b\n", "a,b\n1\n", "a,b\n1,2,3\n", 'a,b\n"1,2\n', "a\n\x00\xff"], ids=repr
)
def test_files_that_are_no_table(tmp_path: Path, content: str) -> None:
    file = tmp_path / "table.csv"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"table\.csv"):
        read_table(file)


def test_without_a_trace_or_table() -> None:
    result = run()
    assert result.exit_code != 0
    assert "name a trace" in str(result.exception or result.output)
