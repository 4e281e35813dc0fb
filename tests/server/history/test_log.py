"""The answers' file: what a restart finds, and that no byte of it is believed."""

from __future__ import annotations

import errno
import os
import struct
import threading
import time
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.history.written import SCOPE, written

from stemma.errors import StorageError
from stemma.model.text.tokenizer import Tokenizer
from stemma.server.history.answers import WrittenAnswers
from stemma.server.history.log import HEADER, AnswerLog, count_answers, drop_unused
from stemma.supervision import LoggingSupervisor

LIMIT = 40_000


def opened(path: Path, tokenizer: Tokenizer, max_bytes: int = LIMIT) -> tuple[WrittenAnswers, AnswerLog]:
    kept = WrittenAnswers(tokenizer, max_bytes)
    return kept, AnswerLog(path, kept, max_bytes, tokenizer.vocab_size, LoggingSupervisor())


def fill(path: Path, tokenizer: Tokenizer, number: int = 5) -> None:
    kept, log = opened(path, tokenizer)
    for one in range(number):
        kept.keep(written(tokenizer, f"before {one}", f"answer {one}"))
    log.close()


def count(path: Path, tokenizer: Tokenizer) -> int:
    kept, log = opened(path, tokenizer)
    log.close()
    assert log.num_read == len(kept)
    return len(kept)


