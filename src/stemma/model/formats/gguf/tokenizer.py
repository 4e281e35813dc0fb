"""The tokenizer and the chat template of a GGUF file, as transformers builds them from its metadata.

transformers knows how to split text for most vocabularies (`tokenizer.ggml.pre`) and takes GPT-2's way for
all others, which gives other tokens than the model learned. Here a name that is unknown is refused.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    GGUF_TOKENIZER_MAPPING,
    convert_gguf_tokenizer,
    gemma_tokenizer,
    select_tokenizer_builder,
)

from stemma.errors import ModelError, UnsupportedModel
from stemma.model.foreign_code import foreign_code
from stemma.model.formats.gguf.merges import merges_of
from stemma.model.gguf_header import GGUFHeader
from stemma.model.gguf_keys import shown

_DIGITS_APART = frozenset({"smollm", "starcoder", "refact", "command-r", "exaone"})
"""Vocabularies that split as GPT-2's does once every digit stands alone."""
_AS_GPT2 = frozenset({"gpt-2", "default", "jina-es", "jina-de", "mpt", "olmo", "phi-2", "jais"})
_NORMALIZED = frozenset({"qwen2"})
"""Vocabularies whose own tokenizer composes characters (NFC) first."""
_LLAMA3 = frozenset(
    {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"}
)
"""Vocabularies as Llama 3's: a prompt begins with BOS, and a word that is a token needs no merges."""
_OTHER_NAMES = {"glm4": "dbrx", "chatglm-bpe": "dbrx"}
"""Vocabularies that split as one that transformers knows by another name, in llama.cpp."""
_KINDS = ("gpt2", "llama")
"""Read values of `tokenizer.ggml.model`: byte-level BPE, SentencePiece."""
_ENDS = ("eos", "eot", "eom")
_END_TEXTS = (
    *("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end_of_text|>"),
    *("<|return|>", "<|call|>", "<|observation|>"),
)
"""Tokens that end an answer whatever the metadata say, as in llama.cpp."""
_END_OF_MESSAGE, _END_OF_ANSWER = "<|end|>", "<|return|>"
"""The first ends an answer too (Phi-3), unless the vocabulary has the second (GPT-OSS)."""


def read_tokenizer(header: GGUFHeader) -> PreTrainedTokenizerFast:
    """Return the tokenizer with its special tokens and chat template.

    Raises UnsupportedModel for a kind that isn't read, ModelError if the metadata contradict each other.
    """
    fields = _fields(header)
    with foreign_code(f"can't build the tokenizer of {header.path}"):
        _add_merges(header.architecture, fields)
        backend, _ = convert_gguf_tokenizer(header.architecture, fields)
        split = fields.get("pre_tokenizer_type")
        if split in _DIGITS_APART:
            backend.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ]
            )
        if split in _LLAMA3:
            backend.model.ignore_merges = True
        if split in _NORMALIZED:
            backend.normalizer = normalizers.NFC()
        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=backend,
            clean_up_tokenization_spaces=False,
            **_special_tokens(header, fields["tokens"]),
            **_added_ends(header),
        )
    template = header.metadata.get("tokenizer.chat_template")
    tokenizer.chat_template = template if isinstance(template, str) else None
    return tokenizer


def _add_merges(architecture: str, fields: dict[str, Any]) -> None:
    """Add the merges that a file of scores doesn't have, as transformers would make them, but sooner."""
    if "merges" in fields:
        return
    tokens, scores = fields["tokens"], fields["scores"]
    if select_tokenizer_builder(architecture, fields["tokenizer_type"]) is gemma_tokenizer:
        # Its runs of spaces are respelled there, and tokens rank by their place.
        tokens = ["\u2581" * len(text) if " " in text and not text.strip() else text for text in tokens]
        scores = [-place for place in range(len(tokens))]
    if not any(" " in text for text in tokens):  # else a pair's own space isn't the only one
        fields["merges"] = merges_of(tokens, scores)


def end_token_ids(header: GGUFHeader) -> tuple[int, ...]:
    """Return the ids that end a sequence: those that the file names, and control tokens known to be ends."""
    tokens, types = (_array(header, name) for name in ("tokens", "token_type"))
    ids = [header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _ENDS]
    found = {index for index in ids if type(index) is int and 0 <= index < len(tokens)}
    control = {tokens[index]: index for index, kind in enumerate(types[: len(tokens)]) if kind == _CONTROL}
    ends = {control[text] for text in _END_TEXTS if text in control}
    if _END_OF_MESSAGE in control and _END_OF_ANSWER not in control:
        ends.add(control[_END_OF_MESSAGE])
    return tuple(sorted(found | ends))


