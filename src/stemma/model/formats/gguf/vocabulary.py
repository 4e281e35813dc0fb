"""The vocabulary of a GGUF file, checked: tokens, their types and merges, and which tokens end an answer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from stemma.errors import ModelError, UnsupportedModel
from stemma.model.files.generation import ends_messages_only
from stemma.model.files.gguf_header import GGUFHeader
from stemma.model.files.gguf_keys import shown
from stemma.model.formats.gguf.merges import Split, merges_of

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Types of tokens that are told apart here (`llama_token_type` in llama.cpp)."""
DIGITS_APART = frozenset({"smollm", "starcoder", "refact", "command-r", "exaone"})
"""Vocabularies that split as GPT-2's does once every digit stands alone."""
_AS_GPT2 = frozenset({"gpt-2", "default", "jina-es", "jina-de", "mpt", "olmo", "phi-2", "jais"})
OTHER_NAMES = {"glm4": "dbrx", "chatglm-bpe": "dbrx"}
"""Vocabularies that split as one that transformers knows by another name, in llama.cpp."""
_BYTE_LEVEL, _SENTENCEPIECE = "gpt2", "llama"
"""Read values of `tokenizer.ggml.model`."""
_DEFAULT_IDS = {"bos": 1, "eos": 2, "unknown": 0}
"""Of SentencePiece, where a file names none, as in llama.cpp."""
_NAMED_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_ENDS = frozenset(
    (
        *("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end_of_text|>"),
        *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|observation|>", "<|end|>", "<turn|>"),
        *("<|tool_response>", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "[e~["),
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<|file_sep|>"),
        *("<|fim_repo|>", "<fim-repo>", "<|repo_name|>", "<reponame>"),
    )
)
"""Tokens that end an answer, and are control tokens, whatever the metadata say, as in llama.cpp."""
_ENDS_IF_CONTROL = frozenset(
    ("</s>", "<eos>", "[EOS]", "<EOT>", "_<EOT>", "[EOT]", "<PAD>", "[PAD]", "<REPO>")
)
"""The same, where the file says that they are control tokens: Gemma strikes out text with one."""


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id, and how texts become tokens."""

    path: Path
    architecture: str
    is_byte_level: bool
    """Else SentencePiece, whose bytes are tokens of their own."""
    split: str
    """How a byte-level vocabulary splits texts into words (`tokenizer.ggml.pre`)."""
    tokens: list[str]
    types: list[int]
    """llama.cpp's type of each token, which isn't always what the file says."""
    merges: list[Split]
    adds_space: bool
    """Whether SentencePiece puts a space before a text, and behind each special token."""


def read_vocabulary(header: GGUFHeader) -> Vocabulary:
    """Return the vocabulary of a file.

    Raises UnsupportedModel for a kind that isn't read, ModelError if the metadata contradict each other.
    """
    kind, split = _field(header, "model"), _field(header, "pre")
    if kind not in (_BYTE_LEVEL, _SENTENCEPIECE):
        raise UnsupportedModel(
            f"{header.path} has a tokenizer of kind {shown(kind)}; read from GGUF are "
            f"{_BYTE_LEVEL} and {_SENTENCEPIECE}. Give the directory of the original checkpoint"
        )
    known = DIGITS_APART | _AS_GPT2 | set(GGUF_PRE_TOKENIZER_SPLITS) | set(OTHER_NAMES)
    if kind == _BYTE_LEVEL and split not in known:
        raise UnsupportedModel(
            f"{header.path} splits text by {shown(split)} (tokenizer.ggml.pre), which isn't known "
            "here. Give the directory of the original checkpoint"
        )
    tokens, is_gemma = _strings(header, "tokens"), header.architecture.startswith("gemma")
    types = _types(header, tokens)
    _check_tokens(header, tokens)
    if is_gemma and kind == _SENTENCEPIECE:
        tokens = _respelled(tokens)
    return Vocabulary(
        header.path,
        header.architecture,
        kind == _BYTE_LEVEL,
        split if isinstance(split, str) else "",
        tokens,
        types,
        _merges(header, tokens, by_place=is_gemma and kind == _SENTENCEPIECE),
        bool(header.metadata.get("tokenizer.ggml.add_space_prefix", not is_gemma)),
    )


def end_token_ids(header: GGUFHeader) -> tuple[int, ...]:
    """Return the ids that end a sequence: those that the file names, and tokens known to be ends."""
    tokens, types = (_array(header, name) for name in ("tokens", "token_type"))
    named = (token_id(header, name, len(tokens)) for name in _NAMED_ENDS)
    present = set(tokens) if all(isinstance(text, str) for text in tokens) else set[Any]()
    ends = {text for text in _ENDS & present if not ends_messages_only(text, present)}
    control = {text for text, kind in zip(tokens, types, strict=False) if kind == CONTROL}
    ends |= _ENDS_IF_CONTROL & control
    return tuple(sorted({*(i for i in named if i is not None), *(tokens.index(text) for text in ends)}))


def token_id(header: GGUFHeader, name: str, num_tokens: int) -> int | None:
    """Return the id that the file gives a special token, or its kind of vocabulary; None: none."""
    default = _DEFAULT_IDS.get(name) if _field(header, "model") == _SENTENCEPIECE else None
    found = _field(header, f"{name}_token_id")
    if found is None:
        types = _array(header, "token_type")
        is_special = default is not None and types[default : default + 1] in ([UNKNOWN], [CONTROL])
        return default if is_special else None
    if type(found) is not int or not 0 <= found < num_tokens:
        raise ModelError(f"{header.path}: {name}_token_id is {shown(found)}, beyond its {num_tokens} tokens")
    return found


def _field(header: GGUFHeader, name: str) -> Any:
    return header.metadata.get(f"tokenizer.ggml.{name}")


def _array(header: GGUFHeader, name: str) -> list[Any]:
    """Return an array of the tokenizer's metadata; none is an empty one. Raises ModelError."""
    found = header.metadata.get(f"tokenizer.ggml.{name}", [])
    if not isinstance(found, list):
        raise ModelError(
            f"{header.path}: tokenizer.ggml.{name} is {shown(found)}, must be an array; download it again"
        )
    return found


