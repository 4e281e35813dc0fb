from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any, cast

import pytest

from stemma.errors import ConfigError
from stemma_lab.measure.workloads import WORKLOADS, Session, WorkloadOptions, build


def count_words(text: str) -> int:
    return len(text.split())


@pytest.fixture
def gsm8k(tmp_path: Path) -> Path:
    file = tmp_path / "train.jsonl"
    rows = [{"question": f"q{number}?", "answer": f"a{number}"} for number in range(12)]
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return file


@pytest.fixture
def mmlu(tmp_path: Path) -> Path:
    for part, count in (("dev", 3), ("test", 4)):
        (tmp_path / part).mkdir()
        with (tmp_path / part / f"wood_lore_{part}.csv").open("w", newline="") as stream:
            for number in range(count):
                csv.writer(stream).writerow([f"{part} {number}, which?", "oak", "elm", "ash", "yew", "C"])
    return tmp_path


@pytest.fixture
def verse(tmp_path: Path) -> Path:
    file = tmp_path / "verse.txt"
    file.write_text("\n".join(f"line {number} of a verse" for number in range(50)))
    return file


def prompts(sessions: list[Session]) -> list[str]:
    return [session.turns[0] for session in sessions]


def test_same_seed_same_prompts(gsm8k: Path, verse: Path) -> None:
    data = {"few-shot": gsm8k, "sonnet": verse}
    for name in WORKLOADS:
        options = WorkloadOptions(num_requests=6, data=data.get(name), seed=3)
        other = WorkloadOptions(num_requests=6, data=data.get(name), seed=4)
        assert build(name, options, None) == build(name, options, None)
        assert build(name, options, None) != build(name, other, None)


def test_lengths_are_those_asked_for() -> None:
    options = WorkloadOptions(num_requests=5, input_tokens=37, prefix_tokens=20)

    assert [count_words(p) for p in prompts(build("random", options, count_words))] == [37] * 5
    assert [count_words(p) for p in prompts(build("shared-prefix", options, count_words))] == [57] * 5


def test_random_prompts_share_nothing_and_prefixes_are_shared_in_turn() -> None:
    options = WorkloadOptions(num_requests=4, input_tokens=30, prefix_tokens=10, num_prefixes=2)
    assert len({p[:40] for p in prompts(build("random", options, None))}) == 4

    heads = [p.split("\n\n")[0] for p in prompts(build("shared-prefix", options, None))]
    assert heads[0] == heads[2] != heads[1] == heads[3]


def test_repeats_come_in_rounds() -> None:
    asked = prompts(build("repeat", WorkloadOptions(num_requests=6, num_repeats=3), None))

    assert len(set(asked)) == 2
    assert asked == asked[:2] * 3


def test_chats_share_a_system_prompt() -> None:
    sessions = build("multi-turn", WorkloadOptions(num_sessions=3, num_turns=4), None)

    assert [len(session.turns) for session in sessions] == [4, 4, 4]
    assert len({session.system for session in sessions}) == 1


def test_gsm8k_prompts_share_the_shots(gsm8k: Path) -> None:
    asked = prompts(build("few-shot", WorkloadOptions(num_requests=9, num_shots=2, data=gsm8k), None))

    head = "Question: q0?\nAnswer: a0\n\nQuestion: q1?\nAnswer: a1\n\nQuestion: "
    assert all(p.startswith(head) and p.endswith("?\nAnswer:") for p in asked)
    assert len(set(asked)) == 9


def test_mmlu_prompts_have_the_benchmarks_form(mmlu: Path) -> None:
    asked = prompts(build("few-shot", WorkloadOptions(num_requests=2, num_shots=1, data=mmlu), None))

    choices = "A. oak\nB. elm\nC. ash\nD. yew\nAnswer:"
    title = "The following are multiple choice questions about wood lore.\n\n"
    head = f"{title}dev 0, which?\n{choices} C\n\n"
    assert all(p.startswith(head) and p.endswith(choices) for p in asked)


def test_verses_start_alike(verse: Path) -> None:
    asked = prompts(build("sonnet", WorkloadOptions(num_requests=3, data=verse), None))

    assert all("line 0 of a verse\nline 1 of a verse" in p for p in asked)
    assert len(set(asked)) == 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("few-shot", None, "needs --data"),
        ("few-shot", "{}\n", "line 1: needs question and answer"),
        ("few-shot", '{"question": "q", "answer": "a"}', "too few for 5 shots"),
        ("sonnet", "\n", "is empty"),
    ],
)
def test_bad_data_is_named(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    data = None
    if content is not None:
        data = tmp_path / "data"
        data.write_text(content)
    with pytest.raises(ConfigError, match=message):
        build(cast(Any, name), WorkloadOptions(data=data), None)


def test_missing_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        build("few-shot", WorkloadOptions(data=tmp_path / "gone"), None)
    with pytest.raises(ConfigError, match="holds no test"):
        build("few-shot", WorkloadOptions(data=tmp_path), None)
