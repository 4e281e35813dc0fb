"""The offline API, as a user calls it."""

from __future__ import annotations

import pytest

import stemma
from stemma import LLM, SamplingParams
from stemma.config.settings import CacheSettings, EngineSettings, ModelSettings
from stemma.engine.build import build_engine
from stemma.errors import ConfigError, PromptTooLong
from stemma.types import FinishReason
from tests import checkpoints

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(checkpoint) -> LLM:
    return LLM(checkpoint, kv_cache_memory="2MB", block_size=16, max_waiting=4)


def test_public_names():
    assert stemma.__all__ == ["LLM", "SamplingParams", "__version__"]
    with pytest.raises(AttributeError, match="nothing"):
        _ = stemma.nothing


def test_text_and_token_ids_are_the_same_prompt(llm):
    text = "The river runs through the valley."
    by_text, by_ids = llm.generate(text, GREEDY)[0], llm.generate(llm.tokenizer.encode(text), GREEDY)[0]
    assert by_text.text == by_ids.text == llm.tokenizer.decode(by_text.completions[0].token_ids)
    assert by_ids.cache.num_cached_tokens == len(by_ids.prompt_token_ids) - 1
    assert by_text.completions[0].finish_reason is FinishReason.LENGTH


def test_a_batch_keeps_its_order_and_may_exceed_the_queue(llm):
    prompts = [f"Question number {i}: how many?" for i in range(10)]
    batch = llm.generate(prompts, GREEDY)
    assert [g.text for g in batch] == [llm.generate(p, GREEDY)[0].text for p in prompts]
    llm.engine.check()


def test_params_per_prompt(llm):
    long = SamplingParams(max_tokens=3, n=2, seed=1, logprobs=1, ignore_eos=True)
    one, two = llm.generate([[5, 6, 7], [8, 9]], [GREEDY, long])
    assert len(one.completions[0].token_ids) == 6
    assert one.completions[0].logprobs == []
    assert [len(c.logprobs) for c in two.completions] == [3, 3]
    with pytest.raises(ValueError, match="zip"):
        llm.generate([[1], [2]], [GREEDY])


def test_a_conversation_reuses_its_first_round(llm):
    messages = [{"role": "user", "content": "How many days has a week?"}]
    first = llm.chat(messages, GREEDY)[0]
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And a year?"},
    ]
    second = llm.chat([messages], GREEDY)[0]
    assert second.cache.num_cached_tokens >= len(first.prompt_token_ids)
    assert second.cache.miss_reason in ("diverged", "extends")


def test_errors_leave_nothing_behind(llm):
    with pytest.raises(PromptTooLong):
        llm.generate([[1, 2, 3], [4] * 5000], GREEDY)
    assert not llm.engine.has_work
    llm.engine.runner, runner = None, llm.engine.runner
    with pytest.raises(stemma.errors.StemmaError, match="AttributeError"):
        llm.generate([[1, 2, 3], [4, 5]], GREEDY)
    llm.engine.runner = runner
    assert not llm.engine.has_work
    llm.engine.check()
    assert len(llm.generate([1, 2, 3], GREEDY)[0].completions[0].token_ids) == 6


def test_settings_are_checked(checkpoint):
    with pytest.raises(ConfigError, match="unknown setting 'blocksize'"):
        LLM(checkpoint, blocksize=16)
    with pytest.raises(ConfigError, match="block_size"):
        LLM(checkpoint, block_size=0)
    with pytest.raises(ConfigError, match="eviction policy"):
        LLM(checkpoint, eviction="nope", kv_cache_memory="1MB")
    with pytest.raises(ConfigError, match="block"):
        LLM(checkpoint, kv_cache_memory="1kB")


@pytest.mark.slow
def test_a_thousand_requests_leave_memory_flat(checkpoint):
    """Every structure that outlives a request has a bound (the corpus of drafts fills up later).

    So does what the hazard policy remembers (tests/prefix/eviction/test_hazard.py), but at 2^18 blocks.
    """
    import gc
    import tracemalloc

    options = {"max_waiting": 4, "speculation": "prompt_lookup", "eviction": "lru"}
    llm = LLM(checkpoint, block_size=16, kv_cache_memory="2MB", **options)

    def serve(count: int, salt: int) -> None:
        prompts = [[3 + (salt * count + i * 7 + k) % 490 for k in range(20 + i % 30)] for i in range(count)]
        llm.generate(prompts, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))

    tracemalloc.start()
    try:
        # Until the memory of evicted blocks is at its bound.
        for salt in range(6):
            serve(100, salt)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for salt in range(6, 16):
            serve(100, salt)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    llm.engine.check()
    assert llm.engine.cache.stats().num_evicted_blocks > 0
    assert grown < 120_000, f"{grown} bytes grown by 900 requests"


@pytest.mark.parametrize("generation", [None, 0])
@pytest.mark.parametrize("config", [None, 1])
def test_ends_are_those_of_config_generation_config_and_tokenizer(tmp_path, generation, config):
    """Without the tokenizer's, answers of many a checkpoint would run to the end of their budget."""
    path = checkpoints.build("llama", tmp_path, generation={"eos_token_id": generation}, eos_token_id=config)
    model = ModelSettings(path=path, device="cpu")
    parts = build_engine(EngineSettings(model=model, cache=CacheSettings(kv_cache_memory=10**6)))
    named = {token_id for token_id in (generation, config) if token_id is not None}
    assert parts.engine.limits.eos_token_ids == named | {parts.tokenizer.eos_token_id}
