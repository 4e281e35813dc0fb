"""What is kept of answers: bounded, found by what was rendered before them, the same for equal texts."""

from __future__ import annotations

import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.server.history.written import SCOPE, written

from stemma.engine.api import CacheReport, GenerationRequest
from stemma.model.text.tokenizer import Tokenizer
from stemma.prefix.explain import MissReason, Parting
from stemma.server.history.answers import MAX_AT_A_PLACE, WrittenAnswers, scope_of
from stemma.server.history.following import HistoryReport
from stemma.server.history.joining import HistoryJoiner
from stemma.types import Tier, TokenArray

BEFORE = "<|im_start|>user\nHow deep?<|im_end|>\n<|im_start|>assistant\n"
AFTER = "<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"


def joiner_of(tokenizer: Tokenizer, max_bytes: int = 1 << 20) -> HistoryJoiner:
    return HistoryJoiner(WrittenAnswers(tokenizer, max_bytes), tokenizer)


def prompt(joiner: HistoryJoiner, text: str, scope: bytes = SCOPE) -> TokenArray:
    def encode(piece: str) -> TokenArray:
        return joiner.tokenizer.encode(piece, add_special_tokens=False)

    return joiner.prompt(scope, text, encode)[0]


TEXTS = st.text(max_size=30)


@given(TEXTS, TEXTS, TEXTS, TEXTS)
def test_ids_read_as_the_text_does(
    tokenizer: Tokenizer, before: str, answer: str, said: str, after: str
) -> None:
    """Whatever was written, and whatever comes back."""
    joiner = joiner_of(tokenizer)
    if answer:
        joiner.written.keep(written(tokenizer, before, answer))
    for text in (before, before + answer, before + answer + after, before + said + after):
        found = tokenizer.decode(prompt(joiner, text).tolist(), skip_special_tokens=False)
        assert found == text


def test_an_answer_is_found_behind_its_own_history_alone(tokenizer: Tokenizer) -> None:
    joiner = joiner_of(tokenizer)
    answer = written(tokenizer, BEFORE, "It is deep.")
    joiner.written.keep(answer)
    begin = len(tokenizer.encode(BEFORE, add_special_tokens=False))
    found = prompt(joiner, BEFORE + "It is deep." + AFTER)
    assert found[begin : begin + len(answer.token_ids)].tolist() == answer.token_ids.tolist()
    for text, scope in (
        (BEFORE.replace("deep", "wide") + "It is deep." + AFTER, SCOPE),
        (BEFORE + "It is deep." + AFTER, scope_of("", "", "an adapter")),
        (BEFORE + "It is deep." + AFTER, scope_of("ann", "", "")),
    ):
        assert prompt(joiner, text, scope).tolist() == tokenizer.encode(text).tolist()


def test_of_equal_texts_the_first_written_stays(tokenizer: Tokenizer) -> None:
    joiner = joiner_of(tokenizer)
    joiner.written.keep(written(tokenizer, BEFORE, "It is deep."))
    before = prompt(joiner, BEFORE + "It is deep." + AFTER)
    whole = written(tokenizer, BEFORE, "It is deep.")
    other = type(whole)(whole.place, whole.context, tokenizer.encode("It is deep.", add_special_tokens=False))
    joiner.written.keep(other)
    assert len(joiner.written) == 2
    assert prompt(joiner, BEFORE + "It is deep." + AFTER).tolist() == before.tolist()


def test_the_longest_that_agrees_counts(tokenizer: Tokenizer) -> None:
    joiner = joiner_of(tokenizer)
    for text in ("It", "It is deep", "It is shallow"):
        joiner.written.keep(written(tokenizer, BEFORE, text))
    [match] = joiner.written.find(SCOPE, BEFORE + "It is deep." + AFTER)
    assert (match.is_whole, len(match.token_ids)) == (True, len("It is deep"))


def test_memory_is_bounded_and_what_is_used_stays(tokenizer: Tokenizer) -> None:
    kept = WrittenAnswers(tokenizer, 20_000)
    kept.keep(written(tokenizer, BEFORE, "the one in use"))
    for number in range(200):
        kept.keep(written(tokenizer, f"{number} {BEFORE}", f"answer {number}"))
        assert kept.find(SCOPE, f"{BEFORE}the one in use{AFTER}")
        assert kept.num_bytes <= 20_000
    assert kept.num_evicted > 150
    assert len(kept) == 201 - kept.num_evicted
    assert not kept.find(SCOPE, f"0 {BEFORE}answer 0{AFTER}")
    kept.keep(written(tokenizer, BEFORE, "too long " * 2000))  # alone more than half: not kept
    assert kept.num_bytes <= 20_000


