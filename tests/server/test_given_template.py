from __future__ import annotations

from pathlib import Path

import pytest

from stemma.errors import ConfigError
from stemma.model.text.tokenizer import Tokenizer

TURN = [{"role": "user", "content": "hello"}]


def test_a_file_takes_the_place_of_the_checkpoints_template(tokenizer_path: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("{% for message in messages %}<{{ message.content }}>{% endfor %}")
    tokenizer = Tokenizer(tokenizer_path, chat_template=own)
    assert tokenizer.chat_template == own.read_text()
    assert tokenizer.render_chat(TURN) == "<hello>"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        (b"{% for %}", "line 1, is no Jinja template"),
        (b"\xff\xfe", "can't be read as a file of text"),
        (b" " * ((1 << 20) + 1), "has more than 1048576 bytes"),
    ],
)
def test_what_is_no_template_is_refused_at_the_start(
    tokenizer_path: Path, tmp_path: Path, content: bytes | None, words: str
) -> None:
    path = tmp_path / "t.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        Tokenizer(tokenizer_path, chat_template=path)
