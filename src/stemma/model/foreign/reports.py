"""The progress that transformers reports while it loads weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging as hf_logging

from stemma.model.files.progress import Progress


@contextmanager
def transformers_reports(report: Progress) -> Iterator[None]:
    """Turn transformers' progress bar into calls of `report`; silence its load log."""
    silent: Any = hf_logging.EmptyTqdm

    def hook(_factory: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        items = list(args[0]) if args else []

        def iterate() -> Iterator[Any]:
            for number, item in enumerate(items):
                report("loading weights", number / len(items))
                yield item

        return silent(iterate())

    previous = hf_logging.set_tqdm_hook(hook)
    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        hf_logging.set_tqdm_hook(previous)