def _array(header: GGUFHeader, name: str) -> list[Any]:
    """Return an array of the tokenizer's metadata; none is an empty one. Raises ModelError."""
    found = header.metadata.get(f"tokenizer.ggml.{name}", [])
    if not isinstance(found, list):
        raise ModelError(
            f"{header.path}: tokenizer.ggml.{name} is {shown(found)}, must be an array; download it again"
        )
    return found


_CONTROL = 3
"""Token type of control tokens (`llama_token_type` in llama.cpp)."""


def _fields(header: GGUFHeader) -> dict[str, Any]:
    """Return the metadata under transformers' names, checked."""
    names: dict[str, str] = GGUF_TOKENIZER_MAPPING["tokenizer"]
    fields = {
        ours: header.metadata[f"tokenizer.{key}"]
        for key, ours in names.items()
        if f"tokenizer.{key}" in header.metadata
    }
    kind, split = fields.get("tokenizer_type"), fields.get("pre_tokenizer_type")
    if isinstance(split, str):
        split = fields["pre_tokenizer_type"] = _OTHER_NAMES.get(split, split)
    if kind not in _KINDS:
        raise UnsupportedModel(
            f"{header.path} has a tokenizer of kind {shown(kind)}; read from GGUF are "
            f"{' and '.join(_KINDS)}. Give the directory of the original checkpoint"
        )
    known = _DIGITS_APART | _AS_GPT2 | set(GGUF_PRE_TOKENIZER_SPLITS)
    if kind == "gpt2" and split not in known:
        raise UnsupportedModel(
            f"{header.path} splits text by {shown(split)} (tokenizer.ggml.pre), which isn't known "
            "here. Give "
            "the directory of the original checkpoint"
        )
    tokens = _strings(header, fields, "tokens")
    if kind == "gpt2":
        merges = _strings(header, fields, "merges")
        if not all(len(merge.split(" ")) == 2 for merge in merges):
            raise ModelError(f"{header.path}: tokenizer.ggml.merges must be pairs; download it again")
    elif "merges" not in fields:
        scores = fields.get("scores")
        if not isinstance(scores, list) or len(scores) != len(tokens):
            raise ModelError(f"{header.path}: tokenizer.ggml.scores must be one a token; download it again")
    types = fields.get("token_type")
    if types is not None and (not isinstance(types, list) or len(types) != len(tokens)):
        raise ModelError(f"{header.path}: tokenizer.ggml.token_type must be one a token; download it again")
    if len(set(tokens)) != len(tokens):
        raise ModelError(f"{header.path}: two tokens are spelled alike; download it again")
    num_rows = header.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in header.tensors else 0
    if len(tokens) > num_rows:
        raise ModelError(
            f"{header.path} has {len(tokens)} tokens, but {num_rows} rows of embeddings; download it again"
        )
    return fields


def _strings(header: GGUFHeader, fields: dict[str, Any], name: str) -> list[str]:
    found = fields.get(name)
    if not isinstance(found, list) or not found or not isinstance(found[0], str):
        raise ModelError(f"{header.path} has no tokenizer.ggml.{name}; download it again")
    return found


def _special_tokens(header: GGUFHeader, tokens: list[str]) -> dict[str, AddedToken]:
    """Return special tokens by transformers' names."""
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {}
    for name, key in keys.items():
        index = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is None:
            continue
        if type(index) is not int or not 0 <= index < len(tokens):
            raise ModelError(
                f"{header.path}: {key}_token_id is {shown(index)}, beyond its {len(tokens)} tokens"
            )
        special[name] = AddedToken(tokens[index], normalized=False, special=True)
    return special


def _added_ends(header: GGUFHeader) -> dict[str, bool]:
    """Return whether `encode` adds the first and the last token."""
    # llama.cpp begins a prompt of these with BOS unless the file says otherwise.
    by_default = header.metadata.get("tokenizer.ggml.model") == "llama"
    by_default = by_default or header.metadata.get("tokenizer.ggml.pre") in _LLAMA3
    begins = header.metadata.get("tokenizer.ggml.add_bos_token", by_default)
    begins = bool(begins) and "tokenizer.ggml.bos_token_id" in header.metadata
    ends = bool(header.metadata.get("tokenizer.ggml.add_eos_token")) and (
        "tokenizer.ggml.eos_token_id" in header.metadata
    )
    return {"add_bos_token": begins, "add_eos_token": ends} if begins or ends else {}
