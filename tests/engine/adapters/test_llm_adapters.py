"""Adapters through the offline API: answers, what they share of the cache, and how they run together."""

from __future__ import annotations

from typing import Any

import pytest
from tests.adapters import build_adapter, merged_logits

from stemma import LLM, SamplingParams
from stemma.engine.api import GenerationRequest
from stemma.engine.build import build_engine
from stemma.engine.llm import engine_settings
from stemma.errors import AdapterError, ConfigError, UnknownModel
from stemma.types import as_tokens

pytest.importorskip("peft", reason="PEFT writes the adapters")

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPT = [(7 * i * i + 3 * i) % 400 + 3 for i in range(70)]
SMALL = {"kv_cache_memory": "4MB", "block_size": 16, "dtype": "float32", "speculation": "off"}


@pytest.fixture(scope="module")
def adapters(checkpoint, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    paths = {name: build_adapter(checkpoint, root / name, seed=seed) for seed, name in enumerate("abcd", 1)}
    paths["again"] = paths["a"]
    return paths


@pytest.fixture(scope="module")
def llm(checkpoint, adapters) -> LLM:
    return LLM(checkpoint, lora=adapters, max_loras=2, max_cpu_loras=6, **SMALL)


def tokens_of(llm, lora, prompt=PROMPT, params=GREEDY):
    return llm.generate(prompt, params, lora=lora)[0].completions[0].token_ids


def greedy_with_peft(checkpoint, adapter, num_tokens):
    tokens = list(PROMPT)
    for _ in range(num_tokens):
        tokens.append(int(merged_logits(checkpoint, adapter, tokens)[-1].argmax()))
    return tokens[len(PROMPT) :]


def test_answers_are_those_of_the_merged_model(llm, checkpoint, adapters):
    answers = {name: tokens_of(llm, name) for name in ("a", "b", None)}
    assert len({tuple(answer) for answer in answers.values()}) == 3
    for name in ("a", "b"):
        assert answers[name][:5] == greedy_with_peft(checkpoint, adapters[name], 5)


def test_cached_chunked_batched_and_alone_are_equal(checkpoint, adapters):
    alone = {}
    for name in (None, "a", "b", "c", "d"):
        fresh = LLM(checkpoint, lora=adapters, enable_prefix_cache=False, **SMALL)
        alone[name] = fresh.generate(PROMPT, GREEDY, lora=name)[0].completions[0].token_ids
        fresh.close()
    for extra in ({}, {"max_batch_tokens": 16}, {"overlap_schedule": "on"}, {"speculation": "auto"}):
        llm = LLM(checkpoint, lora=adapters, max_loras=2, **(SMALL | extra))
        for _ in range(2):  # the second time all is cached
            names = [None, "a", "b", "again", None, "c", "d", "a"]
            batch = llm.generate([PROMPT] * len(names), GREEDY, lora=names)
            for name, one in zip(names, batch, strict=True):
                assert one.completions[0].token_ids == alone["a" if name == "again" else name]
        llm.engine.check()
        llm.close()


def test_adapters_never_share_blocks(llm):
    prompt = [420 - 5 * i for i in range(70)]

    def report(lora):
        return llm.generate(prompt, GREEDY, lora=lora)[0].cache

    assert report(None).num_cached_tokens == 0
    first = report("a")
    assert first.num_cached_tokens == 0
    assert first.miss_reason == "other_adapter"
    assert "an adapter changes the KV of every token" in first.miss_detail
    assert report("b").num_cached_tokens == 0
    assert report("a").num_cached_tokens == len(prompt) - 1
    # The same content under another name is the same adapter.
    assert report("again").num_cached_tokens == len(prompt) - 1
    assert llm.generate([9, 9, 9, *prompt], GREEDY, lora="a")[0].cache.miss_reason == "cold"


def test_beams_and_siblings(llm):
    beams = llm.beam_search(PROMPT, 3, 6, lora="a")[0]
    assert [c.token_ids for c in beams.completions] != [
        c.token_ids for c in llm.beam_search(PROMPT, 3, 6)[0].completions
    ]
    many = SamplingParams(n=3, max_tokens=8, temperature=1.0, seed=5, ignore_eos=True)
    one = llm.generate(PROMPT, many, lora="b")[0]
    two = llm.generate([PROMPT, PROMPT], many, lora=["b", "a"])[0]
    assert [c.token_ids for c in one.completions] == [c.token_ids for c in two.completions]


def test_unknown_names(llm):
    with pytest.raises(UnknownModel, match="nothing"):
        llm.generate(PROMPT, GREEDY, lora="nothing")


def test_load_and_unload(llm, adapters, checkpoint, tmp_path):
    with pytest.raises(AdapterError, match="already"):
        llm.adapters.load("a", adapters["b"])
    llm.adapters.load("new", adapters["b"])
    assert tokens_of(llm, "new") == tokens_of(llm, "b")
    with pytest.raises(AdapterError, match="max_cpu_loras"):
        llm.adapters.load("more", adapters["b"])
    llm.adapters.unload("new")
    with pytest.raises(UnknownModel):
        llm.adapters.unload("new")
    with pytest.raises(UnknownModel):
        tokens_of(llm, "new")
    for name in ("", " a", "x" * 300, "a\nb", checkpoint.name):
        with pytest.raises(AdapterError):
            llm.adapters.load(name, adapters["b"])
    with pytest.raises(AdapterError, match="holds no adapter"):
        llm.adapters.load("empty", tmp_path)


def test_requests_under_way_survive_their_adapter(llm, checkpoint, adapters):
    """What runs and what waits ends as it began."""
    expected = tokens_of(llm, "b")
    parts = build_engine(engine_settings(checkpoint, lora={"short-lived": adapters["b"]}, **SMALL))
    adapter = parts.adapters.get("short-lived")
    for i in range(3):
        parts.engine.add(
            parts.engine.checked(GenerationRequest(f"r{i}", as_tokens(PROMPT), GREEDY, adapter=adapter))
        )
    seen: dict[str, list[Any]] = {f"r{i}": [] for i in range(3)}

    def step():
        for news in parts.engine.step():
            seen[news.state.request.request_id].extend(news.token_ids)

    step()
    parts.adapters.unload("short-lived")
    while parts.engine.has_work:
        step()
    assert list(seen.values()) == [expected] * 3
    parts.engine.close()


def test_bad_settings(checkpoint, adapters, tmp_path):
    with pytest.raises(ConfigError, match="max_cpu_loras"):
        LLM(checkpoint, max_loras=8, max_cpu_loras=2)
    with pytest.raises(AdapterError, match="rank 4"):
        LLM(checkpoint, lora={"a": adapters["a"]}, max_lora_rank=2, **SMALL)
    with pytest.raises(AdapterError, match="holds no adapter"):
        LLM(checkpoint, lora={"a": tmp_path}, **SMALL)
