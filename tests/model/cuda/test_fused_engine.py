"""Whole engines on the fused path, in the interpreter: each kind of answer, beside the CPU's own path."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the optional extra `cuda` is not installed")

from tests import checkpoints
from tests.model.cuda.small_fused import SMALL
from tests.pooled_checkpoints import build_embedding, build_reranker
from tests.vision_checkpoints import make_vision_checkpoint, picture

from stemma.engine.llm import LLM
from stemma.engine.sampling.grammar import GrammarSpec
from stemma.engine.sampling.params import SamplingParams
from stemma.model.cuda.listed_attention import PieceRoom
from stemma.model.load import loading

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="its models lie on the CPU")

PROMPT = list(range(5, 27))
Serve = Callable[..., LLM]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Return a maker of engines, on the fused path where `is_fused`."""
    monkeypatch.setattr(PieceRoom, "on", lambda _device: PieceRoom(1))
    monkeypatch.setattr(loading, "check_served", lambda *_, **__: None)  # other tests compare logits
    made: list[LLM] = []

    def make(path: Path, *, is_fused: bool, **settings: Any) -> LLM:
        options = {"dtype": "float32", "device": "cpu", "kv_cache_memory": "2MB", "block_size": 16} | settings
        with monkeypatch.context() as patch:
            if is_fused:
                patch.setattr(loading, "CUDA", "cpu")
                options |= {"gpu_path": "fused", "cuda_graphs": False}
            made.append(LLM(path, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def of_both(serve: Serve, path: Path, ask: Callable[[LLM], Any]) -> tuple[Any, Any]:
    return ask(serve(path, is_fused=True)), ask(serve(path, is_fused=False))


def test_answers_of_all_kinds_equal_the_cpus(serve: Serve, tmp_path: Path) -> None:
    """Greedy, drawn, under a grammar, with log-probabilities of output and prompt; in one batch."""
    params = [
        SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, prompt_logprobs=3),
        SamplingParams(max_tokens=4, seed=1, top_p=0.9, ignore_eos=True, logprobs=2),
        SamplingParams(max_tokens=4, seed=2, grammar=GrammarSpec("choice", json.dumps(["yes", "no"]))),
    ]
    path = checkpoints.build("qwen2", tmp_path, **SMALL)
    own, cpus = of_both(serve, path, lambda llm: llm.generate([PROMPT, PROMPT[3:], PROMPT[5:]], params))
    for one, other in zip(own, cpus, strict=True):
        assert one.completions[0].token_ids == other.completions[0].token_ids
    assert own[2].completions[0].text in ("yes", "no")
    one, other = own[0].prompt_logprobs, cpus[0].prompt_logprobs
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-4)
    np.testing.assert_array_equal(one.top_ids, other.top_ids)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_equal_the_cpus(pooling: str, serve: Serve, tmp_path: Path) -> None:
    path = build_embedding(tmp_path, pooling)
    own, cpus = of_both(serve, path, lambda llm: llm.embed("A river."))
    np.testing.assert_allclose(own[0].vector, cpus[0].vector, atol=2e-4)


@pytest.mark.slow
def test_scores_of_pairs_equal_the_cpus(serve: Serve, tmp_path: Path) -> None:
    path = build_reranker(tmp_path, **SMALL | {"num_hidden_layers": 1})
    own, cpus = of_both(serve, path, lambda llm: llm.score("Days?", ["Seven."]))
    assert own[0].score == pytest.approx(cpus[0].score, abs=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3-vl", "smolvlm", "qwen2.5-vl"])
def test_answers_about_images_equal_the_cpus(family: str, serve: Serve, tmp_path: Path) -> None:
    """Vectors in place of tokens, positions of three axes, features behind layers; then from the cache."""
    image = {"type": "image", "image": picture(1, 60, 40)}
    chat = [{"role": "user", "content": [image, {"type": "text", "text": "What?"}]}]
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
    path = make_vision_checkpoint(family, tmp_path / family)

    def ask(llm: LLM) -> Any:
        [first] = llm.chat(chat, params)
        [again] = llm.chat(chat, SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
        assert again.completions[0].token_ids == first.completions[0].token_ids
        return first

    own, cpus = of_both(serve, path, ask)
    np.testing.assert_allclose(own.prompt_logprobs.logprobs, cpus.prompt_logprobs.logprobs, atol=2e-4)
    assert own.completions[0].token_ids == cpus.completions[0].token_ids
