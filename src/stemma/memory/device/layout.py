"""What one block of KV looks like in bytes: one contiguous run, the same in every tier.

Axes of a block, outermost first: layer, part (K and V, or the one compressed latent of MLA), token, head,
dim. Because a block is contiguous, moving it between tiers is one copy, one read or one put.
"""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape and dtype of a block."""

    num_layers: int
    num_parts: int
    """2 for K and V; 1 for a latent that serves as both."""
    block_size: int
    """Tokens per block."""
    num_kv_heads: int
    head_dim: int
    dtype: str
    """A torch dtype's name, e.g. ``bfloat16``."""

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """[num_layers, num_parts, block_size, num_kv_heads, head_dim]."""
        return (self.num_layers, self.num_parts, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV per token, over all layers."""
        return self.num_layers * self.num_parts * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.bytes_per_token * self.block_size

    def describe(self) -> str:
        """Return a text that differs between any two layouts whose bytes aren't interchangeable."""
        shape = "x".join(str(n) for n in self.block_shape)
        return f"layer,part,token,head,dim:{shape}:{self.dtype}"
