"""What a model keeps of each token, and how blocks of it lie in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from stemma.config.settings import KVArrangement, KVDtype
from stemma.errors import ConfigError
from stemma.memory.device.layout import COLUMNS, CompressedLayout, KVLayout, StateLayout, WindowGroup


@dataclass(frozen=True, slots=True)
class KVShape:
    """KV of one token in one layer, as the layers passed it in the probe at load."""

    num_layers: int
    num_parts: int
    """2 for K and V; 1 for a compressed latent."""
    num_kv_heads: int
    head_dim: int
    """The larger one where keys and values differ."""
    latent_rank: int = 0
    """Dims of a compressed latent before its rotary key; 0: KV is no latent."""
    state: StateLayout | None = None
    """The state that recurrent layers keep of a sequence; None: there are none."""
    windows: WindowGroup | None = None
    """Layers whose KV may lie in pages; None: there are none."""
    index_dim: int = 0
    """Last dims of a row, which are an indexer's key; 0: there is none."""
    compressed: CompressedLayout | None = None
    """What layers keep that compress their KV: entries in the one layer in blocks, whose `head_dim` follows
    from the block size, and rows of tokens in the one in pages. None: they don't."""

    @property
    def is_mixed(self) -> bool:
        """Whether layers with windows keep KV of another shape than the others."""
        if self.windows is None:
            return False
        if self.compressed is not None:
            return True
        return (self.windows.num_kv_heads, self.windows.head_dim) != (self.num_kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class KeptKV:
    """What a model keeps on a device."""

    shape: KVShape
    architecture: str
    """Its name, for errors."""
    dtype: torch.dtype
    device: str
    """As torch names it, e.g. ``cpu``."""
    max_model_len: int
    context_size: int = 1
    """Ranks that the tokens of each block are divided over."""

    def layout(
        self,
        block_size: int,
        kv_dtype: KVDtype = "auto",
        arrangement: KVArrangement = "rows",
        *,
        frees_windows: bool = False,
    ) -> KVLayout:
        """Return what this rank's part of a block of `block_size` tokens looks like for the model.

        With `frees_windows`, layers with sliding windows lie in pages of their own, where that saves memory;
        those of another shape always do.

        Raises ConfigError for a KV dtype or an arrangement that the model can't attend over.
        """
        shape, block_size = self.shape, block_size // self.context_size
        dtype = str(self.dtype).removeprefix("torch.")
        plain = KVLayout(
            shape.num_layers,
            shape.num_parts,
            block_size,
            shape.num_kv_heads,
            shape.head_dim,
            dtype,
            state=shape.state,
        )
        if shape.is_mixed and self.device != "cpu":
            raise ConfigError(
                f"{self.architecture} keeps KV of two shapes, which runs on CPU only; set device cpu"
            )
        if shape.windows is not None and (shape.is_mixed or (frees_windows and self._has_windows_to_free)):
            num_layers = shape.num_layers - len(shape.windows.layers)
            plain = replace(plain, num_layers=num_layers, windows=shape.windows)
        self._check_chunks()
        if shape.compressed is not None:
            self._check_plain("compresses its KV into entries", kv_dtype, arrangement)
            dim = shape.compressed.block_dim(block_size)
            plain = replace(plain, head_dim=dim, compressed=shape.compressed)
        if shape.index_dim:
            self._check_plain("chooses tokens by the keys of an indexer", kv_dtype, arrangement)
        if arrangement == "nz":
            self._check_tiles()
            plain = replace(plain, tiled=True)
        if kv_dtype == "auto":
            return plain
        return replace(plain, stored=kv_dtype, latent_rank=shape.latent_rank)

    @property
    def _has_windows_to_free(self) -> bool:
        """Whether pages, which run on CPU only, take less than blocks do."""
        windows = self.shape.windows
        return self.device == "cpu" and windows is not None and windows.window < self.max_model_len

    def _check_plain(self, what: str, kv_dtype: KVDtype, arrangement: KVArrangement) -> None:
        """Raise ConfigError unless what a model keeps for that can lie so."""
        name = self.architecture
        if self.device != "cpu":
            raise ConfigError(f"{name} {what}, which runs on CPU only; set device cpu")
        if kv_dtype != "auto" or arrangement != "rows":
            raise ConfigError(
                f"{name} {what}, which are kept as they were computed; "
                "leave kv_cache_dtype auto and kv_layout rows"
            )

    def _check_chunks(self) -> None:
        """Raise ConfigError where attention would look beyond the beginning of a chunk."""
        windows = self.shape.windows
        if windows is None or not windows.is_chunked or self.device == "cpu":
            return
        if windows.window < self.max_model_len:
            raise ConfigError(
                f"{self.architecture} attends in chunks, which runs on CPU only; set device cpu, or a "
                f"max_model_len of at most {windows.window}"
            )

    def _check_tiles(self) -> None:
        """Raise ConfigError unless the model's KV can lie in pieces of 16 columns."""
        shape = self.shape
        if not shape.latent_rank:
            raise ConfigError(
                f"kv_layout nz (enable_nz) is for models that cache latents (DeepSeek), and "
                f"{self.architecture} caches keys and values of each head; leave kv_layout rows "
                "(enable_nz false)"
            )
        if shape.latent_rank % COLUMNS:
            raise ConfigError(
                f"kv_layout nz (enable_nz) takes latents of a multiple of {COLUMNS} numbers, not "
                f"{shape.latent_rank}; leave kv_layout rows (enable_nz false)"
            )
        if self.device != "cpu":
            raise ConfigError("kv_layout nz runs on CPU only; leave kv_layout rows")


def check_modules(shape: KVShape, architecture: str, device: str) -> None:
    """Raise ConfigError for what modules compute with no state but that of the CPU."""
    if shape.state is not None and device != "cpu":
        raise ConfigError(
            f"{architecture} has recurrent layers, which modules run on CPU only; set device cpu, or "
            "gpu_path fused if docs/how-to/models.md names the family there"
        )
