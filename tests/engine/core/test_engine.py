"""The engine over a tiny real model: same text whatever happens around it, and nothing left behind."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from tests.engine.harness import greedy, prompt

from stemma.engine.api import DraftCount
from stemma.engine.core.scheduler import DraftGuesser
from stemma.engine.drafts.source import num_accepted
from stemma.engine.sampling.params import SamplingParams
from stemma.errors import InvalidRequest, Overloaded, PromptTooLong
from stemma.prefix.keys import Namespace
from stemma.types import FinishReason, Tier


@pytest.fixture(scope="module", params=[False, True], ids=["in turn", "overlapping"])
def harness(harness, request):
    """All of these tests run with steps in turn, and with steps that overlap."""
    return partial(harness, overlaps=request.param)


@pytest.fixture(scope="module")
def reference(harness):
    """Greedy answers of an engine without cache, one request at a time, prompts in one chunk."""
    plain = harness(num_blocks=64, enable_prefix_cache=False, overlaps=False)
    known: dict[bytes, list[int]] = {}

    def answer(tokens: np.ndarray, num_tokens: int) -> list[int]:
        key = tokens.tobytes() + bytes([num_tokens])
        if key not in known:
            known[key] = plain.serve(tokens, greedy(num_tokens)).token_ids[0]
        return known[key]

    return answer


def test_matches_transformers_greedy_generation(harness, checkpoint, reference):
    import torch
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokens = prompt(1, 50)
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    with torch.inference_mode():
        for _ in range(12):
            ids = torch.cat([ids, hf(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    assert reference(tokens, 12) == ids[0, 50:].tolist()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("index", ["radix", "hash"])
@pytest.mark.parametrize("block_size", [1, 7, 16, 64])
def test_warm_equals_cold(harness, reference, index, block_size):
    engine = harness(num_blocks=1024 // block_size, block_size=block_size, index=index)
    shared = prompt(2, 40)
    prompts = [shared, np.concatenate([shared, prompt(3, 23)]), np.concatenate([shared[:33], prompt(4, 9)])]
    for _ in range(2):
        for tokens in prompts:
            assert engine.serve(tokens, greedy(6)).token_ids[0] == reference(tokens, 6)
    answer = engine.serve(prompts[1], greedy(6))
    assert answer.cache.cached_by_tier == {Tier.DEVICE: 62}
    assert answer.cache.miss_reason == "last_token"


def test_sixteen_identical_prompts_compute_the_prefix_once(harness, reference):
    engine = harness(num_blocks=64, block_size=64, max_batch_tokens=256)
    tokens = prompt(5, 1000)
    ids = [engine.add(tokens, greedy(2)) for _ in range(16)]
    engine.run()
    assert engine.runner.num_computed == 1000 + 15 * 1 + 16 * 1  # prompt once, last tokens, one decode each
    assert all(engine.answers[i].token_ids[0] == reference(tokens, 2) for i in ids)
    cached = sorted(engine.answers[i].cache.num_cached_tokens for i in ids)
    assert cached == [0] + [999] * 15


def test_prompts_that_share_a_prefix_wait_for_it(harness):
    engine = harness(num_blocks=64, block_size=16, max_batch_tokens=128)
    shared = prompt(6, 300)
    for i in range(8):
        engine.add(np.concatenate([shared, prompt(100 + i, 20)]), greedy(1))
    engine.run()
    assert engine.runner.num_computed == 300 + 8 * 20


def test_preemption_changes_no_token(harness, reference):
    engine = harness(num_blocks=9, block_size=8, max_batch_tokens=32)
    prompts = [prompt(10 + i, 12 + 3 * i) for i in range(5)]
    ids = [engine.add(tokens, greedy(30)) for tokens in prompts]
    engine.run(check=True)
    assert engine.engine.stats().num_preemptions > 0
    for request_id, tokens in zip(ids, prompts, strict=True):
        assert engine.answers[request_id].token_ids[0] == reference(tokens, 30)
        assert engine.answers[request_id].finish == {0: FinishReason.LENGTH}


def test_recomputation_after_preemption_is_no_hit(harness):
    engine = harness(num_blocks=9, block_size=8)
    prompts = [prompt(20 + i, 16) for i in range(4)]
    ids = [engine.add(tokens, greedy(30)) for tokens in prompts]
    engine.run()
    stats = engine.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_prompt_tokens == 4 * 16
    assert stats.cached_tokens_by_tier == {}
    assert all(engine.answers[i].cache.num_cached_tokens == 0 for i in ids)
    assert stats.num_generated_tokens == 4 * 30


def test_n_answers_compute_the_prompt_once(harness):
    engine = harness(num_blocks=64, block_size=16)
    tokens = prompt(30, 100)
    answer = engine.serve(tokens, SamplingParams(n=5, max_tokens=8, seed=3, ignore_eos=True))
    assert engine.runner.num_computed == 100 + 5 * 7
    assert len({tuple(t) for t in answer.token_ids.values()}) == 5
    assert answer.finished


@pytest.mark.parametrize("enable_prefix_cache", [True, False])
def test_n_beyond_the_seats_is_queued(harness, enable_prefix_cache):
    engine = harness(
        num_blocks=32, block_size=16, max_num_seqs=3, enable_prefix_cache=enable_prefix_cache, max_waiting=2
    )
    params = SamplingParams(n=10, max_tokens=4, seed=3, ignore_eos=True)
    few = engine.serve(prompt(30, 50), params)
    assert sorted(few.token_ids) == list(range(10))
    many = harness(num_blocks=64, block_size=16).serve(prompt(30, 50), params)
    assert few.token_ids == many.token_ids


def test_seeded_requests_do_not_depend_on_the_batch(harness):
    params = SamplingParams(max_tokens=10, seed=7, temperature=1.0, top_p=0.9, ignore_eos=True)
    alone = harness(num_blocks=64).serve(prompt(31, 20), params).token_ids[0]
    engine = harness(num_blocks=40, block_size=8, max_batch_tokens=24)
    for i in range(5):
        engine.add(prompt(40 + i, 30), SamplingParams(max_tokens=20, ignore_eos=True))
    request_id = engine.add(prompt(31, 20), params)
    engine.run()
    assert engine.answers[request_id].token_ids[0] == alone


def test_stop_strings_end_a_sequence_and_free_it(harness, tokenizer):
    engine = harness(num_blocks=32, block_size=8)
    tokens = prompt(33, 10)
    full = engine.serve(tokens, greedy(20))
    stop = full.text[0][5:8]
    answer = engine.serve(tokens, greedy(20, stop=(stop,)))
    assert answer.text[0] == full.text[0][: full.text[0].index(stop)]
    assert answer.finish[0] is FinishReason.STOP
    assert answer.stop_reason[0] == stop
    assert engine.engine.stats().num_running == 0


def test_eos_and_stop_ids_end_a_sequence(harness, model):
    engine = harness(num_blocks=32, block_size=8)
    tokens = prompt(34, 10)
    third = engine.serve(tokens, greedy(8)).token_ids[0][2]
    answer = engine.serve(tokens, greedy(8, stop_token_ids=(third,)))
    assert answer.token_ids[0][-1] == third
    assert len(answer.token_ids[0]) <= 3
    assert answer.stop_reason[0] == third
    longer = engine.serve(tokens, greedy(8, stop_token_ids=(third,), min_tokens=6))
    assert len(longer.token_ids[0]) >= 6


def test_max_tokens_none_runs_to_the_context(harness):
    engine = harness(num_blocks=4, block_size=8)
    answer = engine.serve(prompt(35, 10), greedy(1, max_tokens=None))
    assert len(answer.token_ids[0]) == 22
    assert answer.finish[0] is FinishReason.LENGTH


def test_what_can_never_be_served_is_refused(harness):
    engine = harness(num_blocks=4, block_size=8, max_waiting=2)
    with pytest.raises(PromptTooLong):
        engine.add(prompt(1, 32))
    with pytest.raises(InvalidRequest, match="empty"):
        engine.add([])
    with pytest.raises(InvalidRequest, match="token ids"):
        engine.add([1, 10**6])
    engine.add(prompt(1, 31), request_id="a")
    with pytest.raises(InvalidRequest, match="in use"):
        engine.add(prompt(1, 3), request_id="a")
    engine.add(prompt(2, 3))
    with pytest.raises(Overloaded):
        engine.add(prompt(3, 3))
    engine.run()
    assert len(engine.answers["a"].token_ids[0]) == 1


@pytest.mark.parametrize("num_steps", range(7))
def test_abort_at_any_time_frees_everything(harness, num_steps):
    engine = harness(num_blocks=12, block_size=8, max_batch_tokens=16)
    ids = [engine.add(prompt(50 + i, 20), greedy(10, n=2)) for i in range(3)]
    for _ in range(num_steps):
        engine.step()
    for request_id in ids:
        engine.abort(request_id)
        engine.engine.check()
        assert engine.answers[request_id].finish == {0: FinishReason.ABORT, 1: FinishReason.ABORT}
    engine.run()  # what is in flight still ends
    engine.cache.flush()
    assert engine.cache.stats().num_free_blocks == 12
    engine.abort("unknown")


def test_a_failing_step_fails_its_requests_only(harness, reference):
    engine = harness(num_blocks=32, block_size=8)
    tokens = prompt(60, 20)
    engine.add(tokens, greedy(4), request_id="bad")
    engine.step()
    engine.runner.fail_next = True
    engine.step()
    assert engine.answers["bad"].finish == {0: FinishReason.ERROR}
    assert "the device is on fire" in engine.answers["bad"].error
    engine.engine.check()
    assert engine.serve(tokens, greedy(4)).token_ids[0] == reference(tokens, 4)


def test_namespaces_never_share(harness):
    engine = harness(num_blocks=32, block_size=8)
    tokens = prompt(61, 20)
    engine.add(tokens, request_id="a", namespace=Namespace(salt="a"))
    engine.run()
    engine.add(tokens, request_id="b", namespace=Namespace(salt="b"))
    engine.run()
    assert engine.answers["b"].cache.num_cached_tokens == 0
    assert engine.answers["b"].cache.miss_reason == "cold"


def test_logprobs_come_with_every_token(harness):
    engine = harness(num_blocks=32)
    request_id = engine.add(prompt(62, 9), greedy(5, logprobs=3))
    seen = []
    while engine.engine.has_work:
        news = engine.engine.step()
        outputs, _ = engine.processor.process(news)
        seen += [p for o in outputs for d in o.deltas for p in d.logprobs]
    assert len(seen) == 5, request_id
    assert all(len(p.top) == 3 and p.top[0][0] == p.token_id for p in seen)


class OracleDrafter(DraftGuesser):
    """Drafts what will come, with a wrong token now and then."""

    def __init__(self, future: list[int], wrong_every: int) -> None:
        self.future, self.wrong_every = future, wrong_every
        self.num_prompt = 0
        self.num_accepted_tokens = 0

    @property
    def counts(self) -> dict[str, DraftCount]:
        return {}

    def begin_step(self, num_sequences, *, may_be_forced=False):
        return True

    def propose(self, key, namespace, tokens, max_tokens, forced=()):
        start = len(tokens) - self.num_prompt
        draft = self.future[start : start + min(4, max_tokens)]
        return tuple(t if (start + i) % self.wrong_every else (t + 1) % 500 for i, t in enumerate(draft))

    def observe(self, key, tokens, draft, drawn):
        self.num_accepted_tokens += num_accepted(draft, drawn)

    def observe_step(self, num_rows, num_context_tokens, num_tokens, duration_s):
        pass

    def finish(self, key, namespace, tokens, num_known):
        pass


def test_nothing_is_drafted_beside_prompts(harness, reference):
    """A step with a prompt in it is bound by arithmetic: rows of drafts aren't free there."""
    tokens = prompt(63, 11)
    drafter = OracleDrafter(reference(tokens, 40), 1000)
    drafter.num_prompt = len(tokens)
    engine = harness(drafter=drafter, max_batch_tokens=8)
    name = engine.add(tokens, greedy(40))
    while not engine.answers[name].token_ids.get(0):
        engine.step()
    engine.add(prompt(64, 30), greedy(1))
    for _ in range(3):
        engine.step()
        assert (name, 1) in [(who, num) for who, _, num in engine.runner.plans[-1]]
    engine.run()
    assert engine.answers[name].token_ids[0] == reference(tokens, 40)
    assert drafter.num_accepted_tokens > 10


