"""Steps and copies of rank 0: it tells the other ranks first, then does its own part."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from stemma.engine.ranks.leader import Ranks
from stemma.engine.ranks.messages import ClearSlab, CopyHead, Step
from stemma.engine.ranks.settings import dealing_of
from stemma.errors import EngineFailed, UnsupportedModel
from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout
from stemma.model.attend.batch import ForwardBatch
from stemma.model.lora.adapter import Adapter, LinearShape
from stemma.model.opened.causal_lm import Decoder


class LeadingDecoder:
    """A `Decoder` that runs a step on all ranks."""

    def __init__(self, own: Decoder, ranks: Ranks) -> None:
        """`own` computes rank 0's share."""
        self._own = own
        self._ranks = ranks

    def forward(self, batch: ForwardBatch, kv: DeviceKV) -> torch.Tensor:
        """Run a step on all ranks. After any error the ranks don't agree any more, so all of them end."""
        try:
            self._ranks.tell(
                Step(
                    token_ids=batch.token_ids.cpu().numpy(),
                    positions=batch.positions.cpu().numpy(),
                    slots=batch.slots.cpu().numpy(),
                    query_starts=batch.query_starts,
                    context_lens=batch.context_lens,
                    block_tables=batch.block_tables.numpy(),
                    logits_rows=batch.logits_rows.cpu().numpy(),
                    states=batch.states,
                )
            )
            return self._own.forward(batch, kv)
        except Exception as error:
            symptom = EngineFailed(f"a step failed on rank 0: {type(error).__name__}: {error}")
            raise self._ranks.explain(symptom) from error

    def adaptable(self) -> Mapping[str, LinearShape]:
        """Return nothing: adapters aren't cut for ranks."""
        return {}

    def prepare_adapter(self, adapter: Adapter) -> object:
        """Raise UnsupportedModel."""
        raise UnsupportedModel("adapters aren't served on several ranks")


class LeadingKV(DeviceKV):
    """Rank 0's device tier; copies within it are made on all ranks."""

    def __init__(
        self, layout: KVLayout, num_blocks: int, device: torch.device, ranks: Ranks, *, slab: int = 0
    ) -> None:
        """`layout`: of rank 0's part of a block. `slab`: as in `DeviceKV`."""
        super().__init__(layout, num_blocks, device, slab=slab)
        self._ranks = ranks
        self._dealing = dealing_of(ranks.settings)

    def clear_slab(self, slab: int) -> None:
        """Zero it on all ranks."""
        self._ranks.tell(ClearSlab(slab))
        super().clear_slab(slab)

    def copy_block_head(self, src: int, dst: int, num_tokens: int) -> None:
        """Copy on all ranks; each copies what it has of the first `num_tokens` tokens."""
        self._ranks.tell(CopyHead(src, dst, num_tokens))
        super().copy_block_head(src, dst, self._dealing.num_held_of_block(0, num_tokens))
