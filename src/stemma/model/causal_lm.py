"""A loaded model: logits of a flat batch over paged KV."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from stemma.config.settings import KVArrangement, KVDtype
from stemma.errors import ConfigError
from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import (
    COLUMNS,
    CompressedLayout,
    KVLayout,
    StateLayout,
    WindowGroup,
)
from stemma.model.abilities import Abilities
from stemma.model.batch import ForwardBatch
from stemma.model.lora.adapter import Adapter, LinearShape
from stemma.model.vision.family import Encoder


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
class ModelInfo:
    """A checkpoint's account of itself."""

    architecture: str
    vocab_size: int
    """Width of the logits; it may exceed the tokenizer's."""
    max_model_len: int
    """Tokens of prompt plus output."""
    eos_token_ids: tuple[int, ...]
    default_sampling: Mapping[str, float | int]
    """temperature, top_k, top_p, min_p and repetition_penalty, if generation_config.json has them."""
    fingerprint: str
    """Identifies the weights (`model/fingerprint.py`)."""
    weight_bytes: int
    formats: str = ""
    """Summary of how a quantized checkpoint's weights are held, for people: ``210 Q4_1 kept quantized``."""
    abilities: Abilities = field(default_factory=Abilities)
    """The kinds of answers that it gives beside text, or instead."""
    numeric_path: str = "torch"
    """Names the order of sums: machines on which it is equal compute the same bits."""


class Decoder(Protocol):
    """Computes logits. The implementation depends on architecture and machine."""

    def forward(self, batch: ForwardBatch, kv: DeviceKV) -> torch.Tensor:
        """Write the KV of the batch's tokens; return logits of its `logits_rows`, [L, vocab].

        Sets `batch.hidden` if the batch wants that.
        """

    def adaptable(self) -> Mapping[str, LinearShape]:
        """Return the linear layers that adapters may add to, by their names in transformers."""

    def prepare_adapter(self, adapter: Adapter) -> object:
        """Return what `AdapterRows` carry: the adapter as a step uses it."""


class CausalLM:
    """A transformers causal LM whose attention runs over `DeviceKV`. One step at a time; not thread-safe."""

    def __init__(
        self,
        decoder: Decoder,
        info: ModelInfo,
        kv_shape: KVShape,
        device: torch.device,
        dtype: torch.dtype,
        *,
        context_size: int = 1,
        encoder: Encoder | None = None,
    ) -> None:
        """`context_size`: ranks that the tokens of each block are divided over.

        `encoder`: makes vectors of images; None: the model reads text alone.
        """
        self.encoder = encoder
        self.decoder = decoder
        self.context_size = context_size
        self.info = info
        self._kv_shape = kv_shape
        self.device = device
        self.dtype = dtype

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.info.vocab_size

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt plus output."""
        return self.info.max_model_len

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence."""
        return self.info.eos_token_ids

    @property
    def default_sampling(self) -> Mapping[str, float | int]:
        """The checkpoint's own sampling defaults."""
        return self.info.default_sampling

    @property
    def fingerprint(self) -> str:
        """Hexadecimal SHA-256 that changes whenever the weights do."""
        return self.info.fingerprint

    @property
    def numeric_path(self) -> str:
        """Names the order of sums: machines on which it is equal compute the same bits."""
        return self.info.numeric_path

    @property
    def abilities(self) -> Abilities:
        """The kinds of answers that it gives beside text, or instead."""
        return self.info.abilities

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters in memory."""
        return self.info.weight_bytes

    @property
    def adaptable(self) -> Mapping[str, LinearShape]:
        """Linear layers that adapters may add to, by their names in transformers."""
        return self.decoder.adaptable()

    @torch.inference_mode()
    def prepare_adapter(self, adapter: Adapter) -> object:
        """Return what `AdapterRows` carry: the adapter's matrices as a step uses them. Not beside a step."""
        return self.decoder.prepare_adapter(adapter)

    def layout(
        self,
        block_size: int,
        kv_dtype: KVDtype = "auto",
        arrangement: KVArrangement = "rows",
        *,
        frees_windows: bool = False,
    ) -> KVLayout:
        """Return what this rank's part of a block of `block_size` tokens looks like for this model.

        With `frees_windows`, layers with sliding windows lie in pages of their own, where that saves memory;
        those of another shape always do.

        Raises ConfigError for a KV dtype or an arrangement that the model can't attend over.
        """
        shape, block_size = self._kv_shape, block_size // self.context_size
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
        if shape.is_mixed and self.device.type != "cpu":
            raise ConfigError(
                f"{self.info.architecture} keeps KV of two shapes, which runs on CPU only; set device cpu"
            )
        if shape.windows is not None and (shape.is_mixed or (frees_windows and self._has_windows_to_free)):
            num_layers = shape.num_layers - len(shape.windows.layers)
            plain = replace(plain, num_layers=num_layers, windows=shape.windows)
        if shape.compressed is not None:
            self._check_plain("compresses its KV into entries", kv_dtype, arrangement)
            dim = shape.compressed.block_dim(block_size)
            plain = replace(plain, head_dim=dim, compressed=shape.compressed)
        if shape.state is not None and self.device.type != "cpu":
            raise ConfigError(f"{self.info.architecture} has recurrent layers, which run on CPU only")
        if shape.index_dim:
            self._check_plain("chooses tokens by the keys of an indexer", kv_dtype, arrangement)
        if arrangement == "nz":
            self._check_tiles()
            plain = replace(plain, tiled=True)
        if kv_dtype == "auto":
            return plain
        if self.device.type != "cpu":
            raise ConfigError(
                f"kv_cache_dtype {kv_dtype} runs on CPU only: the kernels for {self.device.type} read KV in "
                "the model's dtype; leave kv_cache_dtype auto"
            )
        return replace(plain, stored=kv_dtype, latent_rank=shape.latent_rank)

    @property
    def _has_windows_to_free(self) -> bool:
        """Whether pages, which run on CPU only, take less than blocks do."""
        windows = self._kv_shape.windows
        return self.device.type == "cpu" and windows is not None and windows.window < self.max_model_len

    def _check_plain(self, what: str, kv_dtype: KVDtype, arrangement: KVArrangement) -> None:
        """Raise ConfigError unless what a model keeps for that can lie so."""
        name = self.info.architecture
        if self.device.type != "cpu":
            raise ConfigError(f"{name} {what}, which runs on CPU only; set device cpu")
        if kv_dtype != "auto" or arrangement != "rows":
            raise ConfigError(
                f"{name} {what}, which are kept as they were computed; "
                "leave kv_cache_dtype auto and kv_layout rows"
            )

    def _check_tiles(self) -> None:
        """Raise ConfigError unless the model's KV can lie in pieces of 16 columns."""
        shape = self._kv_shape
        if not shape.latent_rank:
            raise ConfigError(
                f"kv_layout nz (enable_nz) is for models that cache latents (DeepSeek), and "
                f"{self.info.architecture} caches keys and values of each head; leave kv_layout rows "
                "(enable_nz false)"
            )
        if shape.latent_rank % COLUMNS:
            raise ConfigError(
                f"kv_layout nz (enable_nz) takes latents of a multiple of {COLUMNS} numbers, not "
                f"{shape.latent_rank}; leave kv_layout rows (enable_nz false)"
            )
        if self.device.type != "cpu":
            raise ConfigError("kv_layout nz runs on CPU only; leave kv_layout rows")

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: DeviceKV) -> torch.Tensor:
        """Write the KV of the batch's tokens; return logits of its `logits_rows`, [L, vocab] float32."""
        return self.decoder.forward(batch, kv).float()
