"""A device that computes beside the host: what a step writes is there only once its result was read."""

from __future__ import annotations

import numpy as np
import torch
from tests.engine.harness import greedy, prompt

from stemma.config.settings import TierSettings
from stemma.engine.sampling.sampler import Sampler
from stemma.types import Tier


class DelayedWrites:
    """Undoes what a forward wrote to KV, and does it again when the tokens drawn from it are read."""

    def __init__(self, harness, monkeypatch) -> None:
        self.kv = harness.cache.buffer
        self.forward = harness.engine.runner.forward
        self.pending: torch.Tensor | None = None
        harness.engine.runner.forward = self.run
        sample = Sampler.sample

        def sample_and_wait(sampler, logits, *rest):
            result = sample(sampler, logits, *rest)
            self.wait()
            return result

        monkeypatch.setattr(Sampler, "sample", sample_and_wait)

    def run(self, plan):
        before = self.kv.data.clone()
        logits = self.forward(plan)
        after = self.kv.data.clone()
        if len(logits):  # `Runner.forward` waits for a step that nobody reads
            self.kv.data.copy_(before)
            self.pending = after
        return logits

    def wait(self) -> None:
        if self.pending is not None:
            self.kv.data.copy_(self.pending)
            self.pending = None


def test_blocks_are_copied_down_only_once_the_step_that_wrote_them_is_over(harness, monkeypatch):
    """Chunks of a long prompt run beside a decode; each that is full goes to the host tier at once."""
    plain = harness(num_blocks=64, block_size=16, max_batch_tokens=48)
    expected = plain.serve(prompt(1, 200), greedy(8)).token_ids
    tiers = TierSettings(host_cache=8 << 20, host_write="write_through", load_when="always")
    engine = harness(num_blocks=64, block_size=16, max_batch_tokens=48, tiers=tiers)
    delayed = DelayedWrites(engine, monkeypatch)
    engine.add(prompt(2, 20), greedy(60))
    engine.step()
    engine.serve(prompt(1, 200), greedy(8, n=3))
    delayed.wait()
    assert engine.cache.below.drain(20.0)
    engine.cache.flush()
    again = engine.serve(prompt(1, 200), greedy(8))
    assert again.cache.cached_by_tier[Tier.HOST] >= 192
    assert again.token_ids == expected


def test_siblings_without_a_seat_draw_the_same_tokens(harness):
    """A sibling that finds no room is queued, and its first token drawn again."""
    roomy, tight = harness(num_blocks=64), harness(num_blocks=64, max_num_seqs=2)
    params = greedy(6, n=4, temperature=1.0, seed=7)
    assert roomy.serve(prompt(1, 40), params).token_ids == tight.serve(prompt(1, 40), params).token_ids
    assert np.unique([ids for ids in roomy.answers["r0"].token_ids.values()], axis=0).shape[0] > 1
