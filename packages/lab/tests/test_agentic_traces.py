"""Traces of agents that tell how long tools took (Dynamo's, LMCache's), BurstGPT's, and a trace's version."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packages.lab.tests.letters import LetterTokenizer

from stemma.errors import ConfigError, TraceError
from stemma.prefix.eviction.policy import Ending
from stemma_lab.traces.aiperf import BEGINNINGS_EVERY_S, TOKENS_PER_S
from stemma_lab.traces.columns import Trace, collect
from stemma_lab.traces.reader import open_trace
from stemma_lab.traces.version import TraceVersion, digest_of

HEADER = {"schema": "dynamo.agentic_mooncake", "version": 2, "block_size": 4, "hash_id_scope": "local"}


def read(path: Path, **options: Any) -> Trace:
    reader = open_trace(path, **options)
    return collect(path.name, lambda: reader.format.block_size, reader, reader.format.caveats)


def lines(path: Path, *records: object) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def first(name: str, ids: list[int], length: int, **fields: Any) -> dict[str, Any]:
    """Return a line of version 1."""
    row = {"request_id": name, "session_id": "a", "input_length": length, "output_length": 5, "hash_ids": ids}
    return {**row, "prefix_reset": False, **fields}


def second(name: str, ids: list[int], play: str = "p", **fields: Any) -> dict[str, Any]:
    """Return a line of version 2."""
    row = {"request_id": name, "play_id": play, "session_id": play, "model": "m", "not_before_ms": 0.0}
    return {**row, "input_length": 4 * len(ids), "output_length": 50, "hash_ids": ids, **fields}


def after(
    name: str, delay_ms: float, trigger: str = "completion", relation: str = "sequence"
) -> dict[str, Any]:
    return {"request_id": name, "delay_ms": delay_ms, "trigger": trigger, "relation": relation}


class TestDynamo:
    def test_tools_times_are_gaps_and_tell_how_the_answer_before_ended(self, tmp_path: Path) -> None:
        path = lines(
            tmp_path / "t.jsonl",
            first("r1", [0, 1], 30, timestamp=1000.0),
            first("r2", [0, 1, 2], 40, timestamp=1300.0, wait_for=["r1"], delay=100.0, tool_wait_ms=80.0),
            first("r3", [0, 1, 2, 3], 64, wait_for=["r2"], delay=500.0),
        )
        trace = read(path)
        assert trace.block_size == 16  # 30 tokens in two blocks
        ended_s = 1.3 + 5 / TOKENS_PER_S
        assert trace.timestamps_s.tolist() == pytest.approx([0.0, 0.3, ended_s + 0.5 - 1.0])
        assert np.isnan(trace.gaps_s[0])
        assert trace.gaps_s[1:].tolist() == pytest.approx([0.18, 0.5])
        assert [Ending(one) for one in trace.endings] == [Ending.TOOL, Ending.UNKNOWN, Ending.UNKNOWN]
        assert trace.sessions.tolist() == [0, 0, 0]
        assert trace.blocks_of(1)[:2].tolist() == trace.blocks_of(0).tolist()

    def test_version_2_follows_what_it_depends_on(self, tmp_path: Path) -> None:
        path = lines(
            tmp_path / "t.jsonl",
            HEADER,
            second("root", [0, 1], not_before_ms=2000.0),
            second("child", [7], dependencies=[after("root", 20.0, "dispatch", "spawn")]),
            second(
                "next", [0, 1, 2], dependencies=[after("root", 300.0), after("child", 0, relation="join")]
            ),
            second("other", [0, 1], play="q", not_before_ms=9000.0),
        )
        trace = read(path)
        assert trace.block_size == 4
        assert trace.timestamps_s.tolist() == pytest.approx([0.0, 0.02, 1.3, 7.0])
        assert trace.gaps_s[2] == pytest.approx(0.3)
        root, _, following, other = (trace.blocks_of(number).tolist() for number in range(4))
        assert following[:2] == root
        assert not set(root) & set(other)  # numbers of blocks are a play's own

    @pytest.mark.parametrize(
        ("record", "message"),
        [
            (first("r2", [0], 9, wait_for=["none"]), "waits for 'none', which no line before has"),
            (first("r2", [0], 9, wait_for="r1"), "'wait_for' isn't a list of texts"),
            (first("r2", [0], 9, tool_wait_ms=-1), "'tool_wait_ms' is outside"),
            (first("r2", [0, 1, 2, 3], 9), "4 block ids, but 9 tokens"),
            (first("r2", [1 << 50], 9), "numbers outside"),
            ({**first("r2", [0], 9), "request_id": 7}, "'request_id' isn't text"),
            (HEADER, "not the first line"),
        ],
    )
    def test_bad_lines(self, tmp_path: Path, record: object, message: str) -> None:
        path = lines(tmp_path / "t.jsonl", first("r1", [0, 1], 30, timestamp=0.0), record)
        with pytest.raises(TraceError, match=message) as found:
            read(path)
        assert "line 2" in str(found.value)

    def test_bad_headers_and_dependencies(self, tmp_path: Path) -> None:
        for records, message in (
            ([{**HEADER, "version": 3}], "version 3"),
            ([{**HEADER, "block_size": 0}], "'block_size' is 0"),
            ([HEADER, second("a", [1], dependencies=[3])], "isn't a list of objects"),
        ):
            with pytest.raises(TraceError, match=message):
                read(lines(tmp_path / "t.jsonl", *records))


class TestLmcache:
    def turn(self, session: str, text: list[tuple[str, str]], gap: float) -> dict[str, Any]:
        messages = [{"role": role, "content": content} for role, content in text]
        return {"session_id": session, "model": "m", "input": messages, "output_length": 100, "pre_gap": gap}

    def test_turns_come_their_gap_after_the_answer(self, tmp_path: Path) -> None:
        begin = [("user", "write a long text")]
        path = lines(
            tmp_path / "t.jsonl",
            self.turn("a", begin, 0.0),
            self.turn("a", [*begin, ("assistant", "x"), ("tool", "done")], 0.5),
            self.turn("a", [*begin, ("assistant", "x"), ("tool", "done"), ("user", "more")], 9.0),
            self.turn("b", begin, 0.0),
        )
        trace = read(path, tokenizer=LetterTokenizer)
        answer_s = 100 / TOKENS_PER_S
        assert trace.timestamps_s.tolist() == pytest.approx(
            [0.0, answer_s + 0.5, 2 * answer_s + 9.5, BEGINNINGS_EVERY_S]
        )
        assert trace.turns.tolist() == [1, 2, 3, 1]
        assert [Ending(one) for one in trace.endings[:3]] == [Ending.TOOL, Ending.TURN, Ending.UNKNOWN]
        assert trace.blocks_of(3).tolist() == trace.blocks_of(0).tolist()

    def test_bad_lines(self, tmp_path: Path) -> None:
        good = self.turn("a", [("user", "x")], 0.0)
        with pytest.raises(ConfigError, match="name a tokenizer"):
            open_trace(lines(tmp_path / "t.jsonl", good))
        for fields, message in (
            ({"input": "text"}, "'input' isn't a list of objects"),
            ({"pre_gap": -1.0}, "'pre_gap' is outside"),
            ({"session_id": 3}, "'session_id' isn't text"),
        ):
            with pytest.raises(TraceError, match=message):
                read(lines(tmp_path / "t.jsonl", {**good, **fields}), tokenizer=LetterTokenizer)


class TestBurstGpt:
    def test_both_releases(self, tmp_path: Path) -> None:
        path = tmp_path / "t.csv"
        path.write_text(
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
            "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,10,0,10,API log\n"
        )
        trace = read(path)
        assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == ([472, 10], [18, 0])
        assert trace.timestamps_s.tolist() == [0.0, 40.0]
        assert "lengths only" in trace.caveats[0]
        path.write_text(
            "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
            "5.0,u-1,43,GPT-4,9,4,13,Conversation log\n6.0,,2,ChatGPT,3,2,5,API log\n"
        )
        assert read(path).sessions.tolist() == [0, -1]

    @pytest.mark.parametrize("row", ["nan,m,1,2,3,API log", "1,m,x,2,3,API log", "1,m,1"])
    def test_bad_lines(self, tmp_path: Path, row: str) -> None:
        path = tmp_path / "t.csv"
        path.write_text(f"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n{row}\n")
        with pytest.raises(TraceError, match="line 2"):
            read(path)


def test_a_version_is_name_digest_and_requests(tmp_path: Path) -> None:
    path = lines(tmp_path / "t.jsonl", 1)
    digest = hashlib.sha256(b"1\n").hexdigest()
    assert digest_of(path) == digest
    assert digest_of(tmp_path) == hashlib.sha256().hexdigest()  # of no JSON file
    version = TraceVersion("t.jsonl", digest, 1234)
    assert str(version) == f"t.jsonl (sha256 {digest[:8]}, 1,234 requests)"
    assert version.on([{"a": 1}]) == [{"trace": version, "a": 1}]
    assert version.on({"a": [1]}) == {"trace": version, "a": [1]}
    assert str(TraceVersion("made up", "", 2)) == "made up (2 requests)"
