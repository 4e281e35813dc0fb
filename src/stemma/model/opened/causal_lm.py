"""A loaded model: logits of a flat batch over paged KV."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from stemma.config.settings import KVArrangement, KVDtype
from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout
from stemma.model.attend.batch import ForwardBatch
from stemma.model.attend.kept_kv import KeptKV, KVShape
from stemma.model.lora.adapter import Adapter, LinearShape
from stemma.model.opened.abilities import Abilities
from stemma.model.opened.draw_rules import Choose
from stemma.model.vision.family import Encoder


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
    """Identifies the weights (`model/files/fingerprint.py`)."""
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
        choose: Choose | None = None,
    ) -> None:
        """`context_size`: ranks that the tokens of each block are divided over.

        `encoder`: makes vectors of images; None: the model reads text alone. `choose`: draws on the device;
        None: torch's operations do.
        """
        self.encoder, self.choose = encoder, choose
        self.decoder = decoder
        self.context_size = context_size
        self.info = info
        self.kept = KeptKV(
            kv_shape, info.architecture, dtype, device.type, info.max_model_len, context_size=context_size
        )
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
        """As `KeptKV.layout`."""
        return self.kept.layout(block_size, kv_dtype, arrangement, frees_windows=frees_windows)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: DeviceKV) -> torch.Tensor:
        """Write the KV of the batch's tokens; return logits of its `logits_rows`, [L, vocab] float32."""
        return self.decoder.forward(batch, kv).float()
