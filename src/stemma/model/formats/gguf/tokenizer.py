"""The tokenizer and the chat template of a GGUF file, built of its metadata.

transformers knows how to split text for most vocabularies (`tokenizer.ggml.pre`) and takes GPT-2's way for
all others, which gives other tokens than the model learned. Here a name that is unknown is refused. Nor are
its tokenizers taken, which bring tokens of their own: what is built has the file's tokens, each under its id.
"""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from stemma.errors import ModelError
from stemma.foreign_code import ForeignCode
from stemma.model.files.gguf_header import GGUFHeader
from stemma.model.files.gguf_keys import shown
from stemma.model.formats.gguf.vocabulary import (
    CONTROL,
    DIGITS_APART,
    OTHER_NAMES,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    read_vocabulary,
    token_id,
)

_NORMALIZED = frozenset({"qwen2"})
"""Vocabularies whose own tokenizer composes characters (NFC) first."""
_AS_LLAMA3 = frozenset(
    (
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        *("jina-v5-nano", "tekken"),
    )
)
"""Vocabularies as Llama 3's: a prompt begins with BOS, and a word that is a token needs no merges."""
_WHOLE_WORDS = _AS_LLAMA3 | {"glm4"}
_SPACE = "\u2581"
"""Stands for a space in SentencePiece's tokens."""
_PHI3 = "phi3"
_NOT_STRIPPED = frozenset({"<unk>", "<s>", "<|endoftext|>"})
"""Special tokens of Phi-3 behind which white space stays; behind the others it is dropped."""


def read_tokenizer(header: GGUFHeader) -> PreTrainedTokenizerFast:
    """Return the tokenizer with its special tokens and chat template.

    Raises UnsupportedModel for a kind that isn't read, ModelError if the metadata contradict each other.
    """
    vocabulary = read_vocabulary(header)
    with ForeignCode(f"can't build the tokenizer of {header.path}"):
        backend = _byte_level(vocabulary) if vocabulary.is_byte_level else _sentencepiece(header, vocabulary)
        added = _added_tokens(vocabulary)
        backend.add_tokens(added)
        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=backend,
            clean_up_tokenization_spaces=False,
            **_special_tokens(header, vocabulary.tokens),
            **_added_ends(header, len(vocabulary.tokens)),
        )
    _check(tokenizer.backend_tokenizer, vocabulary, [token.content for token in added])
    template = header.metadata.get("tokenizer.chat_template")
    tokenizer.chat_template = template if isinstance(template, str) else None
    return tokenizer


def _byte_level(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """Return a tokenizer whose tokens are written in characters that stand for bytes."""
    ids, split = _ids(vocabulary), vocabulary.split
    backend = tokenizers.Tokenizer(models.BPE(ids, vocabulary.merges, ignore_merges=split in _WHOLE_WORDS))
    if split in _NORMALIZED:
        backend.normalizer = normalizers.NFC()
    expression = GGUF_PRE_TOKENIZER_SPLITS.get(OTHER_NAMES.get(split, split))
    words: list[Any] = (
        [] if expression is None else [pre_tokenizers.Split(Regex(expression), behavior="isolated")]
    )
    if split in DIGITS_APART:
        words = [pre_tokenizers.Digits(individual_digits=True)]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=expression is None)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*words, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(header: GGUFHeader, vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """Return a tokenizer with `_SPACE` for spaces, which spells unknown characters in bytes."""
    unknown = token_id(header, "unknown", len(vocabulary.tokens))
    backend = tokenizers.Tokenizer(
        models.BPE(
            _ids(vocabulary),
            vocabulary.merges,
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    mark = normalizers.Replace(" ", _SPACE)
    # Unlike the pre-tokenizer Metaspace this adds a space to what begins with one, and behind special tokens.
    prepend = normalizers.Sequence([normalizers.Prepend(_SPACE), mark])
    backend.normalizer = prepend if vocabulary.adds_space else mark
    strip = [decoders.Strip(" ", 1, 0)] if vocabulary.adds_space else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _ids(vocabulary: Vocabulary) -> dict[str, int]:
    return {text: index for index, text in enumerate(vocabulary.tokens)}


def _added_tokens(vocabulary: Vocabulary) -> list[AddedToken]:
    """Return the tokens that are found in a text before it is split into words."""
    strips = vocabulary.architecture == _PHI3 and not vocabulary.is_byte_level
    return [
        AddedToken(
            text,
            normalized=False,
            special=kind != USER_DEFINED,
            rstrip=strips and text not in _NOT_STRIPPED,
        )
        for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if text and kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]


def _check(backend: tokenizers.Tokenizer, vocabulary: Vocabulary, added: list[str]) -> None:
    """Raise ModelError unless each token has the file's id, and `added` are found in texts."""
    built, expected = backend.get_vocab(), _ids(vocabulary)
    if built != expected or len(expected) != len(vocabulary.tokens):
        raise ModelError(
            f"{vocabulary.path}: the tokenizer built has {len(built)} tokens, or other ids than the file's "
            f"{len(vocabulary.tokens)}; give the directory of the original checkpoint"
        )
    for text, encoding in zip(added, backend.encode_batch_fast(added, add_special_tokens=False), strict=True):
        if encoding.ids != [expected[text]]:
            raise ModelError(
                f"{vocabulary.path}: its token {shown(text)} is read as {len(encoding.ids)} others; give the "
                "directory of the original checkpoint"
            )


def _special_tokens(header: GGUFHeader, tokens: list[str]) -> dict[str, AddedToken]:
    """Return special tokens by transformers' names."""
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {name: token_id(header, key, len(tokens)) for name, key in keys.items()}
    return {
        name: AddedToken(tokens[index], normalized=False, special=True)
        for name, index in found.items()
        if index is not None
    }


def _added_ends(header: GGUFHeader, num_tokens: int) -> dict[str, bool]:
    """Return whether `encode` adds the first and the last token."""
    # llama.cpp begins a prompt of these with BOS unless the file says otherwise.
    by_default = header.metadata.get("tokenizer.ggml.model") == "llama"
    by_default = by_default or header.metadata.get("tokenizer.ggml.pre") in _AS_LLAMA3
    begins = header.metadata.get("tokenizer.ggml.add_bos_token", by_default)
    begins = bool(begins) and token_id(header, "bos", num_tokens) is not None
    ends = bool(header.metadata.get("tokenizer.ggml.add_eos_token"))
    ends = ends and token_id(header, "eos", num_tokens) is not None
    return {"add_bos_token": begins, "add_eos_token": ends} if begins or ends else {}
