"""Which blocks are looked for, loaded and saved, as vLLM's scheduler goes through a request's life."""

from __future__ import annotations

import pytest
from packages.connect.tests.vllm.stand_ins import BLOCK_SIZE, SPACE, FakeLookup, Request

from stemma.prefix.keys import Namespace, chain_keys
from stemma.types import Tier, as_tokens
from stemma_connect.vllm.scheduler import SchedulerSide
from stemma_connect.vllm.work import StepWork


def keys_of(tokens, salt=""):
    return chain_keys(SPACE.root(Namespace(salt=salt)), as_tokens(tokens), BLOCK_SIZE)


class Rig:
    def __init__(self, **options) -> None:
        self.lookup = FakeLookup()
        self.side = SchedulerSide(SPACE, self.lookup, **options)
        self.tables: dict[str, list[int]] = {}

    def hold(self, tokens, tier=Tier.DISK, salt="") -> None:
        self.lookup.held |= dict.fromkeys(keys_of(tokens, salt), tier)

    def admit(self, request, *, num_local=0) -> int:
        """vLLM looks for a request and gives it blocks 100, 101, ...; returns the tokens to load."""
        count = self.side.num_new_matched(request, num_local)
        assert count is not None
        num_blocks = -(-len(request.all_token_ids) // BLOCK_SIZE)
        self.tables[request.request_id] = list(range(100, 100 + num_blocks))
        self.side.allocated(request, self.tables[request.request_id], count)
        request.num_computed_tokens = min(num_local + count, len(request.all_token_ids) - 1)
        return count

    def step(self, started=(), **num_scheduled) -> StepWork:
        return self.side.plan_step(num_scheduled, started, lambda name: self.tables[name])


def saved(work):
    return [(block.block_id, block.key) for block in work.saves]


def test_a_new_prompt_is_saved_block_by_block_as_chunks_fill_them():
    rig = Rig()
    tokens = list(range(11))
    keys = keys_of(tokens)
    request = Request("a", tokens)
    assert rig.admit(request) == 0
    work = rig.step(["a"], a=6)
    assert saved(work) == [(100, keys[0])]
    assert work.saves[0].parent == SPACE.root(Namespace())
    assert (work.num_tokens, work.num_prompt_tokens, work.hits) == (6, 6, [])
    request.num_computed_tokens = 6
    work = rig.step(a=5)
    assert saved(work) == [(101, keys[1])]
    assert work.saves[0].parent == keys[0]


def test_output_is_saved_once_it_is_accepted_and_its_kv_is_computed():
    rig = Rig()
    request = Request("a", list(range(8)))
    rig.admit(request)
    rig.tables["a"] = [100, 101, 102, 103]
    assert len(rig.step(["a"], a=8).saves) == 2
    for token in range(50, 54):  # four tokens are known, the KV of three is there
        request.num_computed_tokens = len(request.all_token_ids)
        request.all_token_ids.append(token)
        assert rig.step(a=1).saves == []
    request.num_computed_tokens = 12
    request.all_token_ids.append(54)
    assert saved(rig.step(a=1)) == [(102, keys_of(request.all_token_ids)[2])]


def test_drafts_that_may_be_rejected_are_not_saved():
    rig = Rig()
    request = Request("a", list(range(4)))
    rig.admit(request)
    rig.tables["a"] = [100, 101, 102]
    rig.step(["a"], a=4)
    request.num_computed_tokens = 4
    request.all_token_ids.append(50)
    assert rig.step(a=5).saves == []  # one token and four drafts fill block 101, with whatever they are


def test_the_last_block_is_saved_when_a_request_ends_and_vllm_keeps_it_until_then():
    rig = Rig()
    request = Request("a", list(range(4)))
    rig.admit(request)
    rig.tables["a"] = [100, 101]
    rig.step(["a"], a=4)
    for token in range(4):
        request.num_computed_tokens = len(request.all_token_ids)
        request.all_token_ids.append(50 + token)
        rig.step(a=1)
    request.all_token_ids.append(99)
    request.num_computed_tokens = 8
    assert rig.side.finished(request, [100, 101])
    work = rig.step()
    assert saved(work) == [(101, keys_of(request.all_token_ids)[1])]
    assert work.handed_over == ["a"]
    assert work.num_tokens == 0


def test_a_request_that_ends_with_nothing_new_is_freed_at_once():
    rig = Rig()
    request = Request("a", list(range(4)))
    rig.admit(request)
    rig.step(["a"], a=4)
    assert not rig.side.finished(request, [100])
    assert rig.step().handed_over == []


def test_what_the_tiers_have_is_loaded_behind_what_vllm_has():
    rig = Rig()
    tokens = list(range(14))
    keys = keys_of(tokens)
    rig.hold(tokens[:12])
    request = Request("a", tokens)
    assert rig.admit(request, num_local=4) == 8
    assert rig.lookup.asked == [("a", keys[0], keys[1:3])]
    assert rig.side.sources(request, 8) == {Tier.DISK: 8}
    (load,) = rig.step().loads
    assert (load.request_id, load.block_ids, list(load.keys)) == ("a", [101, 102], keys[1:3])
    work = rig.step(["a"], a=2)
    assert work.loads == []
    assert [block.block_id for block in work.hits] == [100, 101, 102]
    assert work.saves == []


def test_a_whole_prompt_may_be_loaded_and_vllm_computes_its_last_token():
    rig = Rig()
    tokens = list(range(8))
    rig.hold(tokens)
    request = Request("a", tokens)
    assert rig.admit(request) == 8
    work = rig.step(["a"], a=1)
    assert [block.block_id for block in work.hits] == [100]
    assert saved(work) == [(101, keys_of(tokens)[1])]  # its last token was computed anew


def test_blocks_that_were_never_loaded_are_not_saved():
    rig = Rig()
    tokens = list(range(8))
    rig.hold(tokens)
    request = Request("a", tokens)
    rig.admit(request)
    rig.step()
    assert not rig.side.finished(request, [100, 101])  # the client went away during the load
    assert rig.step().saves == []


def test_a_preempted_request_that_waits_again_saves_nothing_of_its_new_blocks():
    rig = Rig()
    tokens = list(range(8))
    request = Request("a", [*tokens, 50, 51, 52, 53, 54], num_prompt_tokens=8)
    rig.admit(request)
    rig.step(["a"], a=8)
    rig.hold(tokens)
    request.num_computed_tokens = 0
    rig.admit(request)
    assert not rig.side.finished(request, [100, 101, 102])


def test_a_failed_load_is_not_tried_again():
    rig = Rig()
    tokens = list(range(8))
    rig.hold(tokens)
    request = Request("a", tokens)
    rig.admit(request)
    rig.step()
    rig.side.loads_failed({101})
    assert rig.side.num_new_matched(request, 0) == 0
    other = Request("b", tokens)
    assert rig.side.num_new_matched(other, 0) == 8


def test_a_pool_that_is_being_asked_means_ask_again():
    rig = Rig()
    rig.lookup.is_probing = True
    request = Request("a", list(range(8)))
    assert rig.side.num_new_matched(request, 0) is None
    rig.lookup.is_probing = False
    assert rig.side.num_new_matched(request, 0) == 0


def test_salts_separate():
    rig = Rig()
    tokens = list(range(8))
    rig.hold(tokens, salt="theirs")
    assert rig.side.num_new_matched(Request("a", tokens, cache_salt="ours"), 0) == 0
    assert rig.side.num_new_matched(Request("b", tokens), 0) == 0
    assert rig.side.num_new_matched(Request("c", tokens, cache_salt="theirs"), 0) == 8


@pytest.mark.parametrize("fields", [{"lora_request": "x"}, {"mm_features": ["x"]}, {"prompt_embeds": "x"}])
def test_requests_whose_kv_depends_on_more_than_tokens_are_left_alone(fields):
    rig = Rig()
    tokens = list(range(8))
    rig.hold(tokens)
    request = Request("a", tokens, **fields)
    assert rig.admit(request) == 0
    assert rig.step(["a"], a=8).saves == []
    assert not rig.side.finished(request, [100, 101])


def test_the_role_limits_what_is_done():
    tokens = list(range(8))
    producer = Rig(loads=False)
    producer.hold(tokens)
    assert producer.admit(Request("a", tokens)) == 0
    assert len(producer.step(["a"], a=8).saves) == 2
    consumer = Rig(saves=False)
    consumer.hold(tokens[:4])
    assert consumer.admit(Request("a", tokens)) == 4
    assert consumer.step(["a"], a=4).saves == []
