"""Modules of transformers as what `RecordedDecoder` records: all but the head, and the head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPast

from stemma.model.attend.attention import StepContext
from stemma.model.attend.batch import ForwardBatch
from stemma.model.cuda.low_rank import AdapterStep
from stemma.model.foreign.attention import POSITIONS_KEYWORD, STEP_KEYWORD
from stemma.model.lora.adapter import Adapter, AdapterRows, LinearShape


class HeadlessModules:
    """Runs a causal LM of transformers whose attention is paged (`use_paged_attention`)."""

    def __init__(self, hf_model: Any) -> None:
        self._hf = hf_model

    def states(self, batch: ForwardBatch, step: StepContext) -> torch.Tensor:
        """Return the hidden states [T, H] behind the final norm."""
        options = {STEP_KEYWORD: step, POSITIONS_KEYWORD: batch.positions}
        ids, positions = batch.token_ids[None], batch.positions[None]
        output = self._hf.base_model(input_ids=ids, position_ids=positions, use_cache=False, **options)
        states: torch.Tensor = output.last_hidden_state[0]
        return states

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits [L, vocab] of states [L, H], with all that the model does to its logits."""
        below = self._hf.base_model
        below.forward = lambda **_options: BaseModelOutputWithPast(last_hidden_state=states[None])
        try:
            ids = torch.zeros(1, len(states), dtype=torch.int64, device=states.device)
            output = self._hf(input_ids=ids, use_cache=False)
        finally:
            del below.forward  # the class's own again
        logits: torch.Tensor = output.logits[0]
        return logits

    def adapter_step(self, adapters: Sequence[AdapterRows], num_rows: int) -> AdapterStep | None:
        """Return that there are none."""
        assert not adapters
        return None

    def adaptable(self) -> Mapping[str, LinearShape]:
        """Return that no adapter may add to anything."""
        return {}

    def prepare_adapter(self, adapter: Adapter) -> object:
        """Never called: nothing is adaptable."""
        raise AssertionError(f"adapter {adapter.name}")
