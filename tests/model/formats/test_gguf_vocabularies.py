"""Each token of a GGUF vocabulary has the file's id, and texts the ids that llama.cpp gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stemma.errors import ModelError
from stemma.model.files.gguf_header import read_header
from stemma.model.formats.gguf.vocabulary import end_token_ids
from stemma.model.text.tokenizer import Tokenizer
from tests.model.formats.vocabularies import (
    CONTROL,
    NORMAL,
    TEXTS,
    USER_DEFINED,
    byte_level,
    llama_cpp,
    sentencepiece,
    write,
)

SPLITS = ("llama-bpe", "deepseek-r1-qwen", "qwen2", "tekken", "smollm", "gpt-2", "gpt-4o", "glm4", "qwen35")
WITHOUT_ENDS = {"bos_token_id": None, "eos_token_id": None, "unknown_token_id": None}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    **{split: (byte_level(split), "llama") for split in SPLITS},
    "no BOS": (byte_level("llama-bpe", add_bos_token=False), "llama"),
    "SentencePiece": (sentencepiece(), "llama"),
    "a space asked for": (sentencepiece(add_space_prefix=True), "llama"),
    "no space": (sentencepiece(add_space_prefix=False), "llama"),
    "no ids named": (sentencepiece(**WITHOUT_ENDS), "llama"),
    "Gemma": (sentencepiece(add_space_prefix=False), "gemma"),
    "Phi-3": (sentencepiece() | {"general.name": "phi-3"}, "phi3"),
}
COMPOSED = "e\u0301"
"""Qwen 2's own tokenizer composes it, llama.cpp doesn't."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CASES)
def test_ids_and_ends_are_those_of_llama_cpp(case: str, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="llama.cpp is the oracle")
    path = write(tmp_path, *CASES[case])
    texts = [text for text in TEXTS if case != "qwen2" or COMPOSED not in text]
    expected, ends = llama_cpp(path, texts)
    tokenizer = Tokenizer(path)
    found = {text: tokenizer.encode(text).tolist() for text in texts}
    assert found == dict(zip(texts, expected, strict=True))
    assert set(end_token_ids(read_header(path))) == ends


@pytest.mark.parametrize("case", CASES)
def test_tokens_keep_their_ids_and_texts_come_back(case: str, tmp_path: Path) -> None:
    metadata, family = CASES[case]
    path, tokens = write(tmp_path, metadata, family), metadata["tokenizer.ggml.tokens"]
    tokenizer = Tokenizer(path)
    assert [tokenizer.token_text(index) for index in range(tokenizer.vocab_size)] == tokens
    for text, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True):
        if kind in (CONTROL, USER_DEFINED):
            assert tokenizer.encode(text, add_special_tokens=False).tolist() == [tokens.index(text)]
    for text in ("The user's\n\n  hello 🙂", "  two before", "def f(x):\n\treturn 1", "Grüße, 世界", " x"):
        assert tokenizer.decode(tokenizer.encode(text).tolist()) == text


def test_chats_of_foreign_names_have_ids_of_the_file(tmp_path: Path) -> None:
    """DeepSeek-R1-Distill's names are outside the characters that stand for bytes."""
    metadata = byte_level("deepseek-r1-qwen") | {
        "tokenizer.chat_template": "<｜User｜>{{ messages[0].content }}<｜Assistant｜>"
    }
    tokens = metadata["tokenizer.ggml.tokens"]
    tokenizer = Tokenizer(write(tmp_path, metadata))
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]).tolist()
    assert [tokens[ids[0]], tokens[ids[-1]]] == ["<｜User｜>", "<｜Assistant｜>"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<｜User｜>hi<｜Assistant｜>"
    assert tokenizer.vocab_size == len(tokens)


def test_no_token_comes_from_elsewhere(tmp_path: Path) -> None:
    """Llama 3 has no such token, GPT-2's class in transformers brings it."""
    metadata = byte_level("llama-bpe")
    tokenizer = Tokenizer(write(tmp_path, metadata))
    ids = tokenizer.encode("<|endoftext|>", add_special_tokens=False).tolist()
    assert len(ids) > 1
    assert max(ids) < len(metadata["tokenizer.ggml.tokens"])
    assert tokenizer.decode(ids) == "<|endoftext|>"


def test_a_vocabulary_that_cant_be_built_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    """Gemma's runs of spaces are respelled, and this one exists already."""
    metadata = sentencepiece(add_space_prefix=False)
    assert "▁▁" in metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.tokens"].append("  ")
    metadata["tokenizer.ggml.token_type"].append(USER_DEFINED)
    metadata["tokenizer.ggml.scores"].append(-1000.0)
    with pytest.raises(ModelError, match="other ids than the file's"):
        Tokenizer(write(tmp_path, metadata, "gemma"))


@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED])
def test_ends_are_control_tokens_whatever_the_file_says(kind: int, tmp_path: Path) -> None:
    metadata = byte_level("qwen2")
    index = metadata["tokenizer.ggml.tokens"].index("<|im_end|>")
    metadata["tokenizer.ggml.token_type"][index] = kind
    path = write(tmp_path, metadata)
    tokenizer = Tokenizer(path)
    assert tokenizer.encode("a<|im_end|>").tolist()[-1] == index
    assert index in tokenizer.special_token_ids
    assert index in end_token_ids(read_header(path))


def test_a_text_that_only_looks_like_an_end_is_none(tmp_path: Path) -> None:
    """Gemma has HTML's `</s>`, as a token of texts."""
    metadata = sentencepiece(eos_token_id=1)
    metadata["tokenizer.ggml.token_type"][2] = USER_DEFINED
    assert 2 not in end_token_ids(read_header(write(tmp_path, metadata)))