def test_a_restart_finds_them(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "answers"
    fill(path, tokenizer)
    kept, log = opened(path, tokenizer)
    log.close()
    log.close()
    for one in range(5):
        [match] = kept.find(SCOPE, f"before {one}answer {one}")
        assert match.is_whole
    assert path.stat().st_mode & 0o777 == 0o600
    assert count(path, tokenizer) == 5


def test_what_is_cleared_is_in_the_file_no_more(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "answers"
    fill(path, tokenizer)
    kept, log = opened(path, tokenizer)
    assert kept.clear() == 5
    assert kept.find(SCOPE, "before 1answer 1") == []
    assert (len(kept), kept.num_bytes) == (0, 0)
    log.rewrite()
    assert path.read_bytes() == HEADER
    kept.keep(written(tokenizer, "before", "later"))
    log.close()
    log.rewrite()  # nothing is written any more
    assert count(path, tokenizer) == 1


def test_a_file_that_can_not_be_rewritten_is_told(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "answers"
    fill(path, tokenizer)
    kept, log = opened(path, tokenizer)
    (tmp_path / "answers.new" / "in the way").mkdir(parents=True)
    kept.clear()
    with pytest.raises(StorageError, match="still holds answers"):
        log.rewrite()
    log.close()


def test_what_is_cut_short_is_cut_off(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "answers"
    fill(path, tokenizer)
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        found = count(path, tokenizer)
        assert found <= 4 + (length == len(whole))
        kept, log = opened(path, tokenizer)
        kept.keep(written(tokenizer, "before it", "the next answer"))
        log.close()
        assert count(path, tokenizer) == found + 1


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_flipped_byte_ends_the_reading(
    tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("log") / "answers"
    fill(path, tokenizer)
    whole = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole)
    assert count(path, tokenizer) < 5


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=120), max_size=4))
def test_sound_records_of_anything(
    tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory, bodies: list[bytes]
) -> None:
    """A checksum says that bytes are whole, not that they are true."""
    path = tmp_path_factory.mktemp("log") / "answers"
    frames = (struct.pack("<QI", xxhash.xxh3_64_intdigest(body), len(body)) + body for body in bodies)
    path.write_bytes(HEADER + b"".join(frames))
    count(path, tokenizer)


@pytest.mark.parametrize("token_id", [-1, 1 << 30])
def test_ids_out_of_the_vocabulary_are_no_answer(tokenizer: Tokenizer, tmp_path: Path, token_id: int) -> None:
    path = tmp_path / "answers"
    kept, log = opened(path, tokenizer)
    answer = written(tokenizer, "before", "an answer")
    answer.token_ids[3] = token_id
    kept.keep(answer)
    kept.keep(written(tokenizer, "before", "another"))
    log.close()
    assert count(path, tokenizer) == 1


def test_the_file_is_bounded_and_keeps_the_newest(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "answers"
    kept, log = opened(path, tokenizer)
    for one in range(400):
        kept.keep(written(tokenizer, f"before {one}", f"answer {one} " * 9))
    log.close()
    assert log.failure is None
    assert path.stat().st_size <= LIMIT
    kept, log = opened(path, tokenizer)
    log.close()
    assert kept.find(SCOPE, "before 399" + "answer 399 " * 9)
    assert [one.name for one in tmp_path.iterdir()] == ["answers"]


def test_only_a_plain_file_is_used(tokenizer: Tokenizer, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / "link").symlink_to(target)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("link", "pipe", "folder"):
        with pytest.raises(StorageError, match=name):
            opened(tmp_path / name, tokenizer)
    assert target.read_text() == "mine"


class Clock:
    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


def test_answers_are_kept_as_long_as_blocks(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path, clock = tmp_path / "answers", Clock()
    kept = WrittenAnswers(tokenizer, LIMIT, ttl_s=100.0, clock=clock)
    log = AnswerLog(path, kept, LIMIT, tokenizer.vocab_size, LoggingSupervisor())
    for one in range(3):
        kept.keep(written(tokenizer, f"before {one}", f"answer {one}"), clock.now - 90.0)
    clock.now += 20
    kept.keep(written(tokenizer, "another", "the next answer"))
    assert kept.find(SCOPE, "before 1answer 1") == []
    assert (len(kept), kept.expire()) == (1, 0)
    log.rewrite()
    log.close()
    assert count(path, tokenizer) == 1
    assert (drop_unused(path, 1000.0), count_answers(path)) == (0, 1)
    assert (drop_unused(path, -1000.0), count_answers(path)) == (1, 0)
    assert (drop_unused(tmp_path / "none", 1.0), count_answers(tmp_path / "none")) == (0, 0)


def test_a_restart_knows_when_they_were_used(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "answers"
    kept, log = opened(path, tokenizer)
    kept.keep(written(tokenizer, "before", "old"))
    log.close()
    later = WrittenAnswers(tokenizer, LIMIT, ttl_s=1000.0, clock=lambda: time.time() + 1001.0)
    AnswerLog(path, later, LIMIT, tokenizer.vocab_size, LoggingSupervisor()).close()
    assert len(later) == 0
    assert count(path, tokenizer) == 0


def test_a_file_without_times_is_read(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "answers"
    fill(path, tokenizer)
    data, at, old = path.read_bytes(), len(HEADER), b"stemma-answers 1\n"
    while at < len(data):
        _, length = struct.unpack_from("<QI", data, at)
        body = data[at + 12 + 8 : at + 12 + length]
        old += struct.pack("<QI", xxhash.xxh3_64_intdigest(body), len(body)) + body
        at += 12 + length
    path.write_bytes(old)
    assert count(path, tokenizer) == 5
    assert path.read_bytes().startswith(HEADER)
    assert count(path, tokenizer) == 5


def test_a_full_disk_holds_up_the_writing_for_a_while(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "answers"
    kept, log = opened(path, tokenizer)
    kept.keep(written(tokenizer, "before 0", "first"))
    log.rewrite()
    room = threading.Event()

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        if not room.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.write(fd, data) if os.lseek(fd, offset, os.SEEK_SET) == offset else 0

    monkeypatch.setattr("stemma.server.history.log.RETRY_S", 0.01)
    monkeypatch.setattr("stemma.server.history.log.os.pwrite", pwrite)
    kept.keep(written(tokenizer, "before 1", "second"))
    while log.failure is None:
        time.sleep(0.001)
    room.set()
    kept.keep(written(tokenizer, "before 2", "third"))
    while log.failure is not None:
        time.sleep(0.001)
    log.close()
    assert count(path, tokenizer) == 3


def test_a_slow_disk_has_a_short_queue(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stemma.server.history.log.MAX_QUEUED", 2)
    path = tmp_path / "answers"
    kept, log = opened(path, tokenizer, 1 << 20)
    for one in range(60):
        kept.keep(written(tokenizer, f"before {one}", f"answer {one}"))
    log.close()
    kept, log = opened(path, tokenizer, 1 << 20)
    log.close()
    assert len(kept) == 60


def test_less_memory_keeps_the_newest(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "answers"
    fill(path, tokenizer, 30)
    kept, log = opened(path, tokenizer, path.stat().st_size // 2)
    log.close()
    assert kept.find(SCOPE, "before 29answer 29")
    assert not kept.find(SCOPE, "before 0answer 0")
