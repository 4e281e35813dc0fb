"""What a client sees of the real server, with the official client where there is one."""

from __future__ import annotations

import asyncio
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import orjson
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from openai import AsyncOpenAI, OpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import BLOCK_SIZE, Served, start_server

LONG = "The harbour library opens at nine in the morning and closes at eight in the evening. " * 4


def test_miss_hit_and_partial_hit(served: Served) -> None:
    miss = served.complete(LONG + "When does it open?")
    hit = served.complete(LONG + "When does it open?")
    partial = served.complete(LONG + "Who asks?")

    num_prompt = miss["usage"]["prompt_tokens"]
    assert miss["usage"]["stemma"]["miss_reason"] == "cold"
    assert hit["usage"]["prompt_tokens_details"]["cached_tokens"] == num_prompt - 1
    assert hit["choices"] == miss["choices"]
    shared = len(served.engine.tokenizer.encode(LONG))
    assert partial["usage"]["prompt_cache_hit_tokens"] >= shared - 1
    assert partial["usage"]["stemma"]["miss_reason"] == "diverged"
    assert partial["usage"]["stemma"]["cached_tokens_by_tier"] == {
        "device": partial["usage"]["prompt_cache_hit_tokens"]
    }


def test_overlapping_steps_answer_the_same(served: Served, tiny_model: Path) -> None:
    kinds = ({}, {"stop": ["e"]}, {"n": 3, "temperature": 1.0, "seed": 2}, {"presence_penalty": 1.0})
    bodies = [
        {"model": "tiny", "prompt": f"{i} and so on", "max_tokens": 12, "temperature": 0.0} | kind
        for kind in kinds
        for i in range(4)
    ]

    def texts(server: Served) -> list[list[str]]:
        with ThreadPoolExecutor(4) as clients:
            answers = list(clients.map(lambda body: server.post("/v1/completions", **body).json(), bodies))
        return [[choice["text"] for choice in answer["choices"]] for answer in answers]

    other, stop = start_server(tiny_model, overlap_schedule="on", speculation="off")
    try:
        assert texts(other) == texts(served)
    finally:
        stop()


def test_a_shared_prefix_under_a_block_is_reused(served: Served) -> None:
    served.complete([*range(5, 5 + BLOCK_SIZE - 6), 100, 101])
    second = served.complete([*range(5, 5 + BLOCK_SIZE - 6), 200, 201])

    assert second["usage"]["prompt_cache_hit_tokens"] == BLOCK_SIZE - 6


def test_two_round_dialogue_over_generate(served: Served) -> None:
    """The second prompt is first question + first answer + second question, as in MindIE's manual."""
    question = (
        LONG + "Question: Which of these should be reported?\na) A girl reads.\nb) Boys argue.\nAnswer:"
    )
    parameters = {"max_new_tokens": 32, "details": True}
    first = served.post("/generate", inputs=question, parameters=parameters).json()
    prompt = question + first["generated_text"] + "\nQuestion: And if they deny it?\nAnswer:"
    second = served.post("/generate", inputs=prompt, parameters=parameters)

    num_first = first["details"]["prompt_tokens"]
    assert first["details"]["stemma"]["cached_tokens"] == 0
    assert int(second.headers["x-stemma-cached-tokens"]) >= num_first
    assert second.json()["details"]["stemma"]["cached_tokens"] >= num_first


@hypothesis_settings(
    max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(
    prompt=st.lists(st.integers(3, 500), min_size=1, max_size=60),
    max_tokens=st.integers(1, 24),
    n=st.integers(1, 3),
    seed=st.integers(0, 2**63 - 1),
    temperature=st.sampled_from([0.0, 0.8]),
)
def test_streamed_text_joined_is_the_whole_text(
    served: Served, prompt: list[int], max_tokens: int, n: int, seed: int, temperature: float
) -> None:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "n": n, "seed": seed}
    body |= {"temperature": temperature, "top_p": 0.95, "logprobs": 2}
    whole = served.post("/v1/completions", **body).json()
    texts = dict.fromkeys(range(n), "")
    tokens: dict[int, list[str]] = {index: [] for index in range(n)}
    reasons: dict[int, str] = {}
    streamed = served.post("/v1/completions", stream=True, **body)
    for line in streamed.text.split("\n\n")[:-2]:
        for choice in orjson.loads(line[6:])["choices"]:
            texts[choice["index"]] += choice["text"]
            tokens[choice["index"]] += choice["logprobs"]["tokens"]
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]

    choices = whole["choices"]
    assert texts == {choice["index"]: choice["text"] for choice in choices}
    assert tokens == {choice["index"]: choice["logprobs"]["tokens"] for choice in choices}
    assert reasons == {choice["index"]: choice["finish_reason"] for choice in choices}


