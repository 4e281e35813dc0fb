"""Models that run through the modules of transformers, with attention over paged KV."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from stemma.memory.device.kv import DeviceKV
from stemma.model.attend.attention import StepContext
from stemma.model.attend.batch import ForwardBatch, ImageRows
from stemma.model.attend.entry_attention import EntryAttentionStep
from stemma.model.attend.grouped_attention import step_over
from stemma.model.attend.paged import AttentionStep
from stemma.model.attend.recurrence import Recurrence, TorchRecurrence
from stemma.model.cpu.attention import NativeAttentionStep
from stemma.model.cpu.entry_attention import NativeEntryStep
from stemma.model.cpu.packing import Packing
from stemma.model.cpu.recurrence import NativeRecurrence
from stemma.model.foreign.adapters import AdaptedModules
from stemma.model.foreign.attention import POSITIONS_KEYWORD, STEP_KEYWORD, AttentionProbe
from stemma.model.foreign.recurrence import (
    PagedStates,
    ProbedStates,
    StateStep,
    cache_of,
    divert,
    running,
)
from stemma.model.foreign.rowwise import RowwiseOperations
from stemma.model.foreign.weights import ModuleWeights
from stemma.model.lora.adapter import Adapter, LinearShape


class ModuleDecoder:
    """Runs the modules of transformers, with attention over paged KV: serves every supported architecture."""

    def __init__(self, hf_model: Any, weights: ModuleWeights | None, packing: Packing | None) -> None:
        """Take a model whose weights are packed already; `weights` and `packing` are None without kernels."""
        self._hf = hf_model
        self._kernels = None if packing is None else packing.kernels
        self.operations: RowwiseOperations | None = None
        """What replaces torch's operations while the modules run; None: nothing does."""
        if packing is not None and weights is not None:
            self.operations = RowwiseOperations(packing.kernels)
            self.operations.pack_tied_head(hf_model, weights, packing)
        self._is_recurrent = divert(hf_model)
        self._recurrence: Recurrence = TorchRecurrence()
        if self._kernels is not None:
            self._recurrence = NativeRecurrence(self._kernels)
        self._adapted = AdaptedModules(hf_model, self._kernels, self._try)

    def adaptable(self) -> Mapping[str, LinearShape]:
        """Return the linear layers that adapters may add to, by their names in transformers."""
        return self._adapted.shapes

    def prepare_adapter(self, adapter: Adapter) -> object:
        """Return the adapter as a step of this decoder uses it."""
        return self._adapted.prepare(adapter)

    def forward(self, batch: ForwardBatch, kv: DeviceKV) -> torch.Tensor:
        """Write the batch's KV and return logits [L, vocab]."""
        kernels = self._kernels
        if kv.layout.compressed is not None:
            with self.operations or nullcontext():
                if kernels is None:
                    return self.run(batch, EntryAttentionStep(batch, kv), kv)
                return self.run(batch, NativeEntryStep(batch, kv, kernels), kv)

        def make(batch: ForwardBatch, kv: DeviceKV) -> AbstractContextManager[StepContext]:
            if kernels is None:
                return nullcontext(AttentionStep(batch, kv))
            return NativeAttentionStep(batch, kv, kernels)

        with self.operations or nullcontext(), step_over(batch, kv, make) as step:
            return self.run(batch, step, kv)

    def run(self, batch: ForwardBatch, step: StepContext, kv: DeviceKV | None = None) -> torch.Tensor:
        """Run the modules with `step` as context of attention; return logits [L, vocab].

        `kv`: where recurrent layers have their states; None: there are none.
        """
        batch.on_launch()  # torch leaves the interpreter to others in each of its calls
        watched = self._watched(batch) if batch.wants_hidden else nullcontext()
        seeing = nullcontext() if batch.images is None else self._seeing(batch.images)
        with watched, seeing, self._adapted.step(batch), running(self._states(batch, kv)):
            return self._run(batch.token_ids, batch.positions, batch.logits_rows, step)

    @contextmanager
    def _watched(self, batch: ForwardBatch) -> Iterator[None]:
        """Set `batch.hidden` to what the model below the output head returns."""

        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            batch.hidden = output.last_hidden_state[0]

        handle = _below_head(self._hf).register_forward_hook(keep)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def _seeing(self, images: ImageRows) -> Iterator[None]:
        """Put vectors of images in place of what the embedding makes of their rows."""
        assert images.features is None, "no family that runs modules adds features"

        def put(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
            output[0, images.rows] = images.vectors
            return output

        handle = self._hf.get_input_embeddings().register_forward_hook(put)
        try:
            yield
        finally:
            handle.remove()

    def _states(self, batch: ForwardBatch, kv: DeviceKV | None) -> StateStep | None:
        if not self._is_recurrent:
            return None
        assert kv is not None
        return PagedStates(self._recurrence, batch, kv)

    def _cache_options(self) -> dict[str, Any]:
        """Return the keyword that modules with recurrent layers want; none without such layers."""
        return dict(cache_of(self._hf)) if self._is_recurrent else {}

    def _run(
        self, token_ids: torch.Tensor, positions: torch.Tensor, logits_rows: torch.Tensor, step: StepContext
    ) -> torch.Tensor:
        options = self._cache_options()
        output = self._hf(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logits_rows,
            **{STEP_KEYWORD: step, POSITIONS_KEYWORD: positions, **options},
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    @torch.inference_mode()
    def _try(self, num_tokens: int, probe: AttentionProbe | None = None) -> None:
        """Run `num_tokens` tokens without KV; logits of the last."""
        device = self._hf.device
        positions = torch.arange(num_tokens, device=device)
        states = ProbedStates(self._recurrence, num_tokens) if self._is_recurrent else None
        with self.operations or nullcontext(), running(states):
            self._run(torch.zeros_like(positions), positions, positions[-1:], probe or AttentionProbe())


def _below_head(hf_model: Any) -> Any:
    """Return the module whose output holds the last hidden states of all tokens."""
    base = hf_model.base_model
    # Llama 4's text model names its base as the model with images does, so transformers finds none.
    return hf_model.model if base is hf_model else base
