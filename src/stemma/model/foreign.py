"""Code of others: of transformers, and of checkpoints. Whatever it raises becomes a ModelError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from stemma.errors import ModelError, StemmaError

_MAX_MESSAGE = 600
"""Characters of the other's message that are worth printing."""


@contextmanager
def foreign_code(doing: str, advice: str = "") -> Iterator[None]:
    """Turn what transformers or a checkpoint's own code raises into a ModelError: `doing`: why; `advice`."""
    try:
        yield
    except (StemmaError, MemoryError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:_MAX_MESSAGE]
        named = (
            text if isinstance(error, OSError | ImportError) and text else f"{type(error).__name__}: {text}"
        )
        raise ModelError(f"{doing}: {named}{advice}") from error
