"""Opening a trace: format by name or by a look at its first line, plain or gzip, streamed line by line."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

import orjson

from stemma.errors import ConfigError, StorageError, TraceError
from stemma.lab.traces.azure import AzureFormat
from stemma.lab.traces.bailian import BailianFormat
from stemma.lab.traces.mooncake import MooncakeFormat
from stemma.lab.traces.openai_chat import ChatTokenizer, OpenAIChatFormat
from stemma.lab.traces.recorded import RecordedFormat
from stemma.lab.traces.request import TraceFormat, TraceRequest

FORMATS = ("mooncake", "bailian", "stemma", "openai", "azure")
_MAX_REPORTED = 20


@dataclass(slots=True)
class TraceReader:
    """Streams the requests of one file. Iterate once; memory does not grow with the trace."""

    path: Path
    format: TraceFormat
    skip_bad: bool = False
    """Count bad lines and go on, instead of raising at the first."""
    progress: Callable[[int], None] | None = None
    """Called with the number of bytes of each line read (of the uncompressed text)."""
    num_bad: int = 0
    bad_lines: list[str] = field(default_factory=list)
    """The first reasons, each with its line number."""

    def __iter__(self) -> Iterator[TraceRequest]:
        """Yield requests in file order. Raises TraceError with the number of the first bad line."""
        with _open(self.path) as file:
            for number, line in enumerate(file, start=1):
                if self.progress is not None:
                    self.progress(len(line))
                if not line.strip():
                    continue
                try:
                    request = self.format.parse(line, number)
                except TraceError as error:
                    if not self.skip_bad:
                        raise
                    self.num_bad += 1
                    if len(self.bad_lines) < _MAX_REPORTED:
                        self.bad_lines.append(str(error))
                    continue
                if request is not None:
                    yield request


def open_trace(
    path: Path,
    format_name: str | None = None,
    *,
    skip_bad: bool = False,
    tokenizer: Callable[[], ChatTokenizer] | None = None,
    progress: Callable[[int], None] | None = None,
) -> TraceReader:
    """Return a reader. `tokenizer` is called only if the format needs one.

    Raises ConfigError for an unknown format, StorageError if the file can't be read, TraceError if no format
    fits the first line.
    """
    name = format_name if format_name is not None else _recognise(path)
    if name == "openai":
        if tokenizer is None:
            raise ConfigError("OpenAI chat traces hold text: name a tokenizer (--tokenizer PATH)")
        return TraceReader(path, OpenAIChatFormat(tokenizer()), skip_bad, progress)
    plain: dict[str, Callable[[], TraceFormat]] = {
        "mooncake": MooncakeFormat,
        "bailian": BailianFormat,
        "stemma": RecordedFormat,
        "azure": AzureFormat,
    }
    if name not in plain:
        raise ConfigError(f"unknown trace format {name!r}; known: {', '.join(FORMATS)}")
    return TraceReader(path, plain[name](), skip_bad, progress)


def _open(path: Path) -> BinaryIO:
    try:
        return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")
    except OSError as error:
        raise StorageError(f"can't read {path}: {error}") from error


def _recognise(path: Path) -> str:
    """Look at the first lines; a broken one may be followed by a good one."""
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if number > 100:
                break
            if AzureFormat.recognises_header(line):
                return "azure"
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            if not isinstance(record, dict):
                continue
            for name, recognises in (
                ("stemma", RecordedFormat.recognises),
                ("bailian", BailianFormat.recognises),
                ("mooncake", MooncakeFormat.recognises),
                ("openai", OpenAIChatFormat.recognises),
            ):
                if recognises(record):
                    return name
    raise TraceError(f"no known format fits; name one of {', '.join(FORMATS)}", line_number=1)