def test_one_history_keeps_a_few_answers(tokenizer: Tokenizer) -> None:
    kept = WrittenAnswers(tokenizer, 1 << 20)
    for number in range(MAX_AT_A_PLACE + 9):
        kept.keep(written(tokenizer, BEFORE, f"{number}."))
    assert len(kept) == MAX_AT_A_PLACE


def test_threads_share_it(tokenizer: Tokenizer) -> None:
    kept = WrittenAnswers(tokenizer, 30_000)

    def work(name: int) -> None:
        for number in range(60):
            kept.keep(written(tokenizer, f"{number % 7} {BEFORE}", f"{name} {number}"))
            kept.find(SCOPE, f"{number % 7} {BEFORE}{name} {number}{AFTER}")

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0 < kept.num_bytes <= 30_000
    assert len(kept.answers()) == len(kept)


def told(joiner: HistoryJoiner, text: str, num_common: int, cached: tuple[int, ...]) -> str | None:
    """The sentence of a prompt that parts from what is cached behind `num_common` tokens."""

    def encode(piece: str) -> TokenArray:
        return joiner.tokenizer.encode(piece, add_special_tokens=False)

    tokens, history = joiner.prompt(SCOPE, text, encode)
    request = GenerationRequest("one", tokens)
    report = CacheReport(
        len(tokens),
        {Tier.DEVICE: num_common},
        MissReason.DIVERGED,
        "cached sequences go on differently",
        parting=Parting(num_common, cached),
    )
    return HistoryReport(joiner.tokenizer, request, history, lambda _: 0).of(report).miss_detail


def test_the_sentence_counts_thinking_that_was_left_out(tokenizer: Tokenizer) -> None:
    joiner = joiner_of(tokenizer)
    answer = written(tokenizer, BEFORE, "<think>\nHm, deep.\n</think>\n\nIt is deep.")
    joiner.written.keep(answer)
    begin = len(tokenizer.encode(BEFORE))
    thought = len("<think>\nHm, deep.\n</think>")
    sentence = told(joiner, f"{BEFORE}It is deep.{AFTER}", begin, tuple(answer.token_ids[:16].tolist()))
    assert sentence is not None
    assert sentence.endswith(f"the template left out {thought} tokens of thinking at position {begin}.")


def test_the_sentence_says_where_an_answer_was_changed(tokenizer: Tokenizer) -> None:
    joiner = joiner_of(tokenizer)
    answer = written(tokenizer, BEFORE, "It is deep, very deep.")
    joiner.written.keep(answer)
    begin = len(tokenizer.encode(BEFORE))
    at = begin + len("It is deep")
    sentence = told(joiner, f"{BEFORE}It is deep.{AFTER}", at, tuple(answer.token_ids[10:].tolist()))
    assert sentence is not None
    assert sentence.endswith(f"comes back with other text, re-tokenized at position {at}.")


def test_the_sentence_says_where_the_same_text_was_tokenized_again(tokenizer: Tokenizer) -> None:
    joiner = joiner_of(tokenizer)  # the record is lost
    cached = written(tokenizer, BEFORE, "water from the mountains")
    begin = len(tokenizer.encode(BEFORE))
    text = f"{BEFORE}water from the mountains{AFTER}"
    sentence = told(joiner, text, begin, tuple(cached.token_ids[:16].tolist()))
    assert sentence is not None
    assert sentence.endswith(f"it was re-tokenized at position {begin}.")
    other = written(tokenizer, BEFORE, "fire from the mountains")
    unknown = told(joiner, text, begin, tuple(other.token_ids[:16].tolist()))
    assert unknown == "cached sequences go on differently"


def test_half_a_character_is_no_text(tokenizer: Tokenizer) -> None:
    """An answer that its limit cut within a character: its whole characters agree."""
    joiner = joiner_of(tokenizer)
    ids = tokenizer.encode("deep 日", add_special_tokens=False)
    whole = written(tokenizer, BEFORE, "x")
    joiner.written.keep(type(whole)(whole.place, whole.context, np.ascontiguousarray(ids[:-1])))
    for text in (f"{BEFORE}deep 日{AFTER}", f"{BEFORE}deep \ufffd{AFTER}", f"{BEFORE}deep {AFTER}"):
        found = prompt(joiner, text)
        assert tokenizer.decode(found.tolist(), skip_special_tokens=False) == text
