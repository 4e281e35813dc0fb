from __future__ import annotations

import logging
from collections.abc import Iterator

import orjson
import pytest

from stemma.config.server_settings import ServerSettings
from stemma.server.door.caller import Caller, begin_call
from stemma.server.observe.logs import FIELDS, JsonLines, TextLines, set_up_logs


@pytest.fixture
def record() -> Iterator[logging.LogRecord]:
    begin_call(Caller("req-1"))
    made = logging.getLogger("stemma.x").makeRecord(
        "stemma.x", logging.WARNING, "file", 1, "%s is full", ("disk",), None, extra={FIELDS: {"tokens": 3}}
    )
    yield made
    begin_call(Caller())


def test_a_line_for_people_has_zone_level_logger_and_request(record: logging.LogRecord) -> None:
    time, rest = TextLines().format(record).split(" ", 1)
    assert time[-6] in "+-"
    assert rest == "WARNING stemma.x [req-1]: disk is full"


def test_a_line_of_json_has_the_same_and_fields(record: logging.LogRecord) -> None:
    line = orjson.loads(JsonLines().format(record))
    del line["time"]
    assert line == {
        "level": "warning",
        "logger": "stemma.x",
        "message": "disk is full",
        "request_id": "req-1",
        "tokens": 3,
    }


def test_an_error_keeps_its_traceback_in_one_line(record: logging.LogRecord) -> None:
    try:
        raise ValueError("wrong")
    except ValueError as error:
        record.exc_info = (ValueError, error, error.__traceback__)
    text = JsonLines().format(record)
    assert "\n" not in text
    assert "ValueError: wrong" in orjson.loads(text)["exception"]


def test_bytes_that_are_no_text_lose_no_line(record: logging.LogRecord) -> None:
    record.args = (b"/x\xff".decode(errors="surrogateescape"),)
    assert "is full" in orjson.loads(JsonLines().format(record).replace("\\udcff", "?"))["message"]


def test_an_application_that_has_handlers_keeps_them_and_its_levels() -> None:
    handlers, level = list(logging.getLogger().handlers), logging.getLogger("stemma").level
    assert handlers, "pytest's own"
    set_up_logs(ServerSettings(log_level="debug"))
    assert logging.getLogger().handlers == handlers
    assert logging.getLogger("stemma").level == level
