"""aiperf's conversations: a line tells what is new, and the prompt is all turns so far."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stemma.errors import TraceError
from stemma_lab.traces import aiperf
from stemma_lab.traces.aiperf import BEGINNINGS_EVERY_S, TOKENS_PER_S
from stemma_lab.traces.columns import Trace, collect
from stemma_lab.traces.reader import open_trace


def read(path: Path, **options: Any) -> Trace:
    reader = open_trace(path, **options)
    return collect(path.name, lambda: reader.format.block_size, reader, reader.format.caveats)


def turn(session: str | None, ids: list[int] | None, output: int = 100, **fields: Any) -> dict[str, Any]:
    length = 512 * (1 if ids is None else len(ids))
    return {"session_id": session, "input_length": length, "output_length": output, "hash_ids": ids, **fields}


def lines(path: Path, *records: object) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def blocks(trace: Trace, number: int) -> list[int]:
    found: list[int] = trace.blocks_of(number).tolist()
    return found


def test_turns_grow_by_what_is_new(tmp_path: Path) -> None:
    trace = read(
        lines(
            tmp_path / "t.jsonl",
            turn("a", [1, 2], timestamp=0.0, group_id=4),
            turn("a", [7], output=600, delay=2000.0),
            turn("a", [8], delay=1000),
            turn("b", [1, 3], timestamp=1000, is_restart=True),
        )
    )
    assert trace.block_size == 512
    assert trace.timestamps_s.tolist() == [
        0.0,
        1.0,
        pytest.approx(2.0 + 100 / TOKENS_PER_S),
        pytest.approx(3.0 + 700 / TOKENS_PER_S),
    ]
    assert trace.sessions.tolist() == [0, 1, 0, 0]
    assert trace.turns.tolist() == [1, 1, 2, 3]
    assert trace.input_tokens.tolist() == [1024, 1024, 1024 + 100 + 512, 1024 + 100 + 512 + 600 + 512]
    first, other, second, third = (blocks(trace, number) for number in range(4))
    assert first[0] == other[0]  # the beginning that both sessions have
    assert first[1] != other[1]
    assert second[:2] == first
    assert len(second) == 4  # two, one that holds the answer's tokens, and the new one
    assert third[:4] == second
    assert len(third) == -(-(1024 + 100 + 512 + 600 + 512) // 512)


def test_whole_prompts(tmp_path: Path) -> None:
    mode: dict[str, Any] = {"context_mode": "message_array_with_responses"}
    path = lines(
        tmp_path / "t.jsonl",
        turn("a", [1, 2, 3], timestamp=0),
        turn("a", [1, 2, 4, 5], delay=5000),  # its first blocks are the ones before; a partial one changed
        turn("b", [1, 9], timestamp=60_000, **mode),
        turn("b", [1], delay=5000, **mode),
    )
    trace = read(path)
    assert trace.input_tokens.tolist() == [1536, 2048, 1024, 512]
    assert [len(blocks(trace, number)) for number in range(4)] == [3, 4, 2, 1]
    assert blocks(trace, 1)[:2] == blocks(trace, 0)[:2]


def test_a_block_behind_another_prefix_is_another_block(tmp_path: Path) -> None:
    trace = read(lines(tmp_path / "t.jsonl", turn("a", [1, 4], timestamp=0), turn("b", [2, 4], timestamp=9)))
    assert not set(blocks(trace, 0)) & set(blocks(trace, 1))


def test_random_text_is_nobody_elses(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "t.jsonl",
        {"input_length": 600},
        {"input_length": 600, "output_length": 4},
        {"session_id": "a", "input_length": 300, "output_length": 40},
        {"session_id": "a", "delay": 2, "input_length": 150, "output_length": 20},
    )
    trace = read(path)
    assert trace.timestamps_s.tolist()[:3] == [0.0, BEGINNINGS_EVERY_S, 2 * BEGINNINGS_EVERY_S]
    assert not set(blocks(trace, 0)) & set(blocks(trace, 1))
    assert blocks(trace, 3)[:1] == blocks(trace, 2)
    assert trace.input_tokens.tolist()[-1] == 490


def test_mooncakes_own_release_stays_what_it_is(tmp_path: Path) -> None:
    line = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}
    path = lines(tmp_path / "t.jsonl", line)
    assert open_trace(path).format.name == "mooncake"
    assert open_trace(lines(path, line | {"session_id": "a"})).format.name == "aiperf"


BAD = (
    (turn("a", [1], timestamp="soon"), "isn't a number"),
    (turn("a", [1], timestamp=-1), "outside 0 to"),
    (turn("a", [1], delay=1e300), "outside 0 to"),
    (turn("a", [1, 2, 3, 4], timestamp=0) | {"input_length": 5}, "4 block ids, but 5 tokens"),
    (turn("a", [-1], timestamp=0), "numbers outside 0"),
    (turn("a", [1 << 50], timestamp=0), "numbers outside 0"),
    (turn("a", [1], timestamp=0) | {"hash_ids": ["1"]}, "isn't a list of integers"),
    (turn("a", None, timestamp=0) | {"input_length": 1 << 39}, "blocks; 8192 are the most"),
    (turn("a", [1], timestamp=0) | {"output_length": 1 << 39}, None),
    (turn("a", [1], timestamp=0) | {"output_length": -3}, "isn't a count"),
    ({**turn("a", [1]), "session_id": {"a": 1}}, "isn't text"),
    (turn("a", [1], context_mode="other"), "'other': not known"),
    ({"session_id": "a", "text_input": "Hello"}, "only a tokenizer"),
    ({"session_id": "a", "payload": {}}, "only a tokenizer"),
    ({"session_id": "a"}, "'input_length' is missing"),
    ([1], "not a JSON object"),
)


@pytest.mark.parametrize(("bad", "reason"), BAD)
def test_damaged_lines(bad: object, reason: str | None, tmp_path: Path) -> None:
    path = lines(tmp_path / "t.jsonl", turn("z", [1], timestamp=0), bad, turn("z", [2], delay=1))
    if reason is None:
        assert read(path).num_requests == 3
        return
    with pytest.raises(TraceError, match=f"line 2.*{reason}"):
        read(path)
    assert read(path, skip_bad=True).turns.tolist() == [1, 2]


def test_an_answer_longer_than_any_prompt_ends_the_conversation(tmp_path: Path) -> None:
    path = lines(tmp_path / "t.jsonl", turn("a", [1], output=1 << 39, timestamp=0), turn("a", [2], delay=1))
    with pytest.raises(TraceError, match=r"line 2.*8192 are the most"):
        read(path)


def test_short_lines_cant_fill_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiperf, "MOST_IN_ALL", 10)
    path = lines(tmp_path / "t.jsonl", *(turn("a", [number], delay=1) for number in range(9)))
    with pytest.raises(TraceError, match=r"line 4.*blocks in all"):
        read(path)
