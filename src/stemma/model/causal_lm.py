"""A loaded model: logits of a flat batch over paged KV."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout
from stemma.model.attention import STEP_KEYWORD, StepContext
from stemma.model.batch import ForwardBatch
from stemma.model.cpu.attention import NativeAttentionStep
from stemma.model.cpu.rowwise import RowwiseOperations
from stemma.model.paged import AttentionStep
from stemma.native.library import Kernels


@dataclass(frozen=True, slots=True)
class KVShape:
    """KV of one token in one layer, as the layers passed it in the probe at load."""

    num_layers: int
    num_parts: int
    """2 for K and V; 1 for a compressed latent."""
    num_kv_heads: int
    head_dim: int
    """The larger one where keys and values differ."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a checkpoint says about itself."""

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
    numeric_path: str = "torch"
    """Names the order of sums: machines on which it is equal compute the same bits."""


class Decoder(Protocol):
    """Computes logits. The implementation depends on architecture and machine."""

    def forward(self, batch: ForwardBatch, kv: DeviceKV) -> torch.Tensor:
        """Write the KV of the batch's tokens; return logits of its `logits_rows`, [L, vocab]."""


class ModuleDecoder:
    """Runs the modules of transformers, with attention over paged KV: serves every supported architecture."""

    def __init__(self, hf_model: Any, kernels: Kernels | None) -> None:
        self._hf = hf_model
        self._kernels = kernels
        self._operations = None
        if kernels is not None:
            self._operations = RowwiseOperations(kernels)
            self._operations.pack_tied_head(hf_model)

    def forward(self, batch: ForwardBatch, kv: DeviceKV) -> torch.Tensor:
        """See `Decoder.forward`."""
        if self._kernels is None or self._operations is None:
            return self.run(batch, AttentionStep(batch, kv))
        with self._operations, NativeAttentionStep(batch, kv, self._kernels) as step:
            return self.run(batch, step)

    def run(self, batch: ForwardBatch, step: StepContext) -> torch.Tensor:
        """Run the modules with `step` as context of attention; return logits [L, vocab]."""
        output = self._hf(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.logits_rows,
            **{STEP_KEYWORD: step},
        )
        logits: torch.Tensor = output.logits[0]
        return logits


class CausalLM:
    """A transformers causal LM whose attention runs over `DeviceKV`. One step at a time; not thread-safe."""

    def __init__(
        self, decoder: Decoder, info: ModelInfo, kv_shape: KVShape, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.decoder = decoder
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
    def weight_bytes(self) -> int:
        """Bytes of all parameters in memory."""
        return self.info.weight_bytes

    def layout(self, block_size: int) -> KVLayout:
        """Return what a block of `block_size` tokens looks like for this model."""
        shape = self._kv_shape
        dtype = str(self.dtype).removeprefix("torch.")
        return KVLayout(
            shape.num_layers, shape.num_parts, block_size, shape.num_kv_heads, shape.head_dim, dtype
        )

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: DeviceKV) -> torch.Tensor:
        """Write the KV of the batch's tokens; return logits of its `logits_rows`, [L, vocab] float32."""
        return self.decoder.forward(batch, kv).float()