def test_official_client(served: Served) -> None:
    client = OpenAI(base_url=f"{served.url}/v1", api_key="unused")
    messages = [{"role": "user", "content": LONG}]
    options = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options)
    )

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1


async def test_sixteen_prompts_at_once_compute_their_prefix_once(served: Served) -> None:
    client = AsyncOpenAI(base_url=f"{served.url}/v1", api_key="unused")
    answers = await asyncio.gather(
        *(
            client.completions.create(model="tiny", prompt=f"{LONG}Question {number}:", max_tokens=4)
            for number in range(16)
        )
    )

    shared = len(served.engine.tokenizer.encode(LONG))
    cached = sorted(answer.usage.prompt_tokens_details.cached_tokens for answer in answers)
    assert cached[0] == 0
    assert cached[1] >= shared - 1


def test_tenants_do_not_share(served: Served) -> None:
    served.complete(LONG, cache_salt="alice")

    assert served.complete(LONG, cache_salt="bob")["usage"]["prompt_cache_hit_tokens"] == 0
    assert served.complete(LONG, cache_salt="alice")["usage"]["prompt_cache_hit_tokens"] > 0


def test_stop_strings_and_tokens(served: Served) -> None:
    text = served.complete(LONG, max_tokens=24)["choices"][0]["text"]
    stop = text[8:11]
    stopped = served.complete(LONG, max_tokens=24, stop=stop)["choices"][0]
    included = served.complete(LONG, max_tokens=24, stop=[stop], include_stop_str_in_output=True)

    assert stopped["text"] == text[: text.index(stop)]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)
    assert included["choices"][0]["text"] == text[: text.index(stop) + len(stop)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "body",
    [
        {"stop_token_ids": [10**6], "min_tokens": 2},
        {"stop_token_ids": [-5], "min_tokens": 2},
        {"seed": -(2**63)},
        {"seed": 2**64 - 1, "temperature": 1.5},
        {"top_k": 10**6, "temperature": 1},
        {"min_p": 1.0, "temperature": 1},
        {"repetition_penalty": 1e30},
        {"temperature": 1e-30},
        {"temperature": 1e30},
        {"n": 32, "max_tokens": 3, "temperature": 1},
        {"max_tokens": 10**9, "stop": list("abcdefghijklmnopqrstuvwxyz ")},
    ],
)
def test_extreme_but_valid_requests_are_answered_or_refused(served: Served, body: dict) -> None:
    request = {"model": "tiny", "prompt": "Hello there", "max_tokens": 8, **body}
    response = served.post("/v1/completions", **request)

    assert response.status_code in (200, 400), response.text


def test_prompts_that_never_fit(served: Served) -> None:
    limit = served.engine.max_model_len
    for prompt in ([5] * limit, [5] * 100_000, "word " * 100_000):
        response = served.post("/v1/completions", model="tiny", prompt=prompt)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
    assert served.post("/generate", inputs="word " * 10_000).status_code == 422
    assert served.post("/v1/completions", model="tiny", prompt=[5, 511, 10**5]).status_code == 400
    assert served.complete([5] * (limit - 1), max_tokens=5)["usage"]["completion_tokens"] == 1


def test_metrics_follow(served: Served) -> None:
    def sample(name: str, **labels: str) -> float:
        text = httpx.get(f"{served.url}/metrics").text
        return next(
            s.value
            for family in text_string_to_metric_families(text)
            for s in family.samples
            if s.name == name and s.labels == labels
        )

    before = sample("stemma_cached_tokens_total", tier="device"), sample("stemma_prompt_tokens_total")
    served.complete(LONG)
    usage = served.complete(LONG)["usage"]

    cached = sample("stemma_cached_tokens_total", tier="device") - before[0]
    assert cached == usage["prompt_cache_hit_tokens"]
    assert sample("stemma_prompt_tokens_total") - before[1] == 2 * usage["prompt_tokens"]
    assert sample("stemma_requests_total", api="completions", outcome="ok") >= 2


def test_tree(served: Served) -> None:
    served.complete("The harbour library opens at nine.")
    served.complete("The harbour library closes at eight.")
    drawing = httpx.get(f"{served.url}/admin/cache/tree").text

    assert '"The harbour library"' in drawing
    assert "opens at nine" in drawing


