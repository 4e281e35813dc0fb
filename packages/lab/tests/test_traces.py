"""Trace readers: what each format gives, and what they say of bad lines."""

import gzip
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from packages.lab.tests.letters import LetterTokenizer

from stemma.engine.trace_log import FinishedRequest, TraceHeader, TraceLog
from stemma.errors import ConfigError, StorageError, TraceError
from stemma.prefix.eviction.policy import Conclusion, Ending
from stemma.prefix.keys import DEFAULT_NAMESPACE, Namespace
from stemma.types import FinishReason, RetentionHint, Tier
from stemma_lab.traces.columns import Trace, collect
from stemma_lab.traces.openai_chat import chain_ids
from stemma_lab.traces.reader import open_trace
from stemma_lab.traces.request import Measured

SAMPLE = Path(__file__).parent / "data" / "mooncake_conversation_head.jsonl"


def read(path: Path, **options: object) -> Trace:
    reader = open_trace(path, **options)  # type: ignore[arg-type]
    return collect(path.name, lambda: reader.format.block_size, reader, reader.format.caveats)


def write_lines(path: Path, *records: object) -> Path:
    lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
    path.write_text("\n".join(lines) + "\n")
    return path


def mooncake(timestamp: int, ids: list[int], tokens: int | None = None) -> dict[str, object]:
    length = 512 * len(ids) if tokens is None else tokens
    return {"timestamp": timestamp, "input_length": length, "output_length": 7, "hash_ids": ids}


class TestMooncake:
    def test_sample(self):
        trace = read(SAMPLE)
        assert (trace.block_size, trace.num_requests) == (512, 120)
        assert trace.blocks_of(0).tolist() == list(range(14))
        assert trace.blocks_of(1).tolist() == [0, *range(14, 28)]
        assert trace.input_tokens[0] == 6758

    def test_gzip(self, tmp_path):
        packed = tmp_path / "t.jsonl.gz"
        packed.write_bytes(gzip.compress(SAMPLE.read_bytes()))
        assert read(packed).num_blocks == read(SAMPLE).num_blocks

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ("{", "line 2: not JSON"),
            ("[1]", "line 2: not a JSON object"),
            (json.dumps({"timestamp": 1, "input_length": 512, "output_length": 1}), "'hash_ids' is missing"),
            (json.dumps(mooncake(1, [1, 1])), "repeats an id"),
            (json.dumps(mooncake(1, [1], tokens=5120)), "1 block ids, but 5120 tokens need 10 of 512"),
            (json.dumps({**mooncake(1, [1]), "input_length": -4}), "isn't a count: -4"),
            (json.dumps({**mooncake(1, [1]), "timestamp": "soon"}), "isn't a number: 'soon'"),
            (json.dumps({**mooncake(1, [1]), "hash_ids": ["a"]}), "isn't a list of integers"),
            (json.dumps({**mooncake(1, [1]), "hash_ids": [1.5]}), "isn't a list of integers"),
            (json.dumps({**mooncake(1, [1]), "hash_ids": [2**70]}), "isn't a list of integers"),
        ],
    )
    def test_bad_line(self, tmp_path, line, reason):
        path = write_lines(tmp_path / "t.jsonl", mooncake(0, [1]), line, mooncake(2, [2]))
        with pytest.raises(TraceError, match=reason) as caught:
            read(path)
        assert caught.value.line_number == 2
        reader = open_trace(path, skip_bad=True)
        assert [request.block_ids.tolist() for request in reader] == [[1], [2]]
        assert reader.num_bad == 1
        assert "line 2" in reader.bad_lines[0]


class TestBailian:
    def test_sessions(self, tmp_path):
        def record(chat: int, parent: int, turn: int, ids: list[int]) -> dict[str, object]:
            return {
                "chat_id": chat,
                "parent_chat_id": parent,
                "timestamp": 1.5 * chat,
                "input_length": 16 * len(ids) - 3,
                "output_length": 5,
                "type": "text",
                "turn": turn,
                "hash_ids": ids,
            }

        trace = read(
            write_lines(
                tmp_path / "t.jsonl",
                record(1, -1, 1, [10, 11]),
                record(2, -1, 1, [12]),
                record(3, 1, 2, [10, 11, 13]),
                record(4, 3, 3, [10, 11, 13, 14]),
            )
        )
        assert trace.block_size == 16
        assert trace.sessions.tolist() == [1, 2, 1, 1]
        assert trace.turns.tolist() == [1, 1, 2, 3]
        assert trace.timestamps_s.tolist() == [0.0, 1.5, 3.0, 4.5]


