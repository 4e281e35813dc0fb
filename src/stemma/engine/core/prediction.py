"""Drafts by the model's layer for multi-token prediction: its batches, and the hidden states it goes on from.

The layer keeps KV for every token, in one more layer of the block's bytes (`model/load/prediction.py`). Each
step of the model runs it too, so what is committed is whole. For that the layer needs the model's last hidden
state of the token before a sequence's first row: the step before left it with the sequence. After a prefix
hit there is none, since hidden states aren't cached. Then the last cached token is computed once more, for
its hidden state alone; its KV is in the cache and isn't written.

A draft is made before the step that verifies it, by passes of the layer alone over one token of each
sequence. The first pass writes the KV that the step will write again; further passes write KV for guessed
tokens, which later steps overwrite.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from stemma.engine.core.adapter_seats import PreparedAdapters
from stemma.engine.core.request import Scheduled, SequenceState
from stemma.engine.core.runner import Runner
from stemma.engine.core.step_rows import StepRows
from stemma.engine.drafts.drafter import DraftAsk, Drafter
from stemma.memory.cache.prefix_cache import PrefixCache
from stemma.memory.device.kv import DeviceKV
from stemma.model.attend.batch import ForwardBatch
from stemma.model.load.prediction import PredictingDecoder
from stemma.model.opened.causal_lm import CausalLM


class PredictingRunner(Runner):
    """A `Runner` for a model with such a layer. Steps run in turn."""

    def __init__(
        self,
        model: CausalLM,
        kv: DeviceKV,
        *,
        max_batch_tokens: int,
        adapters: PreparedAdapters | None = None,
        block_size: int | None = None,
    ) -> None:
        """Take what `Runner` takes. Raises TypeError if the model was loaded without the layer."""
        super().__init__(
            model, kv, max_batch_tokens=max_batch_tokens, adapters=adapters, block_size=block_size
        )
        if not isinstance(model.decoder, PredictingDecoder):
            raise TypeError("the model has no layer for multi-token prediction")
        self._decoder = model.decoder

    def keep(self, item: Scheduled, sequence: SequenceState) -> None:
        """Keep what the step that ran last left for `sequence`: `item` computed up to `num_computed`."""
        sequence.hidden = self._decoder.hidden[item.row_of(sequence.num_computed - 1)].clone()

    def predict(self, wanted: Sequence[tuple[SequenceState, int]]) -> list[list[int]]:
        """Guess this number of tokens after each sequence, of which all but the last token are computed.

        Most tokens first. The lease of a sequence for which n are wanted has room for n - 1 tokens more.
        """
        sequences = [sequence for sequence, _ in wanted]
        ends = np.array([sequence.num_tokens for sequence in sequences], dtype=np.int64)
        tables = self._tables_of(sequences, int(ends.max()) + wanted[0][1] - 1)
        token_ids = torch.tensor([int(sequence.tokens[-1]) for sequence in sequences])
        previous = torch.stack([_hidden_of(sequence) for sequence in sequences])
        drafts: list[list[int]] = [[] for _ in wanted]
        for depth in range(wanted[0][1]):
            num = sum(num_tokens > depth for _, num_tokens in wanted)
            batch = self._single_tokens(token_ids[:num], ends[:num] - 1 + depth, tables[:num])
            token_ids, previous = self._decoder.predict(batch, previous[:num], self.kv)
            for draft, token_id in zip(drafts, token_ids.tolist(), strict=False):
                draft.append(token_id)
        return drafts

    def _batch(self, rows: StepRows) -> ForwardBatch:
        batch = super()._batch(rows)
        if batch.states is not None:
            return batch  # they have the hidden states too
        size = self._decoder.hidden_size
        zeros = torch.zeros(size, dtype=self._decoder.dtype)
        hidden = [item.sequence.hidden for item in rows.items]
        batch.previous_hidden = torch.stack([zeros if one is None else one for one in hidden])
        known = [row for item in rows.items for row in item.rows[: _num_known(item)]]
        if known:
            written = torch.ones(rows.num_rows, dtype=torch.bool)
            written[known] = False
            batch.written_rows = written.nonzero()[:, 0]
        return batch

    def _tables_of(self, sequences: Sequence[SequenceState], num_tokens: int) -> npt.NDArray[np.int32]:
        tables = np.zeros((len(sequences), -(-num_tokens // self._block_size)), dtype=np.int32)
        for row, sequence in enumerate(sequences):
            assert sequence.lease is not None
            table = sequence.lease.block_table[: tables.shape[1]]
            tables[row, : len(table)] = table
        return tables

    def _single_tokens(
        self, token_ids: torch.Tensor, positions: npt.NDArray[np.int64], tables: npt.NDArray[np.int32]
    ) -> ForwardBatch:
        size = self._block_size
        blocks = tables[np.arange(len(positions)), positions // size].astype(np.int64)
        return ForwardBatch(
            token_ids=token_ids,
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(blocks * size + positions % size),
            query_starts=list(range(len(positions) + 1)),
            context_lens=(positions + 1).tolist(),
            block_tables=torch.from_numpy(tables),
            logits_rows=torch.empty(0, dtype=torch.int64),
        )


class ModelDrafts:
    """Lets the model guess for the sequences of a step where the drafter expects that to pay."""

    def __init__(
        self,
        runner: PredictingRunner,
        drafter: Drafter,
        cache: PrefixCache,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = runner
        self._drafter = drafter
        self._cache = cache
        self._clock = clock

    def keep(self, item: Scheduled, sequence: SequenceState) -> None:
        """Keep what the next guesses of these sequences go on from, as `PredictingRunner.keep` does."""
        self._runner.keep(item, sequence)

    def offer(self, decoding: Sequence[SequenceState], max_tokens: int) -> None:
        """Offer the drafter guesses of up to `max_tokens` for sequences that are about to decode."""
        able = [s for s in decoding if s.hidden is not None and s.num_left > 1]
        asks = [
            DraftAsk(s.age, s.state.request.namespace, s.tokens, min(max_tokens, s.num_left - 1))
            for s in able
        ]
        wanted = [
            (sequence, num_tokens)
            for sequence, num_tokens in zip(able, self._drafter.num_to_predict(asks), strict=True)
            if num_tokens and self._has_room(sequence, num_tokens)
        ]
        if not wanted:
            return
        wanted.sort(key=lambda one: one[1], reverse=True)
        start_s = self._clock()
        drafts = self._runner.predict(wanted)
        self._drafter.observe_passes(wanted[0][1], self._clock() - start_s)
        for (sequence, _), draft in zip(wanted, drafts, strict=True):
            self._drafter.offer(sequence.age, sequence.num_tokens, draft)

    def _has_room(self, sequence: SequenceState, num_tokens: int) -> bool:
        assert sequence.lease is not None
        return self._cache.extend(sequence.lease, sequence.num_tokens + num_tokens - 1)


def _hidden_of(sequence: SequenceState) -> torch.Tensor:
    assert sequence.hidden is not None
    return sequence.hidden


def _num_known(item: Scheduled) -> int:
    """Return how many leading rows of an item have their KV in the cache."""
    assert item.sequence.lease is not None
    return max(0, item.sequence.lease.num_cached_tokens - item.start)
