"""States of recurrent layers: who holds which, checkpoints, and what is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.memory.cache.lease import Lease
from stemma.memory.cache.places import Places
from stemma.memory.cache.slots import Slots
from stemma.memory.cache.states import CachedStates
from stemma.memory.device.layout import WindowGroup
from stemma.memory.device.slabs import SlabAllocator
from stemma.prefix.keys import KeySpace, Namespace

BLOCK_SIZE = 32
UNIT = 64
SPACE = KeySpace("model", "layout", BLOCK_SIZE)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def make_states(num_states: int, **options: object) -> CachedStates:
    fields: dict[str, object] = {"interval": 256} | options
    return CachedStates(
        Places(SlabAllocator(num_states, 1), 1, lambda state: range(100 + 2 * state, 102 + 2 * state)),
        BLOCK_SIZE,
        None,
        Clock(),
        **fields,  # type: ignore[arg-type]
    )


def lease_of(prompt: int, num_tokens: int, common: int = 0) -> Lease:
    """A lease whose first `common` tokens are those of prompt 0."""
    tokens = np.full(num_tokens, prompt, dtype=np.int32)
    tokens[:common] = 0
    return Lease(Namespace(), SPACE, tokens)


def run(states: CachedStates, lease: Lease, end: int) -> None:
    assert lease.state is not None
    assert states.plan(lease, lease.state.position, end, num_drafts=0)
    assert states.land(lease, end, num_computed=end)


def deepest(states: CachedStates, lease: Lease, num_tokens: int) -> int:
    return states.deepest(lease.keys(num_tokens // BLOCK_SIZE), num_tokens)


def test_a_prompt_leaves_states_where_others_may_go_on() -> None:
    states = make_states(8)
    lease = lease_of(0, 600)
    assert states.begin(lease, 0)
    run(states, lease, 600)
    assert [deepest(states, lease, at) for at in (64, 255, 256, 511, 512, 575, 576)] == [
        *(0, 0, 256, 256, 512, 512, 576)
    ]
    states.end(lease)
    again = lease_of(0, 640)
    assert states.begin(again, 576)
    assert again.state is not None
    assert again.state.state is not None
    states.end(again)
    states.check([])


def test_a_pinned_checkpoint_stays_while_others_need_room() -> None:
    states = make_states(4)
    first = lease_of(0, 64)
    states.begin(first, 0)
    run(states, first, 64)
    states.end(first)
    pinned = lease_of(0, 100)
    states.pin(pinned, 96)
    for prompt in range(1, 9):
        lease = lease_of(prompt, 128)
        assert states.begin(lease, 0)
        run(states, lease, 128)
        states.end(lease)
    assert deepest(states, pinned, 96) == 64
    assert states.num_checkpoints == 4
    assert states.flush([pinned]) == 3
    assert deepest(states, pinned, 96) == 64
    states.check([pinned])
    states.end(pinned)
    assert states.flush() == 1
    states.check([])


def test_pins_leave_sequences_half_of_the_places() -> None:
    states = make_states(4)
    pinned = []
    for prompt in range(3):
        lease = lease_of(prompt, 64)
        states.begin(lease, 0)
        run(states, lease, 64)
        states.end(lease)
        pinned.append(lease_of(prompt, 64))
        states.pin(pinned[-1], 64)
    assert [lease.state is not None for lease in pinned] == [True, True, False]
    states.check(pinned)


def test_a_state_is_kept_where_the_tree_branched() -> None:
    states = make_states(8)
    first = lease_of(0, 200)
    states.begin(first, 0)
    run(states, first, 200)
    second = lease_of(1, 200, common=150)
    assert deepest(states, second, 128) == 0
    states.begin(second, 0, num_with_kv=150)
    run(states, second, 200)
    assert deepest(states, lease_of(2, 200, common=150), 128) == 128


def test_alone_a_sequence_writes_in_place_and_leaves_checkpoints_behind() -> None:
    states = make_states(4)
    lease = lease_of(0, 100)
    states.begin(lease, 0)
    run(states, lease, 100)
    assert lease.state is not None
    own = lease.state.state
    for _ in range(27):
        lease.buffer.extend([7])
        run(states, lease, lease.num_tokens)
        assert lease.state.state == own
    lease.buffer.extend([7])
    run(states, lease, 128)
    assert deepest(states, lease, 128) == 128
    lease.buffer.extend([7])
    run(states, lease, 129)
    assert lease.state.state != own  # which is the checkpoint now
    states.check([lease])


def test_the_last_state_of_an_answer_replaces_the_one_before() -> None:
    states = make_states(8)
    lease = lease_of(0, 63)
    states.begin(lease, 0)
    run(states, lease, 63)
    for end in range(64, 300):
        lease.buffer.extend([7])
        run(states, lease, end)
    assert deepest(states, lease, 299) == 256
    assert deepest(states, lease, 255) == 0
    states.check([lease])


def test_a_wrong_draft_goes_back() -> None:
    states = make_states(3)
    lease = lease_of(0, 100)
    states.begin(lease, 0)
    run(states, lease, 100)
    assert lease.state is not None
    own = lease.state.state
    assert states.plan(lease, 100, 104, num_drafts=3)
    assert not states.land(lease, 104, num_computed=102)
    assert (lease.state.state, lease.state.position) == (own, 100)
    assert states.plan(lease, 100, 104, num_drafts=3)
    assert states.land(lease, 104, num_computed=104)
    assert (lease.state.position, lease.state.state == own) == (104, False)
    states.check([lease])


def test_without_room_a_sequence_takes_its_checkpoint_back() -> None:
    states = make_states(1)
    lease = lease_of(0, 128)
    assert states.begin(lease, 0)
    run(states, lease, 128)
    assert states.num_checkpoints == 1
    other = lease_of(1, 10)
    assert not states.begin(other, 0)
    lease.buffer.extend([7])
    run(states, lease, 129)
    assert states.num_checkpoints == 0
    states.check([lease])


def test_what_spares_least_goes_first() -> None:
    states = make_states(5, interval=64)
    long, short = lease_of(0, 256), lease_of(1, 64)
    for lease in (long, short):
        assert states.begin(lease, 0)
        run(states, lease, lease.num_tokens)
        states.end(lease)
    before = states.num_checkpoints
    for _ in range(5):
        again = lease_of(1, 80)
        states.begin(again, 64)
        states.end(again)
    other = lease_of(2, 10)
    states.begin(other, 0)
    run(states, other, 10)
    assert states.num_checkpoints == before - 1
    assert deepest(states, short, 64) == 64


def test_a_load_that_brings_less_falls_back() -> None:
    states = make_states(4)
    lease = lease_of(0, 300)
    states.begin(lease, 0)
    run(states, lease, 130)
    states.end(lease)
    loading = lease_of(0, 300)
    assert states.begin_loading(loading, 256, 256)
    assert len(states.blocks_of(loading)) == 2
    loading.has_loaded_state = False
    assert states.finish_loading(loading, loading.keys(8), 256) == deepest(states, loading, 256)
    states.check([loading])
    states.end(loading)
    assert states.begin_loading(loading, 256, 256)
    loading.has_loaded_state = True
    assert states.finish_loading(loading, loading.keys(8), 256) == 256
    assert deepest(states, loading, 256) == 256
    states.check([loading])


def test_pieces_have_keys_of_their_own() -> None:
    states = make_states(2)
    one, other = lease_of(0, 64), lease_of(1, 64)
    keys = [*states.piece_keys(one, 64), *states.piece_keys(other, 64), one.key(1), other.key(1)]
    assert len(set(keys)) == len(keys) == 6


WINDOW = WindowGroup((0,), 70, 1, 16)
CHUNK = WindowGroup((0,), 128, 1, 16, is_chunked=True)


def make_windows(
    num_pages: int, num_states: int = 0, windows: WindowGroup = WINDOW, **options: object
) -> CachedStates:
    fields: dict[str, object] = {"interval": 256} | options
    places = Places(
        SlabAllocator(num_states + num_pages, 1),
        int(num_states > 0),
        lambda state: range(100 + 2 * state, 102 + 2 * state),
        1,
        lambda page: range(200 + 3 * page, 203 + 3 * page),
        lambda _source, _target: None,
        windows,
    )
    return CachedStates(places, BLOCK_SIZE, None, Clock(), **fields)  # type: ignore[arg-type]


def pages_of(lease: Lease) -> list[int]:
    assert lease.state is not None
    return sorted(lease.state.pages)


def test_pages_behind_the_window_are_freed() -> None:
    states = make_windows(20)
    lease = lease_of(0, 300)
    states.begin(lease, 0)
    run(states, lease, 300)
    # Token 300 sees tokens from 231 on: blocks 7, 8 and the open one, 9.
    assert pages_of(lease) == [7, 8, 9]
    assert len(states.piece_keys(lease, 256)) == 3 * 3  # of tokens 187 to 255: blocks 5 to 7
    assert [deepest(states, lease, at) for at in (255, 256, 288)] == [0, 256, 256]
    states.end(lease)
    again = lease_of(0, 310)
    assert states.begin(again, 256)
    assert pages_of(again) == [5, 6, 7]
    run(states, again, 310)
    states.check([again])


def test_pages_of_a_chunk_are_freed_when_the_next_one_begins() -> None:
    states = make_windows(20, windows=CHUNK, interval=64)
    lease = lease_of(0, 300)
    states.begin(lease, 0)
    run(states, lease, 250)
    assert pages_of(lease) == [4, 5, 6, 7], "tokens 128 to 249"
    run(states, lease, 300)
    assert pages_of(lease) == [8, 9], "tokens 256 to 299"
    assert len(states.piece_keys(lease, 256)) == 3, "one page: token 256 sees nothing before it"
    assert [deepest(states, lease, at) for at in (127, 128, 256, 299)] == [0, 128, 256, 256]
    states.end(lease)
    again = lease_of(0, 310)
    assert states.begin(again, 256)
    run(states, again, 310)
    states.check([again])


def test_forks_copy_their_open_page() -> None:
    copied: list[tuple[int, int]] = []
    places = Places(
        SlabAllocator(10, 1),
        0,
        range,
        1,
        lambda page: range(page, page + 1),
        lambda *pair: copied.append(pair),
        WINDOW,
    )
    states = CachedStates(places, BLOCK_SIZE, None, Clock(), interval=256)
    lease = lease_of(0, 50)
    states.begin(lease, 0)
    run(states, lease, 50)
    twin = Lease(Namespace(), SPACE, lease.tokens)
    states.twin(lease, twin)
    for one in (lease, twin):
        one.buffer.extend([7])
        run(states, one, 51)
    assert len(copied) == 1
    states.check([lease, twin])


def test_without_pages_a_step_waits() -> None:
    states = make_windows(4)
    lease, other = lease_of(0, 120), lease_of(1, 120)
    states.begin(lease, 0)
    run(states, lease, 120)
    assert not states.plan(lease, 120, 400, num_drafts=0)
    states.end(lease)
    assert states.begin(other, 0)
    run(states, other, 120)
    states.check([other])


def test_windows_keep_what_a_wrong_draft_leaves() -> None:
    states = make_windows(10)
    lease = lease_of(0, 100)
    states.begin(lease, 0)
    run(states, lease, 100)
    assert states.plan(lease, 100, 104, num_drafts=3)
    assert states.land(lease, 104, num_computed=102)
    assert lease.state is not None
    assert lease.state.position == 102


@pytest.mark.parametrize("num_checkpoints", [200, 2000])
def test_the_work_of_taking_a_state_does_not_grow_with_what_is_kept(
    num_checkpoints: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = make_states(num_checkpoints)
    looked_at = 0
    holders = Slots.holders

    def counted(slots: Slots, place: int) -> int:
        nonlocal looked_at
        looked_at += 1
        return holders(slots, place)

    for prompt in range(num_checkpoints + 10):
        if prompt == num_checkpoints:
            monkeypatch.setattr(Slots, "holders", counted)
        lease = lease_of(prompt, 64)
        assert states.begin(lease, 0)
        run(states, lease, 64)
        states.end(lease)
    assert states.num_evicted == 10
    assert 0 < looked_at < 100


@dataclass
class Model:
    """Only what was computed may be found: positions by prompt."""

    computed: set[tuple[int, int]] = field(default_factory=set)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_holders_always_agree(data: st.DataObject) -> None:
    interval = data.draw(st.sampled_from((64, 128, 1024)))
    num_states, num_pages = data.draw(st.sampled_from(((2, 0), (9, 0), (0, 14), (0, 40), (3, 20))))
    if num_pages:
        states = make_windows(num_pages, num_states, interval=interval)
    else:
        states = make_states(num_states, interval=interval)
    model = Model()
    leases: list[tuple[int, Lease]] = []
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(("begin", "run", "draft", "twin", "end", "flush")))
        if action == "begin":
            prompt = data.draw(st.integers(0, 3))
            lease = lease_of(prompt, data.draw(st.integers(2, 400)))
            position = deepest(states, lease, (lease.num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE)
            assert position == 0 or (prompt, position) in model.computed
            if states.begin(lease, position, data.draw(st.integers(position, 400))):
                leases.append((prompt, lease))
        elif action == "flush":
            states.flush()
        elif leases:
            prompt, lease = leases[data.draw(st.integers(0, len(leases) - 1))]
            assert lease.state is not None
            start = lease.state.position
            if action == "end":
                states.end(lease)
                leases = [pair for pair in leases if pair[1] is not lease]
            elif action == "twin":
                twin = Lease(Namespace(), SPACE, lease.tokens)
                states.twin(lease, twin)
                leases.append((prompt, twin))
            elif action == "draft":
                for _ in range(4):
                    lease.buffer.extend([prompt])
                end = lease.num_tokens
                if states.plan(lease, start, end, num_drafts=3):
                    accepted = max(start + 1, end - 3 + data.draw(st.integers(0, 3)))
                    if states.land(lease, end, num_computed=accepted):
                        model.computed |= {(prompt, at) for at in range(start, accepted + 1)}
            else:
                if start == lease.num_tokens:
                    lease.buffer.extend([prompt])
                end = data.draw(st.integers(start + 1, lease.num_tokens))
                if states.plan(lease, start, end, num_drafts=0):
                    model.computed |= {(prompt, at) for at in range(start, end + 1)}
                    assert states.land(lease, end, num_computed=end)
        states.check([lease for _, lease in leases])
    for _, lease in leases:
        states.end(lease)
    states.check([])


def test_nothing_is_kept_without_a_cache() -> None:
    states = make_states(4, keeps=False)
    lease = lease_of(0, 300)
    states.begin(lease, 0)
    run(states, lease, 300)
    assert states.num_checkpoints == 0


def test_a_state_that_stands_elsewhere_is_an_error() -> None:
    states = make_states(2)
    lease = lease_of(0, 100)
    states.begin(lease, 0)
    with pytest.raises(AssertionError, match="other tokens"):
        states.plan(lease, 1, 2, num_drafts=0)
