"""What compiled grammars may hold: of all, of each tenant, and however large a grammar claims to be."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from stemma.engine.sampling.grammar import GrammarSpec
from stemma.engine.sampling.grammar_compiler import GrammarCompiler
from stemma.engine.sampling.grammar_store import BASE_BYTES, GrammarStore
from stemma.errors import InvalidRequest, Overloaded, RateLimited
from stemma.model.files.tiny import TURN_END, build_tokenizer


class Thing:
    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


def test_what_nobody_uses_is_forgotten_first_and_of_the_tenant_who_asks() -> None:
    store = GrammarStore(100)
    for name in "abc":
        store.keep(("ada", name), Thing(20))
    store.keep(("bob", "x"), Thing(30))
    assert store.find(("ada", "a")) is None, "more than ada's half"
    assert store.find(("ada", "b")) is not None
    assert store.find(("ada", "x")) is None, "bob's own"
    store.make_room(20, "ada")
    assert store.find(("ada", "c")) is None
    assert store.find(("bob", "x")) is not None
    store.keep(("eve", "x"), Thing(50))
    assert store.find(("ada", "b")) is not None
    assert store.budget.held() == 100


def test_grammars_in_use_are_counted_and_found_though_forgotten() -> None:
    store = GrammarStore(100)
    used = [Thing(25), Thing(25)]
    for number, one in enumerate(used):
        store.keep(("ada", str(number)), one)
    with pytest.raises(RateLimited):
        store.make_room(1, "ada")
    others = [Thing(40)]
    store.keep(("bob", "x"), others[0])
    with pytest.raises(Overloaded):
        store.make_room(20, "eve")
    assert store.find(("ada", "0")) is used[0]
    used[0].num_bytes = 1000  # it grew
    with pytest.raises(Overloaded):
        store.make_room(1, "eve")
    used.clear()
    store.make_room(20, "ada")


def test_remembered_grammars_hold_no_more_than_their_budget() -> None:
    """Fourteen grammars of a few bytes, each of which took 80 MB and more, for ever."""
    tokenizer = build_tokenizer()
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.vocab[TURN_END]], max_bytes=64 * 2**20)
    compiler.compile(GrammarSpec("regex", "a+"))
    before = resident_bytes()
    for letter in "abcdefghijklmn":
        with pytest.raises(InvalidRequest, match="too many"):  # it could be followed for a token or two
            compiler.compile(GrammarSpec("regex", f"{letter}{{1000000}}"))
        assert compiler.compile(GrammarSpec("regex", f"{letter}{{30000}}")).num_bytes > BASE_BYTES
    gc.collect()
    assert compiler.budget.held() <= 64 * 2**20
    assert resident_bytes() - before < 200 * 2**20


def resident_bytes() -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) * 1024
