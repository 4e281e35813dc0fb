"""Pieces of a text have the ids of the whole, and words end where texts are cut, whatever the text."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from stemma.model.text import text_cuts
from stemma.model.text.text_cuts import TextCuts
from stemma.types import as_tokens

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2 = LLAMA_3.replace("{1,3}", "")
QWEN_3_5 = QWEN_2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"\s\p{L}\p{N}", r"\s\p{L}\p{M}\p{N}")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
CORPUS = [
    "the quick brown fox's tail, it'll jump over 12345 lazy dogs.\n\nThen  it rests; isn't that so?",
    "def add(first, second):\n    return first + second  # of both\n",
    "你好，世界。我们 说 こんにちは、です。 Grüße aus München 🙂 e\u0301tude",
] * 4


def _splits(*expressions: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(one), "isolated") for one in expressions),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _tokenizer(splitter: pre_tokenizers.PreTokenizer) -> Tokenizer:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = splitter
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(CORPUS, trainer)
    raw.add_special_tokens([AddedToken("<|end|>"), AddedToken("<mask>", lstrip=True)])
    raw.add_tokens([AddedToken("<tool>", normalized=True), AddedToken("    ")])
    return raw


@cache
def family(name: str) -> Tokenizer:
    """A small tokenizer that splits texts as those of a family do."""
    splitter = {
        "gpt-2": _gpt2,
        "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()]),
        "llama-3": lambda: _splits(LLAMA_3),
        "qwen-2": lambda: _splits(QWEN_2),
        "qwen-3.5": lambda: _splits(QWEN_3_5),
        "gpt-oss": lambda: _splits(O200K),
        "deepseek-v3": lambda: _splits(*DEEPSEEK_V3),
    }[name]()
    raw = _tokenizer(splitter)
    if name.startswith("qwen"):
        raw.normalizer = normalizers.NFC()
    if name == "llama-3":
        begin = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        raw.post_processor = processors.Sequence([processors.ByteLevel(), begin])
    if name == "gpt-oss":
        raw.post_processor = processors.TemplateProcessing(
            single="<s> $A <|end|>", special_tokens=[("<s>", 0), ("<|end|>", raw.token_to_id("<|end|>"))]
        )
    return raw


FAMILIES = ["gpt-2", "smollm", "llama-3", "qwen-2", "qwen-3.5", "gpt-oss", "deepseek-v3"]
FRAGMENTS = [
    *("the", "quick", "fox", "'s", "'LL", "n't", "It", "x", "日本", "你好", "です", "é", "e", "ß", "ǅ", "ª"),
    *(
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "\u3000",
        "\u00a0",
        "，",
        "。",
        "、",
        "！",
        "？",
        "：",
        "；",
        ".",
        ",",
        "-",
        "/",
        "'",
    ),
    *(
        "1",
        "23",
        "456",
        "\u0660",
        "\u0301",
        "\u0327",
        "\u3099",
        "\u1100\u1161",
        "\U0001f642",
        "\u200d",
        "\ufe0f",
    ),
    *("<|end|>", "<mask>", "<tool>", "    ", "<s>", "<", "|", "_", "$", "{", "\\"),
]
TEXTS = st.lists(
    st.sampled_from(FRAGMENTS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=3), max_size=40
).map("".join)


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are cut wherever they may be."""
    monkeypatch.setattr(text_cuts, "PIECE_CHARS", 1)


def _ids(raw: Tokenizer, text: str, *, special: bool) -> list[int]:
    found: list[int] = raw.encode(text, add_special_tokens=special).ids
    return found


