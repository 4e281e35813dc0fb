"""Lint of a recorded trace (`--record-trace`, or another format of `stemma replay`): hashes, no text.

What is shared is told, and budgets hold; why prompts part can't be.
"""

from __future__ import annotations

from pathlib import Path

import orjson

from stemma.engine.trace_log import TRACE_FORMAT
from stemma.errors import StorageError
from stemma_lab.lint.report import LintReport
from stemma_lab.traces.reader import open_trace


def is_trace(path: Path) -> bool:
    """Tell whether a file is a recorded trace."""
    try:
        with path.open("rb") as file:
            first = file.readline(4096)
        record = orjson.loads(first)
    except OSError as error:
        raise StorageError(f"can't read {path}: {error.strerror or error}") from error
    except orjson.JSONDecodeError:
        return False
    return isinstance(record, dict) and record.get("format") == TRACE_FORMAT


def trace_report(path: Path) -> LintReport:
    """Return what the requests of a trace share. Raises TraceError."""
    reader = open_trace(path)
    seen: set[int] = set()
    num_prompts = num_tokens = num_shared = num_first = 0
    for request in reader:
        blocks = request.block_ids[: request.num_prompt_blocks].tolist()
        known = next((n for n, block in enumerate(blocks) if block not in seen), len(blocks))
        seen.update(blocks)
        num_shared += min(known * reader.format.block_size, request.input_tokens)
        num_first = num_first or request.input_tokens
        num_tokens += request.input_tokens
        num_prompts += 1
    reuse = num_shared / (num_tokens - num_first) if num_tokens > num_first else 0.0
    return LintReport(num_prompts, num_tokens, num_shared, reuse, reuse, (), [], [])
