"""Stemma: an LLM inference server and library whose heart is the prefix cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stemma.engine.llm import LLM
    from stemma.engine.sampling.params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the public classes on first use, so that `stemma.prefix` never pulls in torch."""
    if name == "LLM":
        from stemma.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from stemma.engine.sampling.params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'stemma' has no attribute {name!r}")
