"""Values in prompts are told by their shape, from any place inside them."""

from __future__ import annotations

import time

import pytest

from stemma_lab.divergence.shapes import SHAPES, TokenStarts, value_at, value_from

VALUES = [
    ("uuid", "3f2504e0-4f89-11d3-9a0c-0305e82c3301"),
    ("timestamp", "2026-11-20T08:15:30Z"),
    ("timestamp", "2026-11-20 08:15"),
    ("timestamp", "08:15:30"),
    ("timestamp", "1795339407"),
    ("date", "2026-11-20"),
    ("date", "20.11.2026"),
    ("date", "November 20, 2026"),
    ("url", "https://example.org/a?b=1"),
    ("email", "ada@example.org"),
    ("path", "/srv/data/in.csv"),
    ("path", "C:\\Users\\ada\\x.txt"),
    ("address", "10.0.0.7:8000"),
    ("identifier", "user-38121"),
    ("number", "4,711.5"),
    ("name", "Ada Lovelace"),
]


@pytest.mark.parametrize(("shape", "value"), VALUES)
def test_every_character_of_a_value_tells_its_shape(shape: str, value: str):
    text = f"it says {value}; and more"
    for at in range(8, 8 + len(value)):
        found = value_at(text, at)
        assert found is not None
        assert found.shape == shape, (at, found)
        assert text[found.start : found.end] == value


def test_own_words_have_no_shape():
    assert value_at("please write a letter", 9) is None
    assert value_at("It is open. You may enter.", 12) is None


def test_a_value_is_found_where_it_begins_and_nowhere_else():
    text = "today is 2026-11-20, tomorrow is 2026-11-21"
    assert (found := value_from(text, 8, "date")) is not None
    assert text[found.start : found.end] == "2026-11-20"
    assert value_from(text, 0, "date") is None
    assert value_from(text, 13, "uuid") is None


def test_no_shape_takes_long_on_hostile_text():
    """A client chooses the text."""
    for hostile in ("1" * 5000, "-1" * 2500, "a-" * 2500, "/a" * 2500, "A" * 5000, "Aa " * 1700, "1:" * 2500):
        started = time.perf_counter()
        for at in (0, 1000, len(hostile) - 1):
            value_at(hostile, at)
            for shape in SHAPES:
                value_from(hostile, at, shape)
        assert time.perf_counter() - started < 0.5


def test_ends_of_tokens_add_up_also_where_a_tokenizer_joins_them():
    words = {1: "to", 2: "day", 3: " is"}
    plain = TokenStarts(lambda ids: "".join(words[i] for i in ids))
    assert plain.ends([1, 2, 3], "today is") == [2, 5, 8]
    joined = TokenStarts(lambda ids: " ".join(words[i].strip() for i in ids))
    assert joined.ends([1, 2, 3], "to day is") == [2, 6, 9]
