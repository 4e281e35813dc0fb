"""What `benchmarks.parsers` compares readers on is read by ours, and its texts hold what they should."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.parsers import FORMS, bfcl_cases, own_cases


def test_ours_reads_all_texts_of_the_benchmark():
    cases = list(own_cases())
    assert len(cases) == 8 * len(FORMS)
    assert [case.text for case in cases if not case.is_ours_right()] == []


def test_a_case_of_bfcls_is_its_first_right_answer(tmp_path: Path):
    """Arguments that may be left out are; words for types are JSON Schema's."""
    types = {
        "type": "dict",
        "properties": {"a": {"type": "float"}, "b": {"type": "any"}, "c": {"type": "tuple"}},
    }
    case = {"id": "simple_1", "function": [{"name": "f", "parameters": types}]}
    truth = {"id": "simple_1", "ground_truth": [{"f": {"a": [1.5, 2], "b": ["", 3], "c": [[1, 2]]}}]}
    (tmp_path / "possible_answer").mkdir()
    for path, what in ((tmp_path, case), (tmp_path / "possible_answer", truth)):
        (path / "BFCL_v4_simple_python.json").write_text(json.dumps(what))
    found = list(bfcl_cases(tmp_path))
    assert {json.dumps(one.calls) for one in found} == {json.dumps([["f", {"a": 1.5, "c": [1, 2]}]])}
    assert found[0].tools["f"]["properties"] == {"a": {"type": "number"}, "b": {}, "c": {"type": "array"}}
    assert all(one.is_ours_right() for one in found)