def _words(raw: Tokenizer, text: str) -> list[str]:
    if raw.normalizer is not None:
        text = raw.normalizer.normalize_str(text)
    return [word for word, _ in raw.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.one_in(3)
@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize("name", FAMILIES)
@given(text=TEXTS, special=st.booleans())
def test_pieces_have_the_ids_of_the_whole(name: str, text: str, special: bool) -> None:
    raw = family(name)
    cuts = TextCuts.of(raw)
    assert cuts is not None
    pieces = cuts.pieces(text)
    assert "".join(pieces) == text
    ids = [as_tokens(_ids(raw, piece, special=False)) for piece in pieces]
    assert cuts.joined(ids, add_special_tokens=special).tolist() == _ids(raw, text, special=special)
    assert [word for piece in pieces for word in _words(raw, piece)] == _words(raw, text)


@given(head=TEXTS, one=TEXTS, other=TEXTS)
def test_texts_that_begin_alike_have_the_same_first_pieces(head: str, one: str, other: str) -> None:
    cuts = TextCuts((), ())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_cuts, "PIECE_CHARS", 8)
        first, second = cuts.pieces(head + one), cuts.pieces(head + other)
    ends = accumulate(map(len, first))
    shared = [piece for piece, end in zip(first, ends, strict=True) if end < len(head)]
    assert second[: len(shared)] == shared


def test_pieces_are_about_as_long_as_they_should_be() -> None:
    pieces = TextCuts((), ()).pieces("some words and more of them, " * 1000)
    assert all(text_cuts.PIECE_CHARS <= len(piece) < text_cuts.PIECE_CHARS + 32 for piece in pieces[:-1])


def test_real_tokenizers_of_families_put_their_ends_around() -> None:
    assert TextCuts.of(family("llama-3")) == TextCuts((0,), ())
    end = family("gpt-oss").token_to_id("<|end|>")
    assert end is not None
    assert TextCuts.of(family("gpt-oss")) == TextCuts((0,), (end,))
    assert TextCuts.of(family("gpt-2")) == TextCuts((), ())


def _with(change: Callable[[Tokenizer], object]) -> Tokenizer:
    raw = _tokenizer(_splits(QWEN_2))
    change(raw)
    return raw


def _set(name: str, part: object) -> Callable[[Tokenizer], object]:
    return lambda raw: setattr(raw, name, part)


def _twice() -> processors.PostProcessor:
    return processors.TemplateProcessing(single="$A $A", special_tokens=[])


@pytest.mark.parametrize(
    "change",
    [
        _set(
            "pre_tokenizer", _splits(r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+")
        ),  # letters and spaces are one word
        _set("pre_tokenizer", _splits(QWEN_2, r"\w+ \w+")),
        _set("pre_tokenizer", _splits(QWEN_2 + r"|(?<=a) b")),
        _set("pre_tokenizer", pre_tokenizers.Split(Regex(QWEN_2), "merged_with_previous")),
        _set("pre_tokenizer", pre_tokenizers.Split(Regex(QWEN_2), "isolated", invert=True)),
        _set("pre_tokenizer", pre_tokenizers.Split(r"\s+", "isolated")),  # a plain text, no expression
        _set("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        _set("pre_tokenizer", pre_tokenizers.Metaspace()),
        _set("pre_tokenizer", pre_tokenizers.Sequence([_gpt2(), pre_tokenizers.Metaspace()])),
        _set("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
        _set("normalizer", normalizers.NFKC()),
        _set("normalizer", normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])),
        _set("normalizer", normalizers.Prepend("a")),
        _set("post_processor", _twice()),
        _set("post_processor", processors.BertProcessing(("<s>", 0), ("<s>", 0))),
        _set("model", models.WordPiece({"a": 0}, unk_token="a")),
        lambda raw: setattr(raw.model, "dropout", 0.5),
        lambda raw: raw.add_tokens([AddedToken("two words")]),
        lambda raw: raw.add_tokens([AddedToken("word ")]),
        lambda raw: raw.add_tokens([AddedToken("<a>", rstrip=True)]),
        lambda raw: raw.add_tokens([AddedToken("word", single_word=True)]),
    ],
)
def test_what_is_not_known_is_not_cut(change: Callable[[Tokenizer], object]) -> None:
    assert TextCuts.of(_with(change)) is None
    assert TextCuts.of(_with(lambda _: None)) is not None


def test_a_part_written_in_python_is_not_known() -> None:
    class Own:
        def pre_tokenize(self, text: object) -> None: ...

    raw = _with(lambda _: None)
    raw.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Own())
    assert TextCuts.of(raw) is None
