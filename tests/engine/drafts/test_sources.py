"""Each draft source: the contract, and what it finds."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.contracts.draft_source import PERIOD, DraftSourceContract

from stemma.engine.drafts.index_memory import SUFFIX_TOKEN_BYTES, IndexMemory
from stemma.engine.drafts.lookahead import NGRAM_BYTES, Lookahead
from stemma.engine.drafts.prompt_lookup import PromptLookup
from stemma.engine.drafts.source import DraftSource, Proposal, num_accepted
from stemma.engine.drafts.suffix import NGRAM, SuffixCorpus, SuffixIndex
from stemma.engine.drafts.tree import BranchLookup, TreeContinuation
from stemma.prefix.keys import DEFAULT_NAMESPACE, Namespace
from stemma.prefix.radix import RadixIndex
from stemma.types import TokenArray, as_tokens

OTHER = Namespace("other")


def random_text(seed: int, length: int, num_ids: int = 1000) -> TokenArray:
    return as_tokens(np.random.default_rng(seed).integers(0, num_ids, length))


def tree_of(namespace: Namespace, *texts: TokenArray) -> RadixIndex:
    index = RadixIndex(4)
    first = 0
    for text in texts:
        num_blocks = -(-len(text) // 4)
        index.insert(namespace, text, np.arange(first, first + num_blocks, dtype=np.int32), 0.0)
        first += num_blocks
    return index


class TestPromptLookup(DraftSourceContract):
    def make_source(self) -> DraftSource:
        return PromptLookup(IndexMemory())

    def test_a_text_that_repeats_takes_few_steps(self) -> None:
        part = random_text(1, 120)
        num_steps, num_proposed = self.decode(np.concatenate([part, part]), 120, 15)
        # Three tokens until the repetition shows, then 16 tokens a step.
        assert num_steps <= NGRAM + 1 + 120 // 16
        assert num_proposed <= 130

    def test_a_loop_goes_on_beyond_what_was_seen(self) -> None:
        proposal = PromptLookup(IndexMemory()).propose(as_tokens(PERIOD + PERIOD[:3]), 14)
        assert proposal == Proposal((PERIOD * 3)[3:17], "lookup-short")

    def test_a_long_prompt_is_caught_up_with_over_several_steps(self) -> None:
        source, text = PromptLookup(IndexMemory()), np.concatenate([random_text(6, 2500), random_text(6, 50)])
        proposals = [source.propose(text[: 2540 + i], 2) for i in range(4)]
        assert [p.token_ids if p else None for p in proposals] == [
            None,
            None,
            tuple(text[42:44].tolist()),
            tuple(text[43:45].tolist()),
        ]

    def test_unrelated_text_gives_no_drafts(self) -> None:
        assert self.decode(random_text(2, 500), 400, 8) == (100, 0)


class TestTreeContinuation(DraftSourceContract):
    TEXT = random_text(3, 200)

    def make_source(self) -> DraftSource:
        return TreeContinuation(DEFAULT_NAMESPACE, tree_of(DEFAULT_NAMESPACE, self.TEXT).continuation)

    def test_an_answer_seen_before_is_drafted_from_the_first_token(self) -> None:
        num_steps, num_proposed = self.decode(self.TEXT, 40, 15)
        assert num_steps == 160 // 16
        assert num_proposed == 150

    def test_after_a_different_token_nothing_is_drafted(self) -> None:
        text = self.TEXT.copy()
        text[60] = 1001
        num_steps, num_proposed = self.decode(text, 40, 15)
        assert num_steps == 2 + 139
        assert num_proposed == 30

    def test_another_namespace_sees_nothing(self) -> None:
        source = TreeContinuation(OTHER, tree_of(DEFAULT_NAMESPACE, self.TEXT).continuation)
        assert source.propose(self.TEXT[:40], 8) is None

    def test_the_walk_is_repeated_ever_more_rarely(self) -> None:
        calls: list[int] = []

        def nothing(namespace: Namespace, tokens: TokenArray, max_tokens: int) -> TokenArray:
            calls.append(len(tokens))
            return as_tokens([])

        source = TreeContinuation(DEFAULT_NAMESPACE, nothing)
        for length in range(10, 1000):
            source.propose(self.TEXT[:length] if length < 200 else np.zeros(length, dtype=np.int32), 8)
        assert calls[:5] == [10, 11, 13, 17, 25]
        assert len(calls) < 16


class TestBranchLookup(DraftSourceContract):
    TEXT = random_text(4, 200)

    def make_source(self) -> DraftSource:
        corpus = SuffixCorpus()
        corpus.add(DEFAULT_NAMESPACE, self.TEXT)
        return BranchLookup(DEFAULT_NAMESPACE, corpus)

    def test_an_answer_to_another_prompt_is_found_by_its_words(self) -> None:
        num_steps, _ = self.decode(np.concatenate([random_text(5, 50), self.TEXT[80:]]), 50, 15)
        assert num_steps <= NGRAM + 1 + 120 // 16

    def test_tenants_never_see_each_others_tokens(self) -> None:
        corpus = SuffixCorpus()
        corpus.add(OTHER, self.TEXT)
        assert BranchLookup(DEFAULT_NAMESPACE, corpus).propose(self.TEXT[:50], 8) is None
        assert BranchLookup(OTHER, corpus).propose(self.TEXT[:50], 8) == Proposal(
            tuple(self.TEXT[50:58].tolist()), "branch-long"
        )


class TestLookahead(DraftSourceContract):
    def make_source(self) -> DraftSource:
        return Lookahead(IndexMemory())

    def test_a_repetitive_text_fills_the_pool(self) -> None:
        text = as_tokens(PERIOD * 20)
        num_steps, _ = self.decode(text, 8, 8)
        assert num_steps < 80

    def test_diagonals_of_the_iterations_become_n_grams(self) -> None:
        """Level 3: what went in at p, came out behind it, and came out behind that one step later."""
        source = Lookahead(IndexMemory(), level=3, window=3)
        source.observe(as_tokens([1]), (20, 30, 40), (10, 21, 31, 41))
        source.observe(as_tokens([1, 10]), (21, 31, 60), (11, 22, 32, 61))
        # 20 -> 21 came out in the first iteration and went into the second, out of which came 22.
        assert source.propose(as_tokens([90, 20]), 2) == Proposal((21, 22), "pool")
        assert source.propose(as_tokens([90, 20, 30]), 2) == Proposal((31, 32), "pool")
        # 40 -> 41 did not go in again: 60 did.
        proposal = source.propose(as_tokens([90, 20, 30, 40]), 2)
        assert proposal is not None
        assert proposal.evidence == "window"

    def test_the_pool_keeps_the_latest_guesses_of_a_token(self) -> None:
        source = Lookahead(IndexMemory(), level=2, window=1, guess_set_size=2)
        proposal = source.propose(as_tokens([1, 5, 1, 6, 1, 7, 1, 7, 1]), 1)
        assert proposal == Proposal((7,), "pool")
        # 5 was the oldest of three guesses after 1: had it been kept, it would now be the latest of two.
        assert source.propose(as_tokens([1, 5, 1, 6, 1, 7, 1, 7, 1, 5, 1]), 1) == Proposal((7,), "pool")


def longest_match(text: Sequence[int], suffix: Sequence[int], *, is_own: bool) -> int:
    """Return the length of the longest tail of `suffix` that occurs in `text`, by trying all."""
    best = 0
    for end in range(len(text) + (0 if is_own else 1)):
        length = 0
        while length < min(end, len(suffix), 32) and text[end - 1 - length] == suffix[-1 - length]:
            length += 1
        best = max(best, length)
    return best if best >= NGRAM else 0


@given(text=st.lists(st.integers(0, 3), max_size=60), cuts=st.lists(st.integers(0, 60), max_size=4))
def test_suffix_index_finds_what_a_search_finds(text: list[int], cuts: list[int]) -> None:
    """Added in any portions. Of many occurrences only the latest few are looked at."""
    index, start = SuffixIndex(), 0
    for cut in sorted({min(cut, len(text)) for cut in cuts} | {len(text)}):
        index.extend(text[start:cut])
        start = cut
    found = index.find(text[-32:], is_own=True)
    expected = longest_match(text, text[-32:], is_own=True)
    assert (found is None) == (expected == 0)
    if found is not None:
        assert NGRAM <= found.length <= expected
        assert text[found.position - found.length : found.position] == text[len(text) - found.length :]
        num_occurrences = sum(text[i : i + NGRAM] == text[-NGRAM:] for i in range(len(text) - NGRAM))
        if num_occurrences <= 7:
            assert found.length == expected


@pytest.mark.parametrize("max_tokens", [50, 100])
def test_corpus_is_bounded_and_forgets_the_oldest(max_tokens: int) -> None:
    corpus = SuffixCorpus(max_tokens=max_tokens, max_namespaces=2)
    texts = [random_text(seed, 40) for seed in range(6)]
    for text in texts:
        corpus.add(DEFAULT_NAMESPACE, text)
    assert corpus.propose(DEFAULT_NAMESPACE, texts[-1][:10].tolist(), 4)[1] == 10
    assert corpus.propose(DEFAULT_NAMESPACE, texts[0][:10].tolist(), 4) == ((), 0)
    for name in ("a", "b"):
        corpus.add(Namespace(name), texts[0])
    assert corpus.propose(DEFAULT_NAMESPACE, texts[-1][:10].tolist(), 4) == ((), 0)


def test_no_draft_crosses_from_one_sequence_into_the_next() -> None:
    corpus = SuffixCorpus()
    corpus.add(DEFAULT_NAMESPACE, as_tokens([1, 2, 3, 4]))
    corpus.add(DEFAULT_NAMESPACE, as_tokens([5, 6, 7, 8]))
    assert corpus.propose(DEFAULT_NAMESPACE, [2, 3], 4) == ((), 0)
    assert corpus.propose(DEFAULT_NAMESPACE, [1, 2, 3], 4) == ((4,), 3)
    assert corpus.propose(DEFAULT_NAMESPACE, [3, 4, 5], 4) == ((), 0)


@pytest.mark.parametrize(("drawn", "expected"), [([4, 5, 6, 9], 3), ([4, 5, 7, 9], 2), ([1, 5, 6, 9], 0)])
def test_a_draft_holds_up_to_the_first_difference(drawn: list[int], expected: int) -> None:
    assert num_accepted([4, 5, 6], drawn) == expected


@pytest.mark.parametrize("num_tokens", [2800, 11_000, 44_000])
def test_a_suffix_index_takes_no_more_than_is_counted(num_tokens: int) -> None:
    """Sizes just behind those at which a dict grows, where a token costs most."""
    text = random_text(3, num_tokens, 100_000).tolist()
    assert allocated(lambda: SuffixIndex().extend(text)) <= num_tokens * SUFFIX_TOKEN_BYTES


@pytest.mark.parametrize("level", [2, 16])
def test_a_pool_of_ngrams_takes_no_more_than_is_counted(level: int) -> None:
    text = random_text(3, 5500, 100_000)
    assert allocated(lambda: Lookahead(IndexMemory(), level=level).propose(text, 8)) <= 5500 * NGRAM_BYTES


def test_the_corpus_of_all_namespaces_is_bounded() -> None:
    corpus = SuffixCorpus(max_tokens=100, max_total_tokens=150)
    text = random_text(4, 60)
    for name in ("a", "b", "c"):
        corpus.add(Namespace(name), text)
    held = [corpus.propose(Namespace(name), text[:10].tolist(), 4)[1] for name in ("a", "b", "c")]
    assert held == [0, 10, 10]


def test_without_room_a_lookup_frees_its_index_for_others() -> None:
    memory = IndexMemory(2000 * SUFFIX_TOKEN_BYTES)
    part = random_text(5, 700)
    text = np.concatenate([part, part])
    first, second = PromptLookup(memory), PromptLookup(memory)
    assert first.propose(text[:1000], 4) is not None
    assert [second.propose(text[:1000], 4) is not None, second.propose(text[:1001], 4)] == [True, None]
    assert first.propose(text, 4) is not None
    first.close()
    assert second.propose(text, 4) is None
    assert memory.take(2000 * SUFFIX_TOKEN_BYTES)


def test_without_room_lookahead_goes_on_with_the_pool_it_has() -> None:
    memory = IndexMemory(10 * NGRAM_BYTES)
    source = Lookahead(memory, level=2, window=1)
    assert source.propose(as_tokens([*range(40), 0]), 4) is not None
    assert not memory.take(NGRAM_BYTES)
    source.close()
    assert memory.take(10 * NGRAM_BYTES)


def allocated(work: Callable[[], object]) -> int:
    """Return the most bytes that `work` had allocated at a time."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
