"""The notes of the last requests are bounded, in number and bytes."""

from __future__ import annotations

import numpy as np

from stemma.engine.api import CacheReport, GenerationRequest
from stemma.prefix.explain import Parting
from stemma.prefix.index import MAX_FOLLOWING
from stemma.server.observe.explanations import Explanation, Explanations
from stemma.terminal_text import visible
from stemma.types import Tier


def note(name: str, num_cached: int = 3, num_prompt: int = 100) -> Explanation:
    parting = Parting(num_cached, (7,) * MAX_FOLLOWING)
    request = GenerationRequest(name, np.arange(num_prompt, dtype=np.int32))
    return Explanation.of(request, CacheReport(num_prompt, {Tier.DEVICE: num_cached}, parting=parting))


def test_a_note_is_small_whatever_the_prompt():
    made = note("a", 50_000, 100_000)
    assert made.before == tuple(range(50_000 - MAX_FOLLOWING, 50_000))
    assert made.yours == tuple(range(50_000, 50_000 + MAX_FOLLOWING))
    assert made.num_bytes < 4096
    assert note("b", 3).before == (0, 1, 2)
    assert note("c", 99).yours == (99,)


def test_the_oldest_notes_are_dropped_first():
    notes = Explanations(max_explanations=2)
    for name in ("a", "b", "c"):
        notes.add(note(name))
    assert len(notes) == 2
    assert notes.find("a") is None
    assert notes.find("b") is not None
    last = notes.last()
    assert last is not None
    assert last.request_id == "c"


def test_notes_are_bounded_in_bytes():
    one = note("a")
    notes = Explanations(max_bytes=3 * one.num_bytes)
    for number in range(9):
        notes.add(note(str(number)))
    assert len(notes) == 3
    assert notes.num_bytes == 3 * one.num_bytes
    notes.add(note("8"))
    assert (len(notes), notes.num_bytes) == (3, 3 * one.num_bytes)


def test_a_completion_of_several_prompts_is_found_by_its_own_id():
    notes = Explanations()
    notes.add(note("cmpl-1-0"))
    found = notes.find("cmpl-1")
    assert found is not None
    assert found.request_id == "cmpl-1-0"
    assert Explanations().last() is None


def test_a_terminal_obeys_no_text():
    assert visible("a\x1b[31m\n\u202eb") == "a\\x1b[31m\\n\\u202eb"
