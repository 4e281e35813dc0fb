"""Tokenizers and chat templates that fail: typed errors, whatever they raise."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import checkpoints
from tests.engine import tokenizers_for_tests
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from stemma.errors import InvalidRequest, ModelError
from stemma.model.text.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "t"
    checkpoints.tokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize("content", ["{}", "[]", "{", '{"model": {"type": "NoSuch"}}', '{"model": 3}', ""])
def test_broken_tokenizer(files: Path, tmp_path: Path, content: str) -> None:
    path = Path(shutil.copytree(files, tmp_path / "copy"))
    (path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"no usable tokenizer.*tokenizer\.json"):
        Tokenizer(path)


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no usable tokenizer"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 // 0 }}",
        "{{ messages[0].content.nothing.more }}",
        "{{ messages[99]['role'] }}",
        "{{ 'a' * -1 + 5 }}",
        "{{ raise_exception('only about trees') }}",
        "{% for x in messages %}",
        "{{ range(10 ** 9) | list }}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_chat_template_that_fails(files: Path, tmp_path: Path, template: str) -> None:
    """The request is refused (400), the server isn't at fault (500)."""
    path = Path(shutil.copytree(files, tmp_path / "copy"))
    (path / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer(path)
    with pytest.raises(InvalidRequest, match="chat template refuses") as refused:
        tokenizer.apply_chat_template(MESSAGES)
    assert refused.value.param == "messages"


def test_ends_of_a_sequence_are_the_tokenizers_and_its_templates(files: Path, tmp_path: Path) -> None:
    raw = checkpoints.tokenizer()
    own, turn_end = raw.convert_tokens_to_ids("<|endoftext|>"), raw.convert_tokens_to_ids("<|im_end|>")
    path = Path(shutil.copytree(files, tmp_path / "copy"))
    config = json.loads((path / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}{{ m.content }}{{ END }}{% endfor %}"
    for eos, end, expected in (
        ("<|endoftext|>", "'<|im_end|>\\n'", {own, turn_end}),
        ("<|endoftext|>", "'\\n<|im_end|>'", {own, turn_end}),
        ("<|endoftext|>", "eos_token", {own}),
        ("<|endoftext|>", "' the end'", {own}),
        (None, "'<|im_end|>'", {turn_end}),
        (None, "''", set()),
        ("<|endoftext|>", "raise_exception('no')", {own}),
    ):
        (path / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": eos}))
        (path / "chat_template.jinja").write_text(template.replace("END", end))
        assert set(Tokenizer(path).eos_token_ids) == expected


def test_the_end_of_a_message_within_an_answer_ends_no_sequence(files: Path, tmp_path: Path) -> None:
    """GPT-OSS' answers have several messages, each with its end."""
    path = Path(shutil.copytree(files, tmp_path / "copy"))
    (path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}")
    for others, is_end in (([], True), (["<|call|>"], True), (["<|call|>", "<|return|>"], False)):
        hf = AutoTokenizer.from_pretrained(path)
        hf.add_tokens(["<|end|>", *others], special_tokens=True)
        hf.save_pretrained(tmp_path / str(len(others)))
        tokenizer = Tokenizer(tmp_path / str(len(others)))
        end = tokenizer.encode("<|end|>").tolist()
        assert (end[0] in tokenizer.eos_token_ids) is is_end


def _pieces(files: Path) -> Tokenizer:
    """Another model of words, with a token before and behind each text, and limits in its file."""
    vocab = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "the": 3, "qu": 4, "##ick": 5, "a": 6, "##b": 7, ".": 8}
    raw = RawTokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    raw.normalizer = normalizers.BertNormalizer()
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    raw.enable_truncation(4)
    raw.enable_padding(length=16)
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="[SEP]").save_pretrained(str(files))
    return Tokenizer(files)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory, files: Path) -> list[Tokenizer]:
    folder = tmp_path_factory.mktemp("kinds")
    return [
        Tokenizer(files),
        tokenizers_for_tests.byte_level(folder / "bytes"),
        tokenizers_for_tests.sentencepiece_like(folder / "sentencepiece"),
        _pieces(folder / "pieces"),
    ]


_TEXTS = st.lists(
    st.sampled_from(["the quick", "ab.", " ", "\n", "<|end|>", "[SEP]", "e\u0301", "\U0001f680"])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
).map("".join)


@given(text=_TEXTS, add_special_tokens=st.booleans())
def test_ids_are_those_of_transformers(kinds: list[Tokenizer], text: str, add_special_tokens: bool) -> None:
    for tokenizer in kinds:
        expected = tokenizer.transformers_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        assert tokenizer.encode(text, add_special_tokens=add_special_tokens).tolist() == expected


def test_a_tokenizer_that_encodes_its_own_way_is_asked(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers' classes may override a step of `encode`; settings may change what it means."""
    hf = Tokenizer(files).transformers_tokenizer
    own = type("Own", (type(hf),), {"_encode_plus": lambda *_, **__: {"input_ids": [7]}})
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: hf)
    monkeypatch.setattr(hf, "__class__", own)
    assert Tokenizer(files).encode("Hello").tolist() == [7]
    monkeypatch.undo()
    path = Path(shutil.copytree(files, tmp_path / "copy"))
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "split_special_tokens": True}))
    tokenizer = Tokenizer(path)
    text = f"a{hf.eos_token}b"
    assert tokenizer.encode(text).tolist() == tokenizer.transformers_tokenizer.encode(text)
    assert tokenizer.encode(text).tolist() != Tokenizer(files).encode(text).tolist()