@pytest.mark.parametrize("wrong_every", [2, 5, 1000])
@pytest.mark.parametrize("num_blocks", [5, 64])
def test_drafts_change_no_token_and_save_steps(harness, reference, wrong_every, num_blocks):
    tokens = prompt(63, 11)
    future = reference(tokens, 25)
    drafter = OracleDrafter(future, wrong_every)
    drafter.num_prompt = len(tokens)
    engine = harness(num_blocks=num_blocks, block_size=8, drafter=drafter)
    assert engine.serve(tokens, greedy(25)).token_ids[0] == future
    assert drafter.num_accepted_tokens + len(engine.runner.plans) == 25
    again = np.concatenate([tokens, np.array(future, dtype=np.int32), prompt(64, 3)])
    answer = engine.serve(again, greedy(4) if num_blocks == 64 else greedy(1))
    # In the pool of 5 there is no room to copy the head of the last block.
    assert answer.cache.num_cached_tokens == (11 + 24 if num_blocks == 64 else 32)
    assert answer.token_ids[0] == reference(again, 4)[: len(answer.token_ids[0])]


def test_a_running_sequence_and_its_lease_share_their_tokens(harness):
    engine = harness(num_blocks=32)
    seen, runner = [], engine.engine.runner

    def watched(rows, work):
        seen.append(rows.items[0].sequence)
        return work(rows)

    for name in ("forward", "prepare"):
        setattr(runner, name, partial(watched, work=getattr(runner, name)))
    engine.add(prompt(1, 20), greedy(8))
    for _ in range(4):
        engine.step()
    sequence = seen[-1]
    assert np.shares_memory(sequence.tokens, sequence.lease.tokens)
    assert sequence.num_tokens == sequence.lease.num_tokens > 20
