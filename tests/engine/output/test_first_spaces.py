"""An answer of a SentencePiece vocabulary goes on with its prompt's text; from GGUF and a directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.model.formats.vocabularies import sentencepiece, write

from stemma import LLM, SamplingParams
from stemma.engine.api import GenerationRequest
from stemma.engine.beam_search import Hypothesis
from stemma.engine.sampling.logprobs import TokenLogprob
from stemma.model.formats.gguf.convert import convert

HELLO = sentencepiece()["tokenizer.ggml.tokens"].index("▁hello")
ONLY = ((HELLO, 100.0),)


@pytest.fixture(scope="module", params=["file", "directory"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write(tmp_path_factory.mktemp("words"), sentencepiece())
    if request.param == "directory":
        target = Path(tmp_path_factory.mktemp("directory"))
        convert(path, target)
        path = target
    llm = LLM(str(path), kv_cache_memory="20MB", block_size=16)
    yield llm
    llm.close()


@pytest.mark.parametrize("options", [{}, {"n": 2, "temperature": 1.0}, {"skip_special_tokens": False}])
def test_the_first_space_of_a_completion_is_its_own(llm: LLM, options: dict[str, Any]) -> None:
    [output] = llm.generate(["the user"], SamplingParams(max_tokens=3, logit_bias=ONLY, **options))
    assert [one.text for one in output.completions] == [" hello hello hello"] * options.get("n", 1)


def test_a_stop_string_may_begin_with_it(llm: LLM) -> None:
    [output] = llm.generate(["the user"], SamplingParams(max_tokens=3, logit_bias=ONLY, stop=(" he",)))
    assert output.completions[0].text == ""
    assert output.completions[0].stop_reason == " he"


def test_beams_have_it_too(llm: LLM) -> None:
    request = GenerationRequest("a", llm.tokenizer.encode("the user"), SamplingParams())
    beam = Hypothesis((TokenLogprob(HELLO, 0.0, ()),) * 2)
    assert beam.text(llm.tokenizer, request) == " hello hello"