class TestAzure:
    def test_lengths_only(self, tmp_path):
        path = write_lines(
            tmp_path / "t.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens",
            "2023-11-16 18:15:46.6805900,374,44",
            "2023-11-16 18:15:50.9951690,396,109",
        )
        trace = read(path)
        assert trace.input_tokens.tolist() == [374, 396]
        assert trace.num_blocks == 0
        assert trace.timestamps_s[1] == pytest.approx(4.314579)
        assert "no hit ratio" in trace.caveats[0]

    def test_bad_line(self, tmp_path):
        path = write_lines(
            tmp_path / "t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46,x,3"
        )
        with pytest.raises(TraceError, match="line 2: field 'input' isn't a count: 'x'"):
            read(path)


class TestOpenAIChat:
    def test_turns_share_a_prefix(self, tmp_path):
        first = [{"role": "user", "content": "x" * 40}]
        second = [*first, {"role": "assistant", "content": "y"}]
        batch = {"custom_id": "a", "body": {"messages": second, "max_tokens": 9}}
        path = write_lines(tmp_path / "t.jsonl", {"messages": first}, batch)
        trace = read(path, tokenizer=LetterTokenizer)
        assert trace.blocks_of(0)[:2].tolist() == trace.blocks_of(1)[:2].tolist()
        assert trace.output_tokens.tolist() == [0, 9]
        with pytest.raises(ConfigError, match="name a tokenizer"):
            open_trace(path)

    def test_ids_are_chained(self):
        tokens = np.array([1, 2, 3, 4, 1, 2], dtype=np.int32)
        ids = chain_ids(tokens, 2)
        assert len(set(ids.tolist())) == 3
        assert chain_ids(tokens[:4], 2).tolist() == ids[:2].tolist()


HEADER = TraceHeader(4, 16)
PROMPT = np.arange(8, dtype=np.int32)
NOTHING = np.empty(0, np.int32)


