"""Opening a trace: format by name or by a look at its first line, plain or gzip, streamed line by line."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, ClassVar, Protocol, cast

import orjson

from stemma.errors import ConfigError, StorageError, TraceError
from stemma_lab.traces.aiperf import AiperfFormat
from stemma_lab.traces.bailian import BailianFormat
from stemma_lab.traces.dynamo import DynamoFormat
from stemma_lab.traces.lengths import AzureFormat, BurstFormat
from stemma_lab.traces.lmcache import LmcacheFormat
from stemma_lab.traces.mooncake import MooncakeFormat
from stemma_lab.traces.openai_chat import ChatTokenizer, OpenAIChatFormat
from stemma_lab.traces.recorded import RecordedFormat
from stemma_lab.traces.request import TraceFormat, TraceRequest
from stemma_lab.traces.weka import WekaFormat

_PLAIN: tuple[type[TraceFormat], ...] = (
    MooncakeFormat,
    AiperfFormat,
    BailianFormat,
    DynamoFormat,
    WekaFormat,
    RecordedFormat,
    AzureFormat,
    BurstFormat,
)


class _Recognisable(Protocol):
    """A format of JSON objects."""

    name: ClassVar[str]

    @staticmethod
    def recognises(record: Mapping[str, object]) -> bool: ...


_TEXT: tuple[type[OpenAIChatFormat] | type[LmcacheFormat], ...] = (OpenAIChatFormat, LmcacheFormat)
"""Formats that hold text: a tokenizer makes blocks of it."""
_BY_LOOKS: tuple[type[_Recognisable], ...] = (
    RecordedFormat,
    DynamoFormat,
    BailianFormat,
    AiperfFormat,
    MooncakeFormat,
    WekaFormat,
    LmcacheFormat,
    OpenAIChatFormat,
)
"""The first that recognises a line reads the file."""
FORMATS = tuple(one.name for one in (*_PLAIN, *_TEXT))
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
        for number, record in enumerate(_records(self.path, self.format), start=1):
            if self.progress is not None:
                self.progress(len(record))
            if not record.strip():
                continue
            try:
                yield from self.format.parse_all(record, number)
            except TraceError as error:
                if not self.skip_bad:
                    raise
                self.num_bad += 1
                if len(self.bad_lines) < _MAX_REPORTED:
                    self.bad_lines.append(str(error))


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
    for text_format in _TEXT:
        if text_format.name == name:
            if tokenizer is None:
                raise ConfigError(f"traces of {name} hold text: name a tokenizer (--tokenizer PATH)")
            return TraceReader(path, text_format(tokenizer()), skip_bad, progress)
    for plain in _PLAIN:
        if plain.name == name:
            return TraceReader(path, plain(), skip_bad, progress)
    raise ConfigError(f"unknown trace format {name!r}; known: {', '.join(FORMATS)}")


def _records(path: Path, trace_format: TraceFormat) -> Iterator[bytes]:
    """Yield lines; of a format with documents whole files that aren't JSONL, and those of a directory."""
    for file_path in _files(path) if trace_format.has_documents else [path]:
        with _open(file_path) as file:
            first = file.readline()
            if trace_format.has_documents and first and not _is_object(first):
                yield first + file.read()
                continue
            yield first
            yield from file


def _files(path: Path) -> list[Path]:
    return sorted(path.glob("*.json")) if path.is_dir() else [path]


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(orjson.loads(line), dict)
    except orjson.JSONDecodeError:
        return False


def _open(path: Path) -> BinaryIO:
    try:
        return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")
    except OSError as error:
        raise StorageError(f"can't read {path}: {error}") from error


def _is_document(path: Path) -> bool:
    """Whether a file is one object over several lines, of the only format that has such."""
    with _open(path) as file:
        if file.readline().strip() != b"{":
            return False
        try:
            record = orjson.loads(b"{" + file.read())
        except orjson.JSONDecodeError:
            return False
    return isinstance(record, dict) and WekaFormat.recognises(record)


def _recognise(path: Path) -> str:
    """Look at the first lines; a broken one may be followed by a good one."""
    if path.is_dir() or _is_document(path):
        return WekaFormat.name
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if number > 100:
                break
            for lengths in (AzureFormat, BurstFormat):
                if lengths.recognises_header(line):
                    return lengths.name
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            if not isinstance(record, dict):
                continue
            for one in _BY_LOOKS:
                if one.recognises(record):
                    return one.name
    raise TraceError(f"no known format fits; name one of {', '.join(FORMATS)}", line_number=1)
