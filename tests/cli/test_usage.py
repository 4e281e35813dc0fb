"""`stemma usage` over a ledger with two tenants."""

import csv
import io
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stemma.cli import make_app
from stemma.cli.usage import moment
from stemma.errors import ConfigError
from stemma.insight.ledger import Ledger, sqlite_url
from stemma.insight.usage_record import UsageRecord
from stemma.supervision import LoggingSupervisor
from stemma.types import Tier

PRICES = Path(__file__).parents[2] / "examples" / "prices.toml"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "usage.db"
    ledger = Ledger(sqlite_url(file), LoggingSupervisor())
    for number, tenant in enumerate(("ada", "ada", "bob")):
        row = UsageRecord(f"r{number}", 5.0, tenant, "m", "chat", "ok", {Tier.HOST: 10**6}, 10**6, 10**6)
        ledger.record(row).result(10)
    ledger.close()
    return file


def run(*arguments: str) -> str:
    result = CliRunner(env={"COLUMNS": "160"}).invoke(make_app(), ["usage", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_json_has_costs_where_prices_are_given(path: Path):
    ada, bob = json.loads(run(str(path), "--json", "--prices", str(PRICES)))
    assert (ada["tenant"], ada["requests"], ada["hit_host"], ada["miss"]) == ("ada", 2, 2 * 10**6, 2 * 10**6)
    assert ada["cost"] == pytest.approx(2 * (0.028 + 0.28 + 0.42))
    assert bob["saved"] == pytest.approx(0.28 - 0.028)


def test_csv_can_be_read_back(path: Path):
    rows = list(csv.DictReader(io.StringIO(run(str(path), "--csv", "--by", "day"))))
    assert [(row["day"], row["requests"]) for row in rows] == [("1970-01-01", "3")]


def test_the_table_ends_with_the_sum(path: Path):
    text = run(str(path), "--prices", str(PRICES))
    assert "total" in text
    assert "3,000,000" in text


def test_nothing_since_then(path: Path):
    assert json.loads(run(str(path), "--json", "--since", "1h")) == []
    assert run(str(path), "--csv", "--since", "2020-01-01").startswith("tenant,")
    assert "total" in run(str(path), "--since", "1h")


@pytest.mark.parametrize(
    "arguments", [("/no/such.db",), ("PATH", "--by", "hour"), ("PATH", "--since", "soon")]
)
def test_what_cant_be_answered_is_a_clear_error(path: Path, arguments: tuple[str, ...]):
    with pytest.raises(ConfigError):
        run(*(str(path) if part == "PATH" else part for part in arguments))


def test_moments():
    assert moment("1970-01-02") == 86_400.0
    assert moment("2026-11-01T00:00:00+01:00") < moment("2026-11-01")
    assert moment("2h") < moment("1h")
