"""SGLang's pages on our disk and pool tiers: `StemmaStorage`, a storage backend of HiCache.

SGLang keeps device and host itself; what leaves its host tier comes here (docs/how-to/connectors.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stemma_connect.sglang.storage import StemmaStorage

__all__ = ["StemmaStorage"]


def __getattr__(name: str) -> Any:
    """Import the backend on first use: only that module needs SGLang."""
    if name == "StemmaStorage":
        from stemma_connect.sglang.storage import StemmaStorage

        return StemmaStorage
    raise AttributeError(f"module 'stemma_connect.sglang' has no attribute {name!r}")
