"""What is logged, on standard error: as lines for people, or one JSON object a line (`--log-format json`).

Ours, uvicorn's and Python's warnings alike: time with its zone, level, logger, the request that was being
answered, and the message.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

from stemma.config.server_settings import ServerSettings
from stemma.server.door.caller import caller

FIELDS = "fields"
"""Name of the attribute of a log record that holds values of its own, by name; JSON tells them apart."""
_LEVELLED = ("stemma", "uvicorn")
"""Loggers that `--log-level` is for; other libraries' debugging is nobody's question here."""


class TextLines(logging.Formatter):
    """``2026-01-31T12:00:00.000+00:00 WARNING stemma.engine: message``, with the request's id in brackets."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and below it the traceback if there is one."""
        request = caller().x_request_id
        where = f"{record.name} [{request}]" if request else record.name
        # Only what stands behind a message is left of the base class's form: traceback and stack.
        return f"{_time(record)} {record.levelname} {where}: {super().format(record)}"


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and request_id, exception or fields if known."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the object."""
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request := caller().x_request_id:
            line["request_id"] = request
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        line.update(getattr(record, FIELDS, {}))
        # Not orjson: a path may hold bytes that are no text, and a log loses no line.
        return json.dumps(line, default=str)


def set_up_logs(settings: ServerSettings) -> None:
    """Write logs as the settings say, unless this process's own set-up came first."""
    root = logging.getLogger()
    if root.handlers:
        return
    for name in _LEVELLED:
        logging.getLogger(name).setLevel(settings.log_level.upper())
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if settings.log_format == "json" else TextLines())
    root.addHandler(handler)
    logging.captureWarnings(True)


def show_log(name: str) -> None:
    """Write what is logged under `name` at level INFO, whatever the level is set to."""
    logging.getLogger(name).setLevel(logging.INFO)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).astimezone().isoformat(timespec="milliseconds")