def test_beam_search_with_the_official_client(served: Served) -> None:
    """All APIs give the same answers, streamed or whole, and count the prompt once."""
    client = OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0)
    beam = {"use_beam_search": True, "ignore_eos": True}
    common = {
        "model": "tiny",
        "prompt": LONG,
        "max_tokens": 12,
        "n": 3,
        "temperature": 0.7,
        "extra_body": beam,
    }
    before = served.stats()["num_prompt_tokens"]
    whole = client.completions.create(**common)
    num_prompt = whole.usage.prompt_tokens
    assert served.stats()["num_prompt_tokens"] == before + num_prompt
    assert whole.usage.completion_tokens == 3 * 12
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    texts = [choice.text for choice in whole.choices]
    assert len(set(texts)) == 3

    chunks = [c for c in client.completions.create(**common, stream=True) if c.choices[0].text]
    assert {c.choices[0].index: c.choices[0].text for c in chunks} == dict(enumerate(texts))
    one = client.completions.create(**common | {"n": 1, "extra_body": {**beam, "best_of": 3}})
    assert [choice.text for choice in one.choices] == texts[:1]
    assert one.usage.prompt_tokens_details.cached_tokens == num_prompt - 1
    body = {"prompt": LONG, "max_tokens": 12, "n": 3, **beam}
    assert served.post("/generate", **body).json() == {"text": [LONG + text for text in texts]}
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=5,
        n=2,
        logprobs=True,
        top_logprobs=1,
        extra_body=beam,
    )
    scores = [sum(entry.logprob for entry in choice.logprobs.content) for choice in chat.choices]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 2


@pytest.mark.one_in(3)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("num_prompts", [1, 3])
@pytest.mark.parametrize("use_beam_search", [False, True])
async def test_a_client_that_leaves_frees_its_blocks(
    served: Served, stream: bool, num_prompts: int, use_beam_search: bool
) -> None:
    body = {
        "use_beam_search": use_beam_search,
        "model": "tiny",
        "prompt": [f"{number}: {LONG}" for number in range(num_prompts)],
        "max_tokens": 150,
        "ignore_eos": True,
        "n": 2,
        "stream": stream,
    }
    before = served.stats()["num_generated_tokens"]
    async with httpx.AsyncClient(timeout=60) as client:
        url = f"{served.url}/v1/completions"
        if stream and not use_beam_search:  # a beam search streams nothing before its end
            async with client.stream("POST", url, json=body) as response:
                async for _ in response.aiter_bytes():
                    break
        else:
            request = asyncio.create_task(client.post(url, json=body))
            while (await served.engine.stats()).num_generated_tokens == before:
                await asyncio.sleep(0.005)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
    deadline = time.monotonic() + 10
    while (stats := served.stats())["num_running"] or stats["num_waiting"]:
        assert time.monotonic() < deadline
    assert stats["num_generated_tokens"] - before < 150 * 2 * num_prompts
    # Blocks of a round of beams wait for the next one until the loop is idle.
    while stats["num_free_blocks"] + stats["num_cached_blocks"] != stats["num_blocks"]:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
        stats = served.stats()


async def test_a_storm_of_clients_that_come_and_go_leaves_nothing_behind(served: Served) -> None:
    """Sixty requests of all kinds, a third of them given up at a random time; then the books must balance."""
    rng = random.Random(7)

    async def visit(client: httpx.AsyncClient, number: int) -> None:
        prompt = f"{LONG if rng.random() < 0.5 else ''}Visitor {number % 7} asks {rng.random()}"
        body = {"model": "tiny", "prompt": prompt, "max_tokens": rng.randint(1, 40), "n": rng.randint(1, 2)}
        body |= {"stream": rng.random() < 0.5, "temperature": rng.choice([0, 1]), "ignore_eos": True}
        patience_s = rng.choice([0.02, 0.2, 60, 60, 60, 60])
        try:
            async with asyncio.timeout(patience_s):
                response = await client.post(f"{served.url}/v1/completions", json=body)
        except TimeoutError:
            return
        assert response.status_code == 200, response.text

    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=20)) as client:
        await asyncio.gather(*(visit(client, number) for number in range(60)))
    while (stats := served.stats())["num_running"] or stats["num_waiting"]:
        await asyncio.sleep(0.01)
    await served.engine.check()
    assert stats["num_free_blocks"] + stats["num_cached_blocks"] == stats["num_blocks"]
