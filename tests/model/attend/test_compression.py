"""DeepSeek-V4's windows and compressed entries: transformers' logits at any rates, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import hybrids
from tests.model.paging import PagedSequences, plain_logits
from transformers import DeepseekV4Config

from stemma.config.settings import ModelSettings
from stemma.errors import ConfigError, ModelError, StemmaError, UnsupportedModel
from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import CompressedLayer, CompressedLayout, KVLayout
from stemma.memory.device.sizing import device_sizes
from stemma.model.attend.compression import compressed_layout
from stemma.model.load.loading import load_model
from stemma.model.opened.causal_lm import CausalLM

FAMILY = "deepseek_v4"
CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
RATES: dict[str, dict[str, Any]] = {
    "published": {"compress_rate_csa": 4, "compress_rate_hca": 128, "sliding_window": 128, "index_topk": 24},
    "odd": {"compress_rate_csa": 3, "compress_rate_hca": 10, "sliding_window": 7},
    "ones": {"compress_rate_csa": 1, "compress_rate_hca": 1, "sliding_window": 1},
    "long": {"compress_rate_csa": 50, "compress_rate_hca": 1000},
    "all entries": {"index_topk": 512},
    "odd heads": {"head_dim": 18, "qk_rope_head_dim": 6, "index_head_dim": 10},
}
PROMPT = [3 + 7 * number % 500 for number in range(420)]


def load(path: Path, **fields: Any) -> CausalLM:
    return load_model(ModelSettings(path=path, device="cpu", **({"dtype": "float32"} | fields)))


def logits(model: CausalLM, chunk: int, block_size: int) -> torch.Tensor:
    run = PagedSequences(model, [PROMPT], block_size=block_size)
    run.finish(chunk)
    return run.logits[0]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hybrids.build(FAMILY, tmp_path_factory.mktemp("m") / FAMILY)


def edited(tiny: Path, path: Path, **fields: Any) -> Path:
    """Return the checkpoint with other fields of config.json."""
    path.mkdir()
    for file in tiny.iterdir():
        if file.name != "config.json":
            (path / file.name).symlink_to(file)
    config = json.loads((tiny / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("rates", RATES)
def test_logits_at_any_rates(rates: str, tmp_path: Path) -> None:
    path = hybrids.build(FAMILY, tmp_path / "m", **RATES[rates])
    model, expected = load(path), plain_logits(path, PROMPT)
    once = logits(model, len(PROMPT), 16)
    assert (once - expected).abs().max() < 1e-4 * expected.std()
    for chunk, block_size in ((37, 8), (100, 24), (64, 64)):
        assert logits(model, chunk, block_size).equal(once)


def test_choices_matter(tmp_path: Path) -> None:
    """Or the tests above would say nothing of the indexer."""
    found = [
        plain_logits(hybrids.build(FAMILY, tmp_path / str(top_k), index_topk=top_k), PROMPT)
        for top_k in (12, 512)
    ]
    assert (found[0] - found[1]).abs().max() > 0.1 * found[0].std()


def test_rope_is_scaled_in_layers_that_compress_alone(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64}
    path = hybrids.build(FAMILY, tmp_path / "m", rope_parameters=yarn)
    expected = plain_logits(path, PROMPT)
    assert (logits(load(path), 90, 16) - expected).abs().max() < 1e-4 * expected.std()


LEVELS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_fp8_and_fp4_in_files_named_as_published(tiny: Path, tmp_path: Path) -> None:
    """FP8 in attention, FP4 in experts."""
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"}
    coded = edited(tiny, tmp_path / "fp8", quantization_config=blocks)
    plain = edited(tiny, tmp_path / "plain")
    weights, codes = load_file(tiny / "model.safetensors"), {}
    levels = torch.tensor(LEVELS + [-level for level in LEVELS])
    for name in [name for name in weights if ".ffn.experts." in name]:
        groups = weights[name].unflatten(1, (-1, 32))
        exponents = (groups.abs().amax(-1) / 6).log2().ceil()
        nearest = (groups / exponents.exp2()[..., None])[..., None].sub(levels).abs().argmin(-1)
        weights[name] = (levels[nearest] * exponents.exp2()[..., None]).flatten(1)
        low, high = nearest.flatten(1).unflatten(1, (-1, 2)).unbind(-1)
        codes[name] = (low + 16 * high).to(torch.uint8).view(torch.int8)
        codes[name.removesuffix("weight") + "scale"] = exponents.exp2().to(torch.float8_e8m0fnu)
    for name in [name for name in weights if ".attn.w" in name]:
        scale = (weights[name].abs().max() / 400).reshape(1, 1)
        codes[name] = (weights[name] / scale).to(torch.float8_e4m3fn)
        codes[name.removesuffix("weight") + "scale"] = scale
        weights[name] = codes[name].float() * scale
    for path, tensors in ((coded, weights | codes), (plain, weights)):
        (path / "model.safetensors").unlink()
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    model, expected = load(coded), plain_logits(plain, PROMPT)
    assert len(codes) > 40
    assert (logits(model, 200, 16) - expected).abs().max() < 1e-4 * expected.std()


HOSTILE: dict[str, dict[str, Any]] = {
    "no rate": {"compress_rates": {CSA: 0, HCA: 16}},
    "negative": {"compress_rates": {CSA: 4, HCA: -16}},
    "missing": {"compress_rates": {CSA: 4}},
    "text": {"compress_rates": {CSA: "4", HCA: 16}},
    "huge": {"compress_rates": {CSA: 4, HCA: 1 << 40}},
    "no list": {"compress_rates": 7},
    "other rate": {"compress_rates": {CSA: 4, HCA: 32}},
    "too few layers": {"layer_types": [CSA]},
    "unknown layer": {"layer_types": ["sliding_attention", "full_attention", HCA, CSA]},
    "other layers": {"layer_types": [HCA, CSA, HCA, CSA]},
    "mlp types": {"mlp_layer_types": ["moe", "dense", "moe", "moe"]},
    "no mlp types": {"mlp_layer_types": ["moe"]},
    "no choice": {"index_topk": 0},
    "negative choice": {"index_topk": -5},
    "no window": {"sliding_window": 0},
    "long window": {"sliding_window": 1 << 40},
    "no streams": {"hc_mult": 0},
    "many streams": {"hc_mult": 1 << 20},
    "rounds": {"hc_sinkhorn_iters": 1 << 40},
    "groups": {"o_groups": 3},
    "no groups": {"o_groups": 0},
    "experts": {"num_experts_per_tok": 9},
    "scoring": {"scoring_func": "nothing"},
    "head dim": {"head_dim": 0},
    "rope": {"rope_parameters": {"rope_type": "nothing"}},
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("what", HOSTILE)
def test_a_config_that_makes_no_such_model_is_refused(what: str, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(StemmaError) as caught:
        load(edited(tiny, tmp_path / "m", **HOSTILE[what]))
    assert isinstance(caught.value, ModelError | UnsupportedModel | ConfigError)
    assert len(str(caught.value)) < 1500


def test_a_table_of_experts_that_there_arent_is_refused(tiny: Path, tmp_path: Path) -> None:
    path = edited(tiny, tmp_path / "m")
    weights = load_file(tiny / "model.safetensors")
    [name, *_] = [name for name in weights if name.endswith("tid2eid")]
    weights[name][5, 1] = 8
    (path / "model.safetensors").unlink()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="tid2eid names experts 0 to 8 of 8"):
        load(path)


def test_entries_are_kept_as_they_were_computed(tiny: Path) -> None:
    model = load(tiny)
    with pytest.raises(ConfigError, match="leave kv_cache_dtype auto"):
        model.layout(16, "int8")
    with pytest.raises(ConfigError, match="kv_layout rows"):
        model.layout(16, "auto", "nz")


def test_layers_lie_side_by_side() -> None:
    layout = CompressedLayout((CompressedLayer(32), CompressedLayer(200, 4, 48), CompressedLayer(96, 24, 32)))
    assert layout.unit == 16
    assert [layout.row_start(layer) for layer in range(4)] == [0, 32, 240, 336]
    assert [layout.entry_start(layer, 16) for layer in range(4)] == [0, 0, 4 * 48, 4 * 48 + 32]
    assert layout.block_dim(16) * 16 >= 4 * 48 + 32
    assert layout.block_dim(1) == 48 + 32
    assert CompressedLayout((CompressedLayer(32),)).block_dim(16) == 32


def published() -> KVLayout:
    """Return the layout of transformers' default config: 23 HCA layers and 20 CSA, in bfloat16."""
    made, group = compressed_layout(DeepseekV4Config(), 1 << 20)
    return KVLayout(1, 1, 16, 1, made.block_dim(16), "bfloat16", windows=group, compressed=made)


def test_blocks_and_pages_share_all_of_the_memory() -> None:
    layout = published()
    assert layout.bytes_per_token == 7_936
    assert layout.page.bytes_per_token == 193_536
    num_bytes = 64 << 30
    sizes = device_sizes(layout, num_bytes, 2048)
    assert 0.999 < sizes.num_blocks * layout.block_bytes / num_bytes <= 1.0
    assert sizes.num_reserved < 0.02 * sizes.num_blocks


def test_places_that_kernels_cant_count_are_refused() -> None:
    layout = published()
    with pytest.raises(ConfigError, match="takes at most"):
        DeviceKV(layout, (1 << 40) // layout.block_bytes, num_pages=1)
