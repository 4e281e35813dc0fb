"""Every fault of a JSON file is named with its place; every key of a good one has a place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.errors import ConfigError
from stemma_mindie.config.json_text import read_json

AS_PRINTED = Path(__file__).parents[3] / "tests" / "data" / "mindie" / "pool_as_printed.txt"
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)
)


@given(st.dictionaries(st.text(), TREES, max_size=5), st.sampled_from([None, 1, 4]), st.booleans())
@settings(max_examples=150, deadline=None)
def test_good_json_is_read_as_by_the_standard_library(
    value: dict[str, object], indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert read_json(text).value == json.loads(text)


@given(st.text(alphabet='{}[]:,"a1 \n\\tru-.', max_size=30))
@settings(max_examples=200, deadline=None)
def test_any_text_is_an_object_or_a_config_error(text: str) -> None:
    try:
        expected = json.loads(text)
    except ValueError:
        expected = None
    try:
        value, refusal = read_json(text).value, ""
    except ConfigError as error:
        value, refusal = None, str(error)
    assert value == expected or "line " in refusal
    if isinstance(expected, dict):
        assert value == expected or "twice" in refusal


def test_places_of_keys_and_items() -> None:
    document = read_json('{\n  "a": {"b": 1},\n  "c": [\n    5, {"d": 2}]\n}')

    assert document.where(("a", "b")) == "line 2, column 9"
    assert document.where(("c", 1, "d")) == "line 4, column 9"
    assert document.where(("c", 0, "gone")) == "line 4, column 5"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a" 1}', """line 1, column 6: expected ':' between "a" and 1"""),
        ('{"a": 1 "b": 2}', """line 1, column 9: expected ',' or '}', found "b\""""),
        ('{"a": 1,}', "line 1, column 8: a comma before }"),
        ('{"a": [1, 2}', 'line 1, column 7: the [ of "a" that opens here is never closed: ] is missing'),
        ('{"a": {"b": 1}', "line 1, column 1: the { that opens here is never closed: } is missing"),
        ('{"a": 1, "a": 2}', 'line 1, column 10: "a" is given twice'),
        ('{"a": True}', "line 1, column 7: expected a value, found True"),
        ("{a: 1}", "line 1, column 2: expected a key in double quotes, found a"),
        ('{"a": 1} x', "line 1, column 10: the object ends before this"),
        ("[1]", "line 1, column 1: the file must be one object"),
        ("", "line 1, column 1: the file must be one object"),
        ('{"a": "x\ny"}', "line 1, column 7"),
        ('{"a":' + "[" * 70 + "]" * 70 + "}", "nested deeper than 64"),
    ],
)
def test_a_fault_is_named_with_its_place(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_json(text)
    assert expected in str(raised.value)


def test_the_manuals_own_example_shows_both_its_faults() -> None:
    """The fragment as printed, and put between braces as a reader would."""
    printed = AS_PRINTED.read_text(encoding="utf-8").rstrip()
    with pytest.raises(ConfigError) as raised:
        read_json("{\n" + printed.rstrip(",") + "\n}\n")

    lines = str(raised.value).splitlines()
    assert lines[1:] == [
        "  line 1, column 1: the { that opens here is never closed: } is missing",
        """  line 19, column 40: expected ':' between "backend" and "kv_pool_backend_name\"""",
    ]
    with pytest.raises(ConfigError) as raised:
        read_json(printed)
    assert [line.strip().split(": ")[0] for line in str(raised.value).splitlines()[1:]] == [
        "line 1, column 1",
        "line 1, column 19",
        "line 18, column 40",
    ]
