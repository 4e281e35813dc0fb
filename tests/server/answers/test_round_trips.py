"""Calls as chat templates write them are read back, whatever the arguments and however the text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.answers.reading import cut, joined, pieces_read, reader
from tests.server.answers.written_calls import EXPECTED, ONE_CALL, WRITERS, written

from stemma.server.answers.events import fold

TEXT = st.text(alphabet="ab \n\t\"\\'{}[]()<>=/,:;.|0é日", max_size=30)
PLAIN = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | TEXT
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "city": TEXT,
        "days": st.integers(-(10**6), 10**6),
        "part": st.floats(allow_nan=False, allow_infinity=False),
        "sure": st.booleans(),
        "list": st.lists(PLAIN, max_size=4),
        "map": st.dictionaries(st.sampled_from(["a", "b_c", "d"]), PLAIN, max_size=3),
    },
)
CALLS = st.lists(st.tuples(st.sampled_from(["get_weather"]), ARGUMENTS), min_size=1, max_size=3)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", WRITERS)
@settings(deadline=None, max_examples=60)
@given(calls=CALLS, cuts=st.sets(st.integers(1, 400)))
def test_what_a_template_writes_is_read_back(
    name: str, calls: list[tuple[str, dict[str, Any]]], cuts: set[int]
):
    calls = calls[:1] if name in ONE_CALL else calls
    text = written(name, calls)
    made = reader(EXPECTED[name][0], "harmony" if name == "harmony" else None)
    events = pieces_read(made, cut(text, cuts))
    answer = fold(events)
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == calls
    assert answer.content == ""
    assert joined(events) == joined(pieces_read(made, [text]))
    if name == "kimi_k2":
        assert answer.calls[0].call_id == "functions.get_weather:0"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", WRITERS)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_a_call_that_is_cut_off_keeps_the_calls_before_it(name: str, data: st.DataObject):
    if name in ONE_CALL:
        return
    first = ("get_weather", {"city": "Paris", "days": 3})
    text = written(name, [first, ("get_weather", {"city": "Rome in Italy", "list": [1, 2]})])
    end = data.draw(st.integers(text.rindex("get_weather"), len(text)))
    answer = fold(pieces_read(reader(EXPECTED[name][0]), [text[:end]]))
    assert (answer.calls[0].name, json.loads(answer.calls[0].arguments)) == first
    if end > text.index("Rome") + 4 and len(answer.calls) > 1:
        assert "Rome" in answer.calls[1].arguments