class TestRecorded:
    def test_round_trip(self, tmp_path):
        path = tmp_path / "trace.jsonl"
        prompt = np.arange(10, dtype=np.int32)
        output = np.array([50, 51, 52], dtype=np.int32)
        other = Namespace(salt="tenant")
        more = np.concatenate([prompt, output])
        with TraceLog(path, replace(HEADER, capacity_blocks=99, eviction="lru")) as log:
            log.record(FinishedRequest(1.0, DEFAULT_NAMESPACE, prompt, output, session="a"))
            tiers = {Tier.DEVICE: 8, Tier.DISK: 4}
            log.record(FinishedRequest(2.0, DEFAULT_NAMESPACE, more, output, tiers, "a"))
            log.record(FinishedRequest(3.0, other, prompt, output, session="a"))
        trace = read(path)
        assert trace.block_size == 4
        # 10 prompt tokens and the two generated ones that have KV are three blocks.
        assert trace.blocks_of(0).tolist() == [0, 1, 2]
        assert trace.blocks_of(1).tolist() == [0, 1, 2, 3]
        assert trace.num_prompt_blocks.tolist() == [3, 4, 3]
        assert not set(trace.blocks_of(2).tolist()) & set(trace.blocks_of(0).tolist())
        assert trace.output_tokens.tolist() == [3, 3, 3]
        assert trace.cached_tokens.tolist() == [0, 8, 0]
        assert trace.sessions.tolist() == [
            0,
            0,
            1,
        ]  # a tenant has sessions of its own

    def test_what_a_line_tells(self, tmp_path):
        with TraceLog(tmp_path / "t", HEADER) as log:
            hint = RetentionHint(70, 9.0)
            reason = FinishReason.STOP
            roles = ("developer", "user", "assistant", "tool", "critic")
            log.record(
                FinishedRequest(
                    1.0, DEFAULT_NAMESPACE, PROMPT, NOTHING, {}, "", reason, 0.5, 2.0, hint, roles, 0.7
                )
            )
        text = (tmp_path / "t").read_text().splitlines()[1]
        found = json.loads(text)
        assert (found["finish_reason"], found["queue_wait_s"], found["service_s"]) == ("stop", 0.5, 2.0)
        assert (found["priority"], found["ttl_s"], found["session"]) == (70, 9.0, "")
        assert (found["roles"], found["first_token_s"], found["tools"]) == ("suat?", 0.7, [])
        trace = read(tmp_path / "t")
        assert trace.turns.tolist() == [2]
        assert trace.held_s.tolist() == [[0.5, 0.7, 2.0]]
        reader = open_trace(tmp_path / "t")
        assert len(list(reader)) == 1
        assert reader.format.measured == Measured("", 0, 4)

    def test_tools_by_keyed_hashes(self, tmp_path):
        """Equal names have equal hashes, whoever calls them; a model may write what is no valid text."""
        path, output = tmp_path / "t", np.array([70, 71], np.int32)
        called = [("bash",), ("bash", "\ud800"), ("bash",), ()]
        names = [DEFAULT_NAMESPACE, DEFAULT_NAMESPACE, Namespace(salt="another"), DEFAULT_NAMESPACE]
        with TraceLog(path, HEADER) as log:
            for number, (tools, name) in enumerate(zip(called, names, strict=True)):
                reason = FinishReason.STOP
                log.record(FinishedRequest(number, name, PROMPT + number, output, finish_reason=reason))
                tokens = np.concatenate([PROMPT + number, output])
                log.conclude(name, tokens, Conclusion(Ending.TOOL, 2, tools))
        assert b"bash" not in path.read_bytes()
        found = [read(path).conclusion_of(number).tools for number in range(4)]
        assert found[0] == found[2] != found[1]
        assert found[3] == ()

    @pytest.mark.parametrize(
        "wrong", [{"tools": "bash"}, {"tools": [1]}, {"queue_wait_s": 3.0}, {"first_token_s": 9.0}]
    )
    def test_bad_fields(self, tmp_path, wrong):
        with TraceLog(tmp_path / "t", HEADER) as log:
            log.record(FinishedRequest(1.0, DEFAULT_NAMESPACE, PROMPT, NOTHING, service_s=2.0))
        header, line = (json.loads(one) for one in (tmp_path / "t").read_text().splitlines())
        with pytest.raises(TraceError, match=r"tools|out of order"):
            read(write_lines(tmp_path / "bad", header, {**line, **wrong}))

    def test_endings_come_a_moment_later(self, tmp_path):
        """In any order; a request that ends otherwise, or whose ending nobody tells, isn't kept back."""
        path, output = tmp_path / "t", np.array([70, 71], np.int32)
        prompts = [PROMPT + number for number in range(4)]
        with TraceLog(path, HEADER) as log:
            for number, prompt in enumerate(prompts):
                reason = FinishReason.ABORT if number == 3 else FinishReason.STOP
                log.record(
                    FinishedRequest(float(number), DEFAULT_NAMESPACE, prompt, output, finish_reason=reason)
                )
            for number, ending in ((1, Ending.TOOL), (0, Ending.TURN)):
                tokens = np.concatenate([prompts[number], output])
                log.conclude(Namespace(salt="another"), tokens, Conclusion(Ending.TOOL))
                log.conclude(DEFAULT_NAMESPACE, tokens, Conclusion(ending))
            deadline = time.monotonic() + 30.0
            while path.read_bytes().count(b"\n") < 5 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert path.read_bytes().count(b"\n") == 5
        trace = read(path)
        found = [trace.conclusion_of(number).ending for number in range(4)]
        assert found == [Ending.TURN, Ending.TOOL, Ending.UNKNOWN, Ending.UNKNOWN]

    def test_salt_differs_between_recordings(self, tmp_path):
        texts = []
        for name in ("a", "b"):
            with TraceLog(tmp_path / name, HEADER) as log:
                log.record(FinishedRequest(1.0, DEFAULT_NAMESPACE, PROMPT, NOTHING, session="mine"))
            texts.append((tmp_path / name).read_text().splitlines()[1])
        assert json.loads(texts[0])["session"] != json.loads(texts[1])["session"]
        assert json.loads(texts[0])["blocks"] != json.loads(texts[1])["blocks"]

    def test_runs_follow_each_other_by_the_wall_clock(self, tmp_path):
        """A reboot begins the engine's clock anew: without the epoch the second run would come first."""
        path = tmp_path / "trace.jsonl"
        for epoch, start in ((1000.0, 500.0), (2000.0, 5.0)):
            with TraceLog(path, replace(HEADER, epoch_s=epoch)) as log:
                log.record(FinishedRequest(start, DEFAULT_NAMESPACE, PROMPT, NOTHING))
        trace = read(path)
        assert trace.num_unique_blocks == 4
        assert trace.timestamps_s.tolist() == [0.0, 505.0]
        assert trace.blocks_of(0).tolist() == [0, 1]

    def test_versions_are_not_mixed(self, tmp_path):
        path = tmp_path / "trace.jsonl"
        line = {"timestamp_s": 0, "input_tokens": 4, "output_tokens": 0, "blocks": "AAAAAAAAAAA="}
        first = {"format": "stemma-trace", "version": 1, "block_size": 4}
        write_lines(path, first, line)
        assert read(path).cached_tokens.tolist() == [-1]
        with TraceLog(path, HEADER):
            pass
        with pytest.raises(TraceError, match="versions 1 and 2"):
            read(path)

    def test_too_few_hashes(self, tmp_path):
        header = {"format": "stemma-trace", "version": 1, "block_size": 4}
        line = {"timestamp_s": 0, "input_tokens": 9, "output_tokens": 0, "blocks": ""}
        with pytest.raises(TraceError, match="0 block hashes, but the prompt alone has 3"):
            read(write_lines(tmp_path / "t.jsonl", header, line))

    def test_unwritable(self, tmp_path):
        with pytest.raises(StorageError, match="can't record"):
            TraceLog(tmp_path / "no" / "dir", HEADER)