def _strings(header: GGUFHeader, name: str) -> list[str]:
    found = _field(header, name)
    if not isinstance(found, list) or not found or not isinstance(found[0], str):
        raise ModelError(f"{header.path} has no tokenizer.ggml.{name}; download it again")
    return found


def _check_tokens(header: GGUFHeader, tokens: list[str]) -> None:
    if len(set(tokens)) != len(tokens):
        raise ModelError(f"{header.path}: two tokens are spelled alike; download it again")
    num_rows = header.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in header.tensors else 0
    if len(tokens) > num_rows:
        raise ModelError(
            f"{header.path} has {len(tokens)} tokens, but {num_rows} rows of embeddings; download it again"
        )


def _types(header: GGUFHeader, tokens: list[str]) -> list[int]:
    types = _field(header, "token_type")
    if types is None:
        types = [NORMAL] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ModelError(f"{header.path}: tokenizer.ggml.token_type must be one a token; download it again")
    return [CONTROL if text in _ENDS else kind for text, kind in zip(tokens, types, strict=True)]


def _respelled(tokens: list[str]) -> list[str]:
    """Return Gemma's tokens with its runs of spaces as its merges make them; the file has plain spaces."""
    return ["\u2581" * len(text) if " " in text and not text.strip() else text for text in tokens]


def _merges(header: GGUFHeader, tokens: list[str], *, by_place: bool) -> list[Split]:
    """Return the file's merges; SentencePiece's follow from the scores, or the places, of its tokens."""
    if _field(header, "merges") is not None or _field(header, "model") == _BYTE_LEVEL:
        pairs = [tuple(merge.split(" ")) for merge in _strings(header, "merges")]
        if not all(len(pair) == 2 for pair in pairs):
            raise ModelError(f"{header.path}: tokenizer.ggml.merges must be pairs; download it again")
        return pairs  # type: ignore[return-value]
    scores = _array(header, "scores")
    if len(scores) != len(tokens):
        raise ModelError(f"{header.path}: tokenizer.ggml.scores must be one a token; download it again")
    return merges_of(tokens, [-place for place in range(len(tokens))] if by_place else scores)
