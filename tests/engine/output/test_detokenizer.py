"""Deltas joined are the decoded whole, no delta splits a character, and a token costs a bounded decode."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.tokenizers_for_tests import END, byte_level, sentencepiece_like

from stemma.engine.output.detokenizer import ByteDetokenizer, WindowDetokenizer, make_detokenizer
from stemma.model.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def bytes_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level(Path(tmp_path_factory.mktemp("bytes")))


@pytest.fixture(scope="module")
def pieces_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return sentencepiece_like(Path(tmp_path_factory.mktemp("pieces")))


def stream(
    tokenizer: Tokenizer, token_ids: Sequence[int], *, skip: bool = True, by_window: bool = False
) -> list[str]:
    detokenizer = make_detokenizer(tokenizer, skip_special_tokens=skip)
    if by_window:
        detokenizer = WindowDetokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.append(token) for token in token_ids), detokenizer.flush()]


@settings(max_examples=200, deadline=None)
@given(tokens=st.lists(st.integers(0, 329), max_size=60), skip=st.booleans())
def test_any_tokens_of_a_byte_level_vocabulary(
    bytes_tokenizer: Tokenizer, tokens: list[int], skip: bool
) -> None:
    assert bytes_tokenizer.vocab_size <= 330
    assert isinstance(make_detokenizer(bytes_tokenizer, skip_special_tokens=skip), ByteDetokenizer)
    for by_window in (False, True):
        deltas = stream(bytes_tokenizer, tokens, skip=skip, by_window=by_window)
        assert "".join(deltas) == bytes_tokenizer.decode(tokens, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(tokens=st.lists(st.integers(0, 329), max_size=60), cut=st.integers(0, 60), skip=st.booleans())
def test_several_tokens_at_once_have_the_text_of_one_by_one(
    bytes_tokenizer: Tokenizer, tokens: list[int], cut: int, skip: bool
) -> None:
    makers = (make_detokenizer, WindowDetokenizer)
    for one, other in (
        (make(bytes_tokenizer, skip_special_tokens=skip) for _ in range(2)) for make in makers
    ):
        for part in (tokens[:cut], tokens[cut:]):
            assert one.extend(part) == "".join([other.append(token) for token in part])
        assert one.flush() == other.flush()


@settings(max_examples=200, deadline=None)
@given(tokens=st.lists(st.sampled_from([*range(160, 256), 5, 40]), max_size=80))
def test_long_runs_of_invalid_bytes(bytes_tokenizer: Tokenizer, tokens: list[int]) -> None:
    for by_window in (False, True):
        assert "".join(stream(bytes_tokenizer, tokens, by_window=by_window)) == bytes_tokenizer.decode(tokens)


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet=st.sampled_from("aé🙂👩‍🚀中文 \n\ufffd.𝄞e\u0301"), max_size=60))
def test_emoji_and_cjk_come_whole(bytes_tokenizer: Tokenizer, text: str) -> None:
    tokens = [int(token) for token in bytes_tokenizer.encode(text)]
    deltas = stream(bytes_tokenizer, tokens)
    assert "".join(deltas) == text
    assert all("\ufffd" not in delta for delta in deltas) or "\ufffd" in text


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet=st.sampled_from("the quick fox.,🙂中abc "), max_size=60))
def test_spaces_and_byte_fallback_of_sentencepiece(pieces_tokenizer: Tokenizer, text: str) -> None:
    tokens = [int(token) for token in pieces_tokenizer.encode(text)]
    assert "".join(stream(pieces_tokenizer, tokens)) == pieces_tokenizer.decode(tokens)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet=st.sampled_from("the quick fox.,🙂中abc "), max_size=60),
    cut=st.integers(0, 60),
    skip=st.booleans(),
)
def test_an_answer_goes_on_with_its_prompt(
    pieces_tokenizer: Tokenizer, text: str, cut: int, skip: bool
) -> None:
    """Wherever a text is cut between two characters: its head and the answer are the whole."""
    tokens = pieces_tokenizer.encode(text)
    prompt, answer = tokens[:cut], tokens[cut:]
    head = pieces_tokenizer.decode(prompt.tolist())
    if "\ufffd" in head or not head.strip():
        return
    detokenizer = make_detokenizer(pieces_tokenizer, skip_special_tokens=skip, prompt=prompt)
    assert head + detokenizer.extend(answer.tolist()) + detokenizer.flush() == text


@settings(max_examples=200, deadline=None)
@given(prompt=st.lists(st.integers(0, 269), max_size=20), answer=st.lists(st.integers(0, 269), max_size=40))
def test_any_pieces_behind_any_prompt(
    pieces_tokenizer: Tokenizer, prompt: list[int], answer: list[int]
) -> None:
    """A prompt that ends within a character changes nothing but the first space."""
    detokenizer = make_detokenizer(pieces_tokenizer, skip_special_tokens=True, prompt=prompt)
    found = detokenizer.extend(answer) + detokenizer.flush()
    assert found.removeprefix(" ") == "".join(stream(pieces_tokenizer, answer)).removeprefix(" ")


def test_a_first_space_is_kept_behind_text_alone(pieces_tokenizer: Tokenizer) -> None:
    the, quick, end = (
        pieces_tokenizer.transformers_tokenizer.convert_tokens_to_ids(t) for t in ("▁the", "▁quick", END)
    )
    byte = 2 + 0xF0
    for prompt, expected in (
        ([the], " quick"),
        ([the] * 3000, " quick"),
        ([the, byte], " quick"),
        ([], "quick"),
        ([end], "quick"),
        ([the, end], "quick"),
        ([end, the], " quick"),
    ):
        for skip in (True, False):
            detokenizer = make_detokenizer(pieces_tokenizer, skip_special_tokens=skip, prompt=prompt)
            assert detokenizer.append(quick) == expected


@settings(max_examples=100, deadline=None)
@given(tokens=st.lists(st.sampled_from([1, *range(258, 270)]), max_size=60), skip=st.booleans())
def test_any_pieces_with_special_tokens_between(
    pieces_tokenizer: Tokenizer, tokens: list[int], skip: bool
) -> None:
    deltas = stream(pieces_tokenizer, tokens, skip=skip)
    assert "".join(deltas) == pieces_tokenizer.decode(tokens, skip_special_tokens=skip)


def test_added_tokens_of_any_characters(tmp_path: Path) -> None:
    """Some of their characters stand for bytes, others don't."""
    tokenizer = byte_level(tmp_path)
    tokenizer.transformers_tokenizer.add_tokens(["<|im_start|>", "é", "中é", "Ġx", "a b"])
    tokens = list(range(tokenizer.vocab_size))
    assert "".join(stream(tokenizer, tokens)) == tokenizer.decode(tokens)
    for token in tokens:
        assert "".join(stream(tokenizer, [token], skip=False)) == tokenizer.decode(
            [token], skip_special_tokens=False
        )


