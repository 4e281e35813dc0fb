"""How a product whose rows don't depend on the batch is launched, by its weight's shape and its tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from benchmarks.device.product_kernels import join, product

BLOCK_K = 64
FEW_TOKENS = 128
_MULTIPROCESSORS = 132
_MOST_PIECES = 16
_JOINED = 1024


@dataclass(frozen=True, slots=True)
class Launch:
    """The tiles of one launch."""

    block_n: int
    block_t: int
    num_warps: int
    num_stages: int
    is_apart: bool
    """Whether each piece is a program of its own."""


def num_pieces(n: int, k: int) -> int:
    """Return the pieces of K for a weight ``[n, k]``: at least two waves of programs where tokens are few."""
    tiles, steps = n // 64, k // BLOCK_K
    fit = [pieces for pieces in range(1, _MOST_PIECES + 1) if steps % pieces == 0]
    return next((pieces for pieces in fit if tiles * pieces >= 2 * _MULTIPROCESSORS), fit[-1])


def launch_of(num_tokens: int) -> Launch:
    """Return the tiles for so many tokens; the order of sums is that of any other number."""
    block_t = max(16, min(128, 1 << (num_tokens - 1).bit_length()))
    if num_tokens <= FEW_TOKENS:
        return Launch(64, block_t, 4, 5 if block_t <= 32 else 4, is_apart=True)
    return Launch(128, block_t, 8, 3, is_apart=False)


def constants(n: int, k: int, launch: Launch, *, widen: bool) -> dict[str, int | bool]:
    """Return what `product` is compiled for."""
    pieces = num_pieces(n, k)
    return {
        "PIECE": k // pieces,
        "PIECES": pieces,
        "BLOCK_N": launch.block_n,
        "BLOCK_T": launch.block_t,
        "BLOCK_K": BLOCK_K,
        "APART": launch.is_apart,
        "GROUP": 8,
        "WIDEN": widen,
        "BULK": not launch.is_apart,
    }


def room_of(num_tokens: int, n: int, k: int, device: torch.device) -> torch.Tensor | None:
    """Return room for the pieces of a product; None where it needs none."""
    pieces = num_pieces(n, k)
    if not launch_of(num_tokens).is_apart or pieces == 1:
        return None
    return torch.empty(pieces * num_tokens * n, dtype=torch.float32, device=device)


def multiply(x: torch.Tensor, w: torch.Tensor, parts: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ w.T`` for x ``[T, K]`` and w ``[N, K]``, N a multiple of 128; `parts`: see `room_of`."""
    (num_tokens, k), n = x.shape, w.shape[0]
    launch, pieces = launch_of(num_tokens), num_pieces(n, k)
    y = torch.empty(num_tokens, n, dtype=x.dtype, device=x.device)
    if parts is None:
        parts = room_of(num_tokens, n, k, x.device)
    grid = ((n // launch.block_n) * triton.cdiv(num_tokens, launch.block_t), pieces if launch.is_apart else 1)
    product[grid](
        x,
        w,
        y,
        y if parts is None else parts,
        num_tokens,
        n,
        k,
        x.stride(0),
        w.stride(0),
        y.stride(0),
        **constants(n, k, launch, widen=x.device.type == "cpu"),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    if parts is not None:
        size = num_tokens * n
        join[(triton.cdiv(size, _JOINED),)](parts, y, size, PIECES=pieces, BLOCK=_JOINED)
    return y


def allow_descriptors() -> None:
    """Give Triton the memory that its descriptors of tiles need."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    triton.set_allocator(lambda size, _align, _stream: torch.empty(size, dtype=torch.int8, device=device))
