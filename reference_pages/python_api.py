"""The page of Python's API: the public names of `stemma`, which mkdocstrings reads from the source."""

from __future__ import annotations

import stemma

_HEAD = """# Python

`from stemma import LLM, SamplingParams`. Every [setting](settings.md) of the engine is a keyword of `LLM`.
Errors that a caller can cause are of `stemma.errors`.
"""


def page() -> str:
    """Return the page: a directive for each name."""
    objects = [getattr(stemma, name) for name in stemma.__all__ if name != "__version__"]
    names = [f"{one.__module__}.{one.__qualname__}" for one in objects]
    names.append("stemma.errors")
    return _HEAD + "".join(f"\n::: {name}\n" for name in names)