def test_a_character_of_four_tokens_is_one_delta(bytes_tokenizer: Tokenizer) -> None:
    tokens = [int(token) for token in bytes_tokenizer.encode("a𝄞b")]
    assert len(tokens) == 6
    assert stream(bytes_tokenizer, tokens) == ["a", "", "", "", "𝄞", "b", ""]


def test_an_unfinished_character_comes_with_the_flush(bytes_tokenizer: Tokenizer) -> None:
    tokens = [int(token) for token in bytes_tokenizer.encode("a𝄞")][:-1]
    assert stream(bytes_tokenizer, tokens) == ["a", "", "", "", "\ufffd"]


def test_special_tokens_are_shown_only_if_wanted(bytes_tokenizer: Tokenizer) -> None:
    tokens = [int(token) for token in bytes_tokenizer.encode("hi" + END)]
    assert "".join(stream(bytes_tokenizer, tokens)) == "hi"
    assert "".join(stream(bytes_tokenizer, tokens, skip=False)) == "hi" + END


@pytest.mark.parametrize("kind", ["text", "invalid"])
def test_cost_of_a_token_does_not_grow(bytes_tokenizer: Tokenizer, kind: str) -> None:
    """Tokens decoded per token appended stay bounded, even on bytes that never become a character."""

    class Counting:
        special_token_ids = bytes_tokenizer.special_token_ids
        num_decoded = 0

        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            self.num_decoded += len(token_ids)
            return bytes_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    [lone] = set(map(int, bytes_tokenizer.encode("𝄞")[-1:]))
    tokens = (
        list(map(int, bytes_tokenizer.encode("The quick 𝄞. "))) * 200 if kind == "text" else [lone] * 2000
    )
    decoder = Counting()
    detokenizer = WindowDetokenizer(decoder)
    for token in tokens:
        detokenizer.append(token)
    assert decoder.num_decoded / len(tokens) < 20
