"""Sliding windows, bit for bit: whether KV behind them is freed can't be seen in any answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import MistralConfig, Phi3Config, PreTrainedConfig, Qwen2Config, Starcoder2Config

from stemma.config.settings import KVDtype, ModelSettings
from stemma.engine.sampling.params import SamplingParams
from stemma.errors import PromptTooLong
from stemma.model.files.tiny import save_checkpoint
from stemma.model.load.loading import load_model
from stemma.native.library import load_kernels
from tests.checkpoints import SLIDING_WINDOW, base_fields, make_model, tokenizer
from tests.invariance.schedules import check_schedules
from tests.invariance.serving import NO_CACHE, answer_of, asks_of, check_family, engine, serve

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="needs a C++ compiler")

CONFIGS: dict[str, Callable[..., PreTrainedConfig]] = {
    "mistral": lambda **fields: MistralConfig(**_sliding(num_hidden_layers=3, **fields)),
    "qwen2": lambda **fields: Qwen2Config(
        **_sliding(num_hidden_layers=4, use_sliding_window=True, max_window_layers=1, **fields)
    ),
    "phi3": lambda **fields: Phi3Config(**_sliding(num_hidden_layers=3, pad_token_id=0, **fields)),
    "starcoder2": lambda **fields: Starcoder2Config(**_sliding(num_hidden_layers=3, **fields)),
}
"""Of all layers, or of all but the first, in one native call and through modules."""
IN_PAGES = {"mistral": (1, 2), "qwen2": (1, 2, 3), "phi3": (1, 2), "starcoder2": (1, 2)}


def _sliding(**fields: Any) -> dict[str, Any]:
    return base_fields(**{"sliding_window": SLIDING_WINDOW, **fields})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("windows")

    def make(family: str) -> Path:
        path = root / family
        return path if path.exists() else save_checkpoint(make_model(CONFIGS[family](), 0), tokenizer(), path)

    return make


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "int8")]
)
@pytest.mark.parametrize("family", CONFIGS)
def test_any_schedule(family: str, dtype: str, kv_dtype: KVDtype, checkpoint: Callable[[str], Path]) -> None:
    """Pages in another order than blocks, and none behind windows, give the logits of whole KV."""
    settings = {"path": checkpoint(family), "dtype": dtype, "device": "cpu"}
    model = load_model(ModelSettings.model_validate(settings))
    windows = model.layout(16, frees_windows=True).windows
    assert windows is not None
    assert (windows.layers, windows.window) == (IN_PAGES[family], SLIDING_WINDOW)
    check_schedules(model, 2, kv_dtype, frees_windows=True)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_any_way_of_serving(family: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    path = checkpoint(family)
    check_family(path, "bfloat16", tmp_path / "disk", 3)
    asks = asks_of(2)
    answers = []
    for frees in (False, True):
        with engine(path, "bfloat16", **NO_CACHE, free_windows=frees) as llm:
            assert (llm.engine.runner.kv.pages is not None) == frees
            answers.append([serve(llm, [ask])[0] for ask in asks])
    assert answers[0] == answers[1]


def test_longer_prompts_fit_and_a_small_tier_keeps_all(checkpoint: Callable[[str], Path]) -> None:
    path, prompt = checkpoint("mistral"), [3 + 11 * number % 480 for number in range(900)]
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=2)
    small = {"kv_cache_memory": "240kB", "max_batch_tokens": 64}
    with engine(path, "bfloat16", free_windows=False) as llm:
        expected = answer_of(llm.generate([prompt], params)[0])
    with engine(path, "bfloat16", **small, free_windows=False) as llm, pytest.raises(PromptTooLong):
        llm.generate([prompt], params)
    with engine(path, "bfloat16", **small) as llm:
        assert answer_of(llm.generate([prompt], params)[0]) == expected
        assert llm.engine.runner.kv.pages is not None
    with engine(path, "bfloat16", kv_cache_memory="60kB", max_batch_tokens=512) as llm:
        assert llm.engine.runner.kv.pages is None
        llm.generate([prompt[:100]], params)


def test_a_window_as_long_as_the_context_changes_nothing(checkpoint: Callable[[str], Path]) -> None:
    with engine(checkpoint("mistral"), "bfloat16", max_model_len=SLIDING_WINDOW) as llm:
        assert llm.engine.runner.kv.pages is None
