"""vLLM's blocks in our tiers: `StemmaConnector`, a KV connector of vLLM (docs/how-to/connectors.md).

Life of a block: vLLM's scheduler asks `SchedulerSide` how much of a prompt the tiers have; that asks the
worker process through `lookup.py`, since the tiers live there. vLLM then allocates blocks, `WorkerSide` loads
them in the background, and the request goes on where the load ended. After each step `WorkerSide` copies the
blocks that became full down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stemma_connect.vllm.connector import StemmaConnector

__all__ = ["StemmaConnector"]


def __getattr__(name: str) -> Any:
    """Import the connector on first use: only that module needs vLLM."""
    if name == "StemmaConnector":
        from stemma_connect.vllm.connector import StemmaConnector

        return StemmaConnector
    raise AttributeError(f"module 'stemma_connect.vllm' has no attribute {name!r}")