class TestCollect:
    def test_sorts_by_arrival(self, tmp_path):
        path = write_lines(
            tmp_path / "t.jsonl", mooncake(2000, [5]), mooncake(0, [6]), mooncake(1000, [5, 7])
        )
        trace = read(path)
        assert [trace.blocks_of(i).tolist() for i in range(3)] == [[0], [1, 2], [1]]
        assert trace.timestamps_s.tolist() == [0.0, 1.0, 2.0]

    def test_chains_ids_that_are_not(self, tmp_path):
        """Equal blocks behind different prefixes have different KV."""
        path = write_lines(
            tmp_path / "t.jsonl", mooncake(0, [1, 2]), mooncake(1, [3, 2]), mooncake(2, [1, 2])
        )
        trace = read(path)
        assert [trace.blocks_of(i).tolist() for i in range(3)] == [[0, 1], [2, 3], [0, 1]]

    def test_next_and_previous_use(self, tmp_path):
        path = write_lines(
            tmp_path / "t.jsonl", mooncake(0, [1, 2]), mooncake(1, [1, 3]), mooncake(2, [1, 2])
        )
        trace = read(path)
        assert trace.next_request.tolist() == [1, 2, 2, 3, 3, 3]
        assert trace.previous_use.tolist() == [-1, -1, 0, -1, 2, 1]
        assert trace.depth_of_block.tolist() == [0, 1] * 3

    def test_empty(self, tmp_path):
        path = write_lines(tmp_path / "t.jsonl", mooncake(0, [1]))
        reader = open_trace(path)
        with pytest.raises(ConfigError, match="no requests"):
            collect("t", lambda: 512, [request for request in reader if request.timestamp_s > 1])


def test_unknown_format(tmp_path):
    path = write_lines(tmp_path / "t.txt", {"a": 1}, "hello")
    with pytest.raises(TraceError, match="no known format fits"):
        open_trace(path)
    with pytest.raises(ConfigError, match="unknown trace format 'xml'"):
        open_trace(path, "xml")
    with pytest.raises(StorageError, match="can't read"):
        open_trace(tmp_path / "missing")
