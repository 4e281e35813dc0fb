"""Tokenizers and chat templates that fail: typed errors, whatever they raise."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from stemma.errors import InvalidRequest, ModelError
from stemma.model.tokenizer import Tokenizer
from tests import checkpoints

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


def test_end_of_sequence_as_the_tokenizer_says(files: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(files)
    assert tokenizer.eos_token_ids == (checkpoints.tokenizer().eos_token_id,)
    path = Path(shutil.copytree(files, tmp_path / "copy"))
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": None}))
    assert Tokenizer(path).eos_token_ids == ()
