"""Weka's traces of agents: one JSON object a conversation, subagents inside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stemma.errors import TraceError
from stemma.prefix.eviction.policy import Ending
from stemma_lab.traces.columns import Trace, collect
from stemma_lab.traces.reader import open_trace
from stemma_lab.traces.weka import BEGINNINGS_EVERY_S


def read(path: Path, **options: Any) -> Trace:
    reader = open_trace(path, **options)
    return collect(path.name, lambda: reader.format.block_size, reader, reader.format.caveats)


def request(t: float, ids: list[int], stop: str = "") -> dict[str, Any]:
    return {"t": t, "type": "s", "in": 64 * len(ids) - 1, "out": 9, "hash_ids": ids, "stop": stop}


def conversation(*requests: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"id": "c", "block_size": 64, "tool_tokens": 0, "requests": list(requests), **fields}


FIRST = conversation(
    request(0.0, [1, 2], "tool_use"),
    {
        "type": "subagent",
        "t": 5.0,
        "agent_id": "a",
        "requests": [request(0.5, [1, 7]), request(9.0, [1, 7, 8])],
    },
    request(30.0, [1, 2, 3], "end_turn"),
)
SECOND = conversation(request(0.0, [1, 2]), request(4.0, [1, 2, 2]))


def lines(path: Path, *records: object) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def test_conversations_and_their_subagents(tmp_path: Path) -> None:
    trace = read(lines(tmp_path / "t.jsonl", FIRST, SECOND))
    assert trace.block_size == 64
    assert trace.timestamps_s.tolist() == [0.0, 5.5, 14.0, 30.0, 60.0, 64.0]
    assert trace.sessions.tolist() == [0, 1, 1, 0, 2, 2]
    assert trace.turns.tolist() == [1, 1, 2, 2, 1, 2]
    assert trace.input_tokens.tolist() == [127, 127, 191, 191, 127, 191]
    # The subagent shares its parent's first block; the second conversation shares nothing.
    assert [trace.blocks_of(number).tolist() for number in range(6)] == [
        *([0, 1], [0, 2], [0, 2, 3], [0, 1, 4]),
        *([5, 6], [5, 6, 7]),
    ]
    endings = [trace.conclusion_of(number).ending for number in range(4)]
    assert endings == [Ending.TOOL, Ending.UNKNOWN, Ending.UNKNOWN, Ending.TURN]


def test_times_of_subagents_may_count_from_the_conversations_beginning(tmp_path: Path) -> None:
    inner = {"type": "subagent", "t": 5.0, "requests": [request(5.5, [1])]}
    trace = read(lines(tmp_path / "t.jsonl", conversation(request(0.0, [1]), inner)))
    assert trace.timestamps_s.tolist() == [0.0, 5.5]


def test_numbers_that_mean_the_same_everywhere(tmp_path: Path) -> None:
    path = lines(tmp_path / "t.jsonl", *(one | {"hash_id_scope": "global"} for one in (FIRST, SECOND)))
    assert read(path).blocks_of(4).tolist() == [0, 1]


@pytest.mark.parametrize("indent", [None, 2])
def test_a_directory_of_conversations(tmp_path: Path, indent: int | None) -> None:
    for number, one in enumerate((FIRST, SECOND)):
        (tmp_path / f"trace_{number}.json").write_text(json.dumps(one, indent=indent))
    trace = read(tmp_path)
    assert trace.num_requests == 6
    assert trace.timestamps_s[4] == BEGINNINGS_EVERY_S
    assert read(tmp_path / "trace_1.json").num_requests == 2


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (conversation(request(0.0, [-1])), "numbers outside 0"),
        (conversation(request(0.0, [1 << 50])), "numbers outside 0"),
        (conversation({**request(0.0, [1]), "in": "many"}), "isn't a count"),
        (conversation({**request(0.0, [1]), "hash_ids": ["a"]}), "isn't a list of integers"),
        (conversation({**request(0.0, [1]), "t": None}), "isn't a number"),
        (conversation({**request(0.0, [1]), "in": 1 << 62}), "isn't a count"),
        (conversation(request(0.0, [1]), block_size=1 << 63), "isn't a count"),
        (conversation(request(0.0, [1]), block_size=0), "block size 0"),
        (conversation(request(0.0, [1]), block_size=32), "block size 32 after 64"),
        ({**conversation(), "requests": {}}, "'requests' isn't a list"),
        ({**conversation(), "requests": [3]}, "isn't an object"),
    ],
)
def test_a_damaged_conversation_gives_none_of_its_requests(bad: object, reason: str, tmp_path: Path) -> None:
    path = lines(tmp_path / "t.jsonl", SECOND, bad, FIRST)
    with pytest.raises(TraceError, match=f"line 2.*{reason}"):
        read(path)
    assert read(path, skip_bad=True).num_requests == 6


def test_subagents_within_each_other_end_somewhere(tmp_path: Path) -> None:
    inner = conversation(request(0.0, [1]))
    for _ in range(40):
        inner = conversation({"type": "subagent", "t": 0.0, **inner})
    with pytest.raises(TraceError, match="deeper than 8"):
        read(lines(tmp_path / "t.jsonl", inner))
