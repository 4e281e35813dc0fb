"""Calls of foreign code, transformers' or a checkpoint's: any exception becomes a ModelError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from stemma.errors import ModelError, StemmaError

_MAX_MESSAGE = 600
"""Maximum number of characters printed of the original message."""


def is_panic(error: BaseException) -> bool:
    """Whether Rust code of a library gave up; pyo3 raises a BaseException, whose class can't be imported."""
    return type(error).__module__ == "pyo3_runtime"


@contextmanager
def foreign_code(doing: str, advice: str = "") -> Iterator[None]:
    """Turn an exception of foreign code into a ModelError with the text `doing`, the error and `advice`."""
    try:
        yield
    except (StemmaError, MemoryError):
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        text = " ".join(str(error).split())[:_MAX_MESSAGE]
        named = (
            text if isinstance(error, OSError | ImportError) and text else f"{type(error).__name__}: {text}"
        )
        raise ModelError(f"{doing}: {named}{advice}") from error
