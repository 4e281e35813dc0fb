"""Where a text may be cut so that its pieces, tokenized apart, have together the ids of the whole.

Byte-level BPE splits a text into words, by regular expressions, then merges bytes within each word alone. So
pieces have the ids of the whole if no word lies in two of them and each is split as it is in the whole. A cut
is made behind a letter, before white space or a CJK punctuation mark:

- No alternative of the expressions listed here matches a letter and then such a character, and one of them
  matches runs of letters: so a word ends at the cut, whatever comes after it.
- None looks back: so what follows the cut is split as if the text began there.
- Normalization to NFC neither joins such a character to a letter nor changes either of them.
- Added tokens are found before words are. They could lie across a cut only if their own text had one inside.

`TextCuts.of` holds a tokenizer against all of this. A part that isn't known here means that texts aren't cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from tokenizers import AddedToken, Tokenizer, models

from stemma.types import TokenArray, as_tokens

PIECE_CHARS = 512
"""A piece ends at the first possible cut from here on: texts that begin alike have the same first pieces."""

_CUT = re.compile("[a-z\u4e00-\u9fa5][ \n\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f]")

_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = frozenset(
    (
        r" ?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}?",
    )
)
"""Alternatives that match the letter before a cut, and end there."""
_OTHERS = frozenset(
    (
        *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", _ENDINGS),
        *(rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{ending}" for ending in ("", f"{_ENDINGS}?")),
        *(r"\p{N}", r"\p{N}+", r"\p{N}{1,3}", r" ?\p{N}+"),
        *(rf" ?[^\s\p{{L}}\p{{N}}]+{line_ends}" for line_ends in ("", r"[\r\n]*", r"[\r\n/]*")),
        *(r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r" ?[\p{P}\p{S}]+[\r\n]*"),
        *(r"\s*[\r\n]", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
        "[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    )
)
"""Alternatives that match no letter with white space or a mark of `_CUT` behind it."""


@dataclass(frozen=True, slots=True)
class TextCuts:
    """Cuts the texts of one tokenizer, and joins the ids of their pieces."""

    head: tuple[int, ...]
    """Special tokens that the tokenizer puts before a text, where they are asked for."""
    tail: tuple[int, ...]
    """The same behind a text."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TextCuts | None:
        """Return the cuts for `tokenizer`; None if its texts mustn't be cut."""
        model = tokenizer.model
        if not isinstance(model, models.BPE) or model.dropout:
            return None
        splitters = _parts(_state(tokenizer.pre_tokenizer), "pretokenizers")
        if not (all(map(_is_known, splitters)) and any(map(_takes_letters, splitters))):
            return None
        if any(part["type"] != "NFC" for part in _parts(_state(tokenizer.normalizer), "normalizers")):
            return None
        if not all(map(_lies_in_a_piece, tokenizer.get_added_tokens_decoder().values())):
            return None
        ends = _ends(_state(tokenizer.post_processor))
        return None if ends is None else cls(*ends)

    def pieces(self, text: str) -> list[str]:
        """Return the pieces of `text` in order; an empty text has one, which is empty."""
        found, begin = [], 0
        while cut := _CUT.search(text, begin + PIECE_CHARS - 1):
            end = cut.start() + 1
            found.append(text[begin:end])
            begin = end
        return [*found, text[begin:]]

    def joined(self, pieces: Sequence[TokenArray], *, add_special_tokens: bool) -> TokenArray:
        """Return the ids of a text, int32, from those of its pieces."""
        head, tail = (self.head, self.tail) if add_special_tokens else ((), ())
        return np.concatenate([as_tokens(head), *pieces, as_tokens(tail)])


def _state(part: Any) -> dict[str, Any] | None:
    """Return a part of a tokenizer as `tokenizer.json` describes it."""
    if part is None:
        return None
    try:
        found: dict[str, Any] = orjson.loads(part.__getstate__())
    except Exception:  # noqa: BLE001 - one written in Python can't be described
        return {"type": "unknown"}
    return found


def _parts(state: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    """Return the members of a sequence, whose list is called `name`, or the part itself."""
    if state is None:
        return []
    if state["type"] != "Sequence":
        return [state]
    return [part for member in state[name] for part in _parts(member, name)]


def _is_known(splitter: Mapping[str, Any]) -> bool:
    """Whether a step that splits a text into words is one of those above."""
    if splitter["type"] == "ByteLevel":
        return not splitter["add_prefix_space"]
    if splitter["type"] == "Split":
        isolates = splitter["behavior"] == "Isolated" and not splitter["invert"]
        return isolates and _alternatives(splitter) <= _LETTERS | _OTHERS
    return bool(splitter["type"] == "Digits")


def _takes_letters(splitter: Mapping[str, Any]) -> bool:
    """Whether words end where letters do. ByteLevel's own expression is GPT-2's."""
    if splitter["type"] == "ByteLevel":
        return bool(splitter["use_regex"])
    return splitter["type"] == "Split" and bool(_alternatives(splitter) & _LETTERS)


def _alternatives(split: Mapping[str, Any]) -> frozenset[str]:
    """Return what is between the outermost bars of a splitter's expression; of a plain text, that text."""
    expression = split["pattern"].get("Regex")
    return frozenset((str(split["pattern"]),) if expression is None else _divided(expression))


def _divided(expression: str) -> Iterable[str]:
    depth, in_class, begin, at = 0, False, 0, 0
    while at < len(expression):
        char = expression[at]
        if char == "\\":
            at += 1
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and depth == 0:
            yield expression[begin:at]
            begin = at + 1
        at += 1
    yield expression[begin:]


def _lies_in_a_piece(token: AddedToken) -> bool:
    """Whether an added token is found in a piece wherever it is found in the whole, and nowhere else."""
    return not (token.rstrip or token.single_word or _CUT.search(token.content))


def _ends(processor: Mapping[str, Any] | None) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the special ids before and behind a text; None if more than that is done to it."""
    head: tuple[int, ...] = ()
    tail: tuple[int, ...] = ()
    for part in _parts(processor, "processors"):
        if part["type"] == "ByteLevel":  # changes offsets alone
            continue
        if part["type"] != "TemplateProcessing":
            return None
        texts = [place for place, piece in enumerate(part["single"]) if "Sequence" in piece]
        if len(texts) != 1:
            return None
        head = (*_special_ids(part, part["single"][: texts[0]]), *head)
        tail = (*tail, *_special_ids(part, part["single"][texts[0] + 1 :]))
    return head, tail


def _special_ids(template: Mapping[str, Any], pieces: Iterable[Mapping[str, Any]]) -> list[int]:
    tokens = (template["special_tokens"][piece["SpecialToken"]["id"]] for piece in pieces)
    return [token_id for token in tokens for token_id in token["ids"]]
