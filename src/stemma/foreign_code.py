"""Calls of foreign code, transformers' or a checkpoint's: any exception becomes a ModelError."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType

from stemma.errors import ModelError, StemmaError

_MAX_MESSAGE = 600
"""Maximum number of characters printed of the original message."""


def is_panic(error: BaseException) -> bool:
    """Whether Rust code of a library gave up; pyo3 raises a BaseException, whose class can't be imported."""
    return type(error).__module__ == "pyo3_runtime"


class ForeignCode(AbstractContextManager[None, None]):
    """Turns an exception of foreign code into a ModelError with the text `doing`, the error and `advice`.

    One may be used again and again, by several threads.
    """

    def __init__(self, doing: str, advice: str = "") -> None:
        self._doing, self._advice = doing, advice

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raise the ModelError, if there was an exception that is no refusal of ours."""
        if error is None or isinstance(error, StemmaError | MemoryError):
            return
        if not (isinstance(error, Exception) or is_panic(error)):
            return
        text = " ".join(str(error).split())[:_MAX_MESSAGE]
        named = (
            text if isinstance(error, OSError | ImportError) and text else f"{type(error).__name__}: {text}"
        )
        raise ModelError(f"{self._doing}: {named}{self._advice}") from error
