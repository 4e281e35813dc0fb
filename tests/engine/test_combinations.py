"""Cells of the table of combinations: each gives the text it must, or is refused with its message."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stemma import LLM, SamplingParams
from stemma.engine.combinations import REFUSED, check_combinations
from stemma.engine.llm import engine_settings
from stemma.errors import ConfigError
from tests.adapters import write_adapter
from tests.checkpoints import build, build_mtp
from tests.quantized_files import Tensors, gptq, quantize_in_place, rewrite
from tests.shared_loads import shared_loads

FAMILIES = ("llama", "qwen3-moe", "gemma2", "gpt-oss", "deepseek-v3")
"""One of each way to run: fused, fused with experts, modules, attention sinks, latents."""
WEIGHTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantize": "int8"},
    "int4": {"dtype": "bfloat16", "quantize": "int4"},
    "FP8": {"dtype": "bfloat16"},
    "GPTQ": {"dtype": "bfloat16"},
    "GPTQ-inputs": {"dtype": "bfloat16", "quantize": "inputs"},
}
KV: dict[str, dict[str, Any]] = {
    "auto": {},
    "int8": {"kv_cache_dtype": "int8"},
    "fp8": {"kv_cache_dtype": "fp8"},
}
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPT = [(11 * i * i + 5 * i) % 400 + 3 for i in range(40)]
SMALL = {"kv_cache_memory": "2MB", "block_size": 8, "num_threads": 1}


@dataclass
class Place:
    """Where a cell may keep files, and the settings of its pool."""

    checkpoint: Path
    folder: Path
    pool: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        config = self.folder / "pool.json"
        config.write_text(json.dumps({"path": str(self.folder / "pool")}))
        self.pool = {
            "pool": "directory",
            "pool_config": config,
            "load_when": "always",
            "load_timeout_s": 20.0,
        }


def answer(llm: LLM, **options: Any) -> list[int]:
    tokens: list[int] = llm.generate(PROMPT, GREEDY, **options)[0].completions[0].token_ids
    return tokens


def same_text(llm: LLM, expected: list[int]) -> None:
    assert [answer(llm), answer(llm)] == [expected, expected]


def adapter_beside_base(llm: LLM, expected: list[int]) -> None:
    adapted = answer(llm, lora="one")
    both = llm.generate([PROMPT, PROMPT], GREEDY, lora=["one", None])
    assert [one.completions[0].token_ids for one in both] == [adapted, expected]
    assert adapted != expected


def beams(llm: LLM, expected: list[int]) -> None:
    found = llm.beam_search(PROMPT, 2, 4, ignore_eos=True)[0].completions
    assert [len(one.token_ids) for one in found] == [4, 4]
    same_text(llm, expected)


@dataclass(frozen=True)
class Feature:
    """Settings of a cell, and what must hold."""

    settings: Callable[[Place], dict[str, Any]]
    check: Callable[[LLM, list[int]], None] = same_text


def lora_settings(place: Place) -> dict[str, Any]:
    name = "model.layers.1.self_attn.o_proj"
    tensors = load_file(place.checkpoint / "model.safetensors")
    if (packed := tensors.get(f"{name}.qweight")) is not None:  # eight codes of four bits to a word
        outputs, inputs = packed.shape[1], 8 * packed.shape[0]
    else:
        outputs, inputs = tensors[f"{name}.weight"].shape
    torch.manual_seed(0)
    pair = torch.randn(4, inputs), torch.randn(outputs, 4)
    return {"lora": {"one": write_adapter(place.folder / "adapter", {name: pair})}}


FEATURES: dict[str, Feature] = {
    "plain": Feature(lambda place: {"speculation": "off"}),
    "tree": Feature(lambda place: {"speculation": "tree", "speculation_adaptive": False}),
    "la": Feature(lambda place: {"speculation": "la", "speculation_adaptive": False}),
    "mtp": Feature(lambda place: {"speculation": "mtp", "speculation_adaptive": False}),
    "mtp-lora": Feature(lambda place: {"speculation": "mtp"} | lora_settings(place), adapter_beside_base),
    "lora": Feature(lora_settings, adapter_beside_base),
    "beams": Feature(lambda place: {}, beams),
    "pool": Feature(lambda place: place.pool),
    "prefill": Feature(lambda place: place.pool | {"role": "prefill"}),
    "decode": Feature(lambda place: place.pool | {"role": "decode"}),
}


def refusal(family: str, weights: str, kv: str, feature: str) -> str | None:
    """Return what a refused cell's message says; None where the cell works."""
    if feature.startswith("mtp") and family != "deepseek-v3":
        return "speculation is mtp, but .* holds .*; Stemma runs the layer .* of DeepSeek-V3"
    return None


