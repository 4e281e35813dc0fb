"""The usage ledger: committed before it says so, in order of groups, and never in the way of serving."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest
import sqlalchemy as sa
from tests.insight.postgres import Postgres, missing_for_postgres

from stemma.errors import ConfigError, StorageError
from stemma.insight.ledger import Ledger, drop_older, sqlite_url, total, usage
from stemma.insight.prices import Price, PriceTable
from stemma.insight.usage_record import UsageRecord
from stemma.supervision import LoggingSupervisor
from stemma.types import Tier

DAY_S = 86_400.0


def record(number: int, tenant: str = "ada", at: float = 10.0, model: str = "m") -> UsageRecord:
    return UsageRecord(
        f"r{number}",
        at,
        tenant,
        model,
        "chat",
        "ok",
        {Tier.DEVICE: 5, Tier.DISK: 2},
        miss_tokens=3,
        output_tokens=1,
    )


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    if (missing := missing_for_postgres()) is not None:
        pytest.skip(missing)
    with Postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return sqlite_url(tmp_path / "usage.db")
    server: Postgres = request.getfixturevalue("postgres")
    return server.new_database()


def write(url: str, *records: UsageRecord) -> None:
    ledger = Ledger(url, LoggingSupervisor())
    futures = [ledger.record(item) for item in records]
    assert all(future.result(10) for future in futures)
    ledger.close()


def test_what_is_old_can_be_dropped(url: str):
    write(url, record(1, at=10.0), record(2, at=20.0), record(3, at=30.0))
    assert drop_older(url, 20.0) == 1
    assert sum(row.num_requests for row in usage(url, "tenant")) == 2


def test_sums_by_tenant_day_and_model(url: str):
    write(url, record(1), record(2, tenant="bob"), record(3, at=10.0 + DAY_S), record(4, model="n"))
    by_tenant = {(row.group, row.model): row.num_requests for row in usage(url, "tenant")}
    assert by_tenant == {("ada", "m"): 2, ("ada", "n"): 1, ("bob", "m"): 1}
    assert [row.group for row in usage(url, "day")] == ["1970-01-01", "1970-01-01", "1970-01-02"]
    [row] = [row for row in usage(url, "model") if row.model == "n"]
    assert (row.hit_tokens[Tier.DISK], row.num_hit_tokens, row.miss_tokens, row.output_tokens) == (2, 7, 3, 1)
    assert total(usage(url, "tenant")).num_requests == 4


def test_the_time_span_is_half_open(url: str):
    write(url, record(1, at=10.0), record(2, at=20.0), record(3, at=30.0))
    assert sum(row.num_requests for row in usage(url, "tenant", since=10.0, until=30.0)) == 2


def test_a_row_is_in_the_file_once_its_future_is_done(url: str, tmp_path: Path):
    """A process that is killed right after it answered has lost nothing it was told is written."""
    script = textwrap.dedent(
        f"""
        import os, sys
        from stemma.insight.ledger import Ledger
        from stemma.insight.usage_record import UsageRecord
        from stemma.supervision import LoggingSupervisor
        ledger = Ledger({url!r}, LoggingSupervisor())
        for number in range(100000):
            ledger.record(UsageRecord(f"r{{number}}", 1.0, "t", "m", "chat", "ok")).result()
            print(number, flush=True)
        """
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment, text=True
    )
    assert process.stdout is not None
    seen = [int(process.stdout.readline()) for _ in range(50)]
    process.send_signal(signal.SIGKILL)
    seen += [int(line) for line in process.stdout.read().splitlines() if line.strip().isdigit()]
    process.wait()
    process.stdout.close()
    assert total(usage(url, "tenant")).num_requests >= len(seen)


def test_requests_that_finish_together_are_all_written(url: str):
    ledger = Ledger(url, LoggingSupervisor())
    futures = [ledger.record(record(number)) for number in range(3000)]
    wait(futures, timeout=30)
    assert ledger.num_written == 3000
    ledger.close()
    assert total(usage(url, "tenant")).num_requests == 3000


def test_a_row_that_is_there_already_stays_and_the_others_are_written(url: str):
    write(url, record(1))
    write(url, record(1, tenant="eve"), record(2))
    assert {row.group: row.num_requests for row in usage(url, "tenant")} == {"ada": 2}


def test_a_database_that_comes_back_gets_what_waited(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("stemma.insight.ledger.RETRY_S", 0.05)
    ledger = Ledger(url, LoggingSupervisor())
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE usage RENAME TO away"))
    future = ledger.record(record(1))
    with pytest.raises(TimeoutError):
        future.result(0.2)
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE away RENAME TO usage"))
    assert future.result(10)
    ledger.close()
    engine.dispose()


def test_a_database_server_that_crashes_loses_nothing_and_gets_what_waited(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch
):
    """PostgreSQL is killed as it stands; the ledger connects again once it is back."""
    monkeypatch.setattr("stemma.insight.ledger.RETRY_S", 0.05)
    url = postgres.new_database()
    ledger = Ledger(url, LoggingSupervisor())
    assert ledger.record(record(1)).result(10)
    postgres.kill()
    future = ledger.record(record(2))
    with pytest.raises(TimeoutError):
        future.result(0.2)
    postgres.start()
    assert future.result(30)
    ledger.close()
    assert total(usage(url, "tenant")).num_requests == 2


def test_closing_a_ledger_whose_database_is_gone_ends_and_says_what_is_lost(url: str):
    ledger = Ledger(url, LoggingSupervisor())
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE usage"))
    future = ledger.record(record(1))
    ledger.close()
    assert future.result(10) is False
    assert ledger.num_refused == 1
    engine.dispose()


@pytest.mark.parametrize(
    "wrong", ["nothing", "sqlite:////no/such/folder/x.db", "postgresql+nodriver://u:secret@h/d"]
)
def test_a_ledger_that_cant_be_opened_is_a_clear_error_without_passwords(wrong: str):
    with pytest.raises((ConfigError, StorageError)) as caught:
        Ledger(wrong, LoggingSupervisor())
    assert "ledger" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_prices_bill_hits_and_misses_apart(tmp_path: Path):
    table = PriceTable("USD", Price(hit=0.1, miss=1.0, output=2.0), {"free": Price(hit=0, miss=0, output=0)})
    assert table.cost("any", 1_000_000, 1_000_000, 500_000) == pytest.approx(2.1)
    assert table.saved("any", 1_000_000) == pytest.approx(0.9)
    assert table.cost("free", 1_000_000, 1, 1) == 0.0
    assert PriceTable("USD", None, {}).cost("any", 1, 1, 1) is None


def test_the_example_of_prices_can_be_read():
    path = Path(__file__).parents[2] / "examples" / "prices.toml"
    assert PriceTable.read(path).default == Price(hit=0.028, miss=0.28, output=0.42)


@pytest.mark.parametrize(
    "text", ["default = 3", "[default]\nhit = -1\nmiss = 1\noutput = 1", "what = 1", "=", "\xff"]
)
def test_wrong_prices_are_refused(tmp_path: Path, text: str):
    path = tmp_path / "prices.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"prices\.toml"):
        PriceTable.read(path)