def make_fp8(checkpoint: Path) -> None:
    """Turn the projections of a checkpoint into FP8 in blocks, as DeepSeek publishes them."""
    high, wide = 16, 32
    file = checkpoint / "model.safetensors"
    weights = load_file(file)
    for name in [n for n in weights if n.endswith("_proj.weight") and weights[n].dim() == 2]:
        rows, columns = weights[name].shape
        scales = torch.full((-(-rows // high), -(-columns // wide)), 0.01)
        weights[name] = (weights[name] / 0.01).to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = scales
    save_file(weights, file, {"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [high, wide]}
    (checkpoint / "config.json").write_text(json.dumps(config))


def make_gptq(checkpoint: Path) -> None:
    """Turn the projections of a checkpoint into GPTQ's of four bits, all inputs of an output in one group."""
    config = {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": False}

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        return gptq(4, weight.shape[1], zero=True)(weight)

    quantize_in_place(checkpoint, quantize, {"quantization_config": config})


STORED: dict[str, Callable[[Path], None]] = {"FP8": make_fp8, "GPTQ": make_gptq}
"""Kinds of weights that a checkpoint must hold."""


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    made: dict[tuple[str, str], Path] = {}

    def get(family: str, weights: str) -> Path:
        kind = weights.split("-")[0]
        key = family, kind if kind in STORED else "plain"
        if key not in made:
            make = build_mtp if family == "deepseek-v3" else partial(build, family)
            made[key] = make(tmp_path_factory.mktemp("checkpoint") / family)
            if kind in STORED:
                STORED[kind](made[key])
        return made[key]

    return get


@pytest.fixture(scope="module")
def expected_of(checkpoint_of: Callable[[str, str], Path]) -> Callable[[str, str, str], list[int]]:
    """The answer of a family with these weights and KV, without anything else."""
    known: dict[tuple[str, ...], list[int]] = {}

    def get(family: str, weights: str, kv: str) -> list[int]:
        key = family, weights, kv
        if key not in known:
            settings = SMALL | WEIGHTS[weights] | KV[kv] | {"speculation": "off"}
            with shared_loads():
                llm = LLM(checkpoint_of(family, weights), enable_prefix_cache=False, **settings)
            known[key] = answer(llm)
            llm.close()
        return known[key]

    return get


ALL_CELLS = list(product(FAMILIES, WEIGHTS, KV, FEATURES))


def pairs_of(cell: tuple[str, ...]) -> frozenset[tuple[int, int, str, str]]:
    """Return the pairs of values of two axes that a cell holds."""
    return frozenset((a, b, cell[a], cell[b]) for a, b in combinations(range(len(cell)), 2))


def covering() -> Iterator[tuple[str, str, str, str]]:
    """Cells that hold every pair of values of two axes."""
    held = {cell: pairs_of(cell) for cell in ALL_CELLS}
    missing = frozenset().union(*held.values())
    while missing:
        best = max(ALL_CELLS, key=lambda cell: len(held[cell] & missing))
        missing -= held[best]
        yield best


PAIRS = list(covering())
CELLS = [
    pytest.param(*cell, id="-".join(cell), marks=() if cell in PAIRS else pytest.mark.slow)
    for cell in ALL_CELLS
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("family", "weights", "kv", "feature"), CELLS)
def test_cell(
    family: str,
    weights: str,
    kv: str,
    feature: str,
    checkpoint_of: Callable[[str, str], Path],
    expected_of: Callable[[str, str, str], list[int]],
    tmp_path: Path,
) -> None:
    place = Place(checkpoint_of(family, weights), tmp_path)
    settings = SMALL | WEIGHTS[weights] | KV[kv] | FEATURES[feature].settings(place)
    if (message := refusal(family, weights, kv, feature)) is not None:
        with pytest.raises(ConfigError, match=message):
            LLM(place.checkpoint, **settings)
        return
    with shared_loads():
        llm = LLM(place.checkpoint, **settings)
    try:
        FEATURES[feature].check(llm, expected_of(family, weights, kv))
        llm.engine.check()
    finally:
        llm.close()


TILED_CELLS = [
    pytest.param(weights, kv, feature, id=feature, marks=() if number < 4 else pytest.mark.slow)
    for number, (feature, weights, kv) in enumerate(
        zip(
            ("mtp", "pool", "tree", "mtp-lora", "decode", "prefill", "beams", "la", "plain", "lora"),
            cycle(WEIGHTS),
            cycle(KV),
            strict=False,
        )
    )
]


@pytest.mark.parametrize(("weights", "kv", "feature"), TILED_CELLS)
def test_tiled_latents_answer_the_same(
    weights: str,
    kv: str,
    feature: str,
    checkpoint_of: Callable[[str, str], Path],
    expected_of: Callable[[str, str, str], list[int]],
    tmp_path: Path,
) -> None:
    place = Place(checkpoint_of("deepseek-v3", weights), tmp_path)
    settings = SMALL | WEIGHTS[weights] | KV[kv] | FEATURES[feature].settings(place)
    with shared_loads():
        llm = LLM(place.checkpoint, kv_layout="nz", **settings)
    try:
        FEATURES[feature].check(llm, expected_of("deepseek-v3", weights, kv))
        llm.engine.check()
    finally:
        llm.close()


def test_keys_and_values_of_heads_are_not_tiled(checkpoint_of: Callable[[str, str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"kv_layout nz .* caches keys and values of each head"):
        LLM(checkpoint_of("llama", "float32"), kv_layout="nz", **SMALL)


REFUSED_CASES: list[dict[str, object]] = [
    {"pool": "redis", "enable_prefix_cache": False},
    {"role": "prefill"},
    {"role": "prefill", "pool": "redis", "pool_write": "write_back"},
    {"role": "decode", "pool": "redis", "prefetch": "best_effort"},
    {"device": "cuda", "kv_cache_dtype": "int8"},
    {"device": "cuda", "kv_layout": "nz"},
    {"device": "cuda", "speculation": "mtp"},
    {"device": "cuda", "quantize": "int8"},
    {"context_parallel_size": 3},
    {"tensor_parallel_size": 2, "memory_limit": "8GB"},
    {"tensor_parallel_size": 2, "lora": {"one": "adapter"}},
    {"context_parallel_size": 2, "speculation": "mtp"},
    {"tensor_parallel_size": 2, "overlap_schedule": "on", "device": "cuda"},
]
"""One for each entry of `REFUSED`, in its order."""


@pytest.mark.parametrize(("fields", "refused"), zip(REFUSED_CASES, REFUSED, strict=True))
def test_what_doesnt_go_together(fields: dict[str, object], refused: Any) -> None:
    settings = engine_settings(Path("model"), **fields)
    with pytest.raises(ConfigError) as caught:
        check_combinations(settings, str(fields.get("device", "cpu")))
    assert str(caught.value) == refused.message.format(
        role=settings.role,
        kv=settings.cache.kv_cache_dtype,
        layout=settings.cache.kv_layout,
        quantize=settings.model.quantize,
        ranks=" ".join(
            map(str, next((one for one in fields.items() if one[0].endswith("parallel_size")), ()))
        ),
        block_size=settings.cache.block_size,
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"pool": "redis", "pool_write": "write_back"},
        {"role": "prefill", "pool": "redis"},
        {"role": "decode", "pool": "redis", "enable_prefix_cache": False},
        {"kv_cache_dtype": "int8", "quantize": "int4"},
        {"context_parallel_size": 2, "tensor_parallel_size": 2, "host_cache": "1GB", "speculation": "auto"},
        {"tensor_parallel_size": 2, "kv_cache_dtype": "int8", "host_cache": "1GB", "disk_cache": "blocks"},
        {"tensor_parallel_size": 2, "pool": "redis", "role": "prefill"},
        {"tensor_parallel_size": 2, "quantize": "int4", "overlap_schedule": "on"},
    ],
)
def test_what_goes_together(fields: dict[str, object]) -> None:
    check_combinations(engine_settings(Path("model"), **fields), "cpu")


def test_quantized_weights_arent_quantized_again(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
    twin = rewrite(tmp_path, gptq(4, 32, zero=True), {"quantization_config": config})
    with pytest.raises(ConfigError, match="quantize is int8, but the checkpoint is quantized already"):
        LLM(twin.quantized, quantize="int8", **SMALL)


def test_the_document_has_every_refusal() -> None:
    document = (Path(__file__).parents[2] / "docs" / "project" / "compatibility.md").read_text()
    for refused in REFUSED:
        values = {"role": "ROLE", "kv": "DTYPE", "layout": "nz", "quantize": "KIND"}
        values |= {"ranks": "RANKS", "block_size": "SIZE"}
        assert f"`{refused.message.format(**values)}`" in document


def test_an_unknown_policy_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown eviction policy 'gdsf'; known: hazard, lru, retention"):
        LLM(tmp_path / "no model is looked for", eviction="gdsf")
