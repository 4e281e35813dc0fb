"""Whatever stands beside a request in a batch, its answer is that of the request alone on a fresh engine.

Requests combine features at random; bits are compared: tokens, text, log-probabilities, ends. What belongs to
an engine (KV in codes, sources of drafts, adapters, overlapping steps, a small cache) varies by engine.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import combinations, combinations_with_replacement
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from stemma.engine import build as engine_build
from stemma.engine.build import EngineParts, build_engine
from stemma.engine.llm import engine_settings
from stemma.model.load.loading import load_model
from stemma.model.text.tokenizer import Tokenizer
from stemma.native.library import load_kernels
from tests import hybrids
from tests.adapters import write_adapter
from tests.checkpoints import MTP_LAYER, build, build_mtp
from tests.invariance.features import ADAPTERS, ENDS, FEATURES, Answer, Ask, Service, draw_asks, go_together
from tests.vision_checkpoints import make_vision_checkpoint

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="needs a C++ compiler")

SEED = 9
"""Of the default run: with it, what is looked for is there."""
SEEDS = {
    "small": 3,
    "hybrid mtp": 3,
    "images": 1,
    "images drafted": 1,
    "images small": 7,
    "chunked attention": 1,
    "waiting writes": 25,
    "shared slabs": 4,
}
"""By engine, where it is another one."""
NUM_ASKS = 40
GROUP = 5
"""Requests at a time that leave steps room for drafts, once their prompts are known."""
MTP = "deepseek-v3-mtp"
HYBRID = "qwen3_next"
SPARSE = "glm_moe_dsa"
COMPRESSED = "deepseek_v4"
WINDOWS, SOME_WINDOWS = "mistral-sliding", "gemma3"
CHUNKS = "llama4_text"
HYBRID_MTP = "qwen3_next-mtp"
IMAGES = "qwen2.5-vl"
OTHER_FAMILIES = {
    **{"mtp": MTP, "hybrid": HYBRID, "hybrid drafts": HYBRID, "sparse": SPARSE, "windows": WINDOWS},
    "some windows": SOME_WINDOWS,
    **{"images": IMAGES, "images drafted": IMAGES, "images small": IMAGES},
    "shared slabs": HYBRID,
    **{"hybrid mtp": HYBRID_MTP, "compressed": COMPRESSED, "chunked attention": CHUNKS},
}
"""By engine; the others have a Qwen2."""
CACHING = ("renewed", "prewarmed")
"""Features that only these engines' requests have: what they change is what a full cache keeps."""
FULL = ("waiting writes", "shared slabs")
LEFT_OUT = {"no adapters": "adapter", "small": "pinned", "images small": "pinned"}
"""By engine, the feature that its requests don't have; beside pins a small cache has no room."""
BASE: dict[str, Any] = {
    "kv_cache_memory": "4MB",
    "block_size": 8,
    "num_threads": 1,
    "max_batch_tokens": 61,
    "speculation": "off",
    "speculation_adaptive": False,
}
ENGINES: dict[str, dict[str, Any]] = {
    "chunks": {},
    "overlapping": {"overlap_schedule": "on", "max_loras": 1},
    "no adapters": {"speculation": "prompt_lookup", "dtype": "float32"},
    "drafts": {"speculation": "auto", "max_batch_tokens": 120},
    "lookahead": {"speculation": "la"},
    "codes": {"kv_cache_dtype": "int8", "speculation": "auto"},
    "small": {"kv_cache_memory": "48kB"},
    "mtp": {"speculation": "mtp"},
    "hybrid": {"block_size": 16},
    "hybrid drafts": {"block_size": 16, "speculation": "auto", "dtype": "float32"},
    "sparse": {"speculation": "auto", "max_batch_tokens": 120},
    "windows": {"speculation": "auto", "max_batch_tokens": 120},
    "some windows": {"speculation": "off", "max_batch_tokens": 120},
    "compressed": {"speculation": "auto", "max_batch_tokens": 120},
    "chunked attention": {"speculation": "auto", "max_batch_tokens": 120},
    "hybrid mtp": {"block_size": 16, "speculation": "mtp"},
    "waiting writes": {
        "kv_cache_memory": "120kB",
        "block_size": 4,
        "transfer_buffer": "1B",
        "disk_cache_size": "8MB",
        "load_when": "always",
        "overlap_schedule": "on",
    },
    "shared slabs": {"kv_cache_memory": "250kB", "block_size": 16},
    "images": {"overlap_schedule": "on"},
    "images drafted": {"speculation": "auto", "max_batch_tokens": 120, "image_cache": "0B"},
    "images small": {"kv_cache_memory": "56kB", "host_cache": "1MB", "load_when": "always"},
}
"""Settings of engines, beside those of `BASE`."""
SLOW = {
    *("compressed", "chunked attention", "sparse", "hybrid", "hybrid mtp", "images", "images drafted"),
    *("no adapters", "overlapping", "some windows", "shared slabs"),
}
"""Left to `make test-all`: other engines have the family, but for the first three, or the settings."""
SOURCES = {
    "no adapters": {"prompt_lookup"},
    "drafts": {"tree", "grammar"},
    "lookahead": {"la", "grammar"},
    "codes": {"tree", "grammar"},
    "mtp": {"mtp", "grammar"},
    "hybrid drafts": {"tree"},
    "sparse": {"tree"},
    "windows": {"tree"},
    "compressed": {"tree"},
    "chunked attention": {"tree"},
    "hybrid mtp": {"mtp", "grammar"},
    "images drafted": {"tree"},
}
"""Who must have drafted."""


class Workshop:
    """Makes engines; each model is loaded once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._models: dict[tuple[str, str, bool], Any] = {}
        self._tokenizers: dict[str, Tokenizer] = {}
        self._alone: dict[tuple[str, str, str, Ask], Answer] = {}

    def _checkpoint(self, family: str) -> Path:
        path = self._root / family
        if not path.exists():
            ends = {"eos_token_id": ENDS}
            if family == IMAGES:
                make_vision_checkpoint(family, path)
                (path / "generation_config.json").write_text(json.dumps(ends))
            elif family == HYBRID_MTP:
                hybrids.build_mtp(path, generation=ends)
            elif family in (HYBRID, SPARSE, COMPRESSED, CHUNKS):
                hybrids.build(family, path, generation=ends)
            else:
                build_mtp(path, generation=ends) if family == MTP else build(family, path, generation=ends)
            for seed, name in enumerate(ADAPTERS):
                _write_adapter(path, self._root / f"{family}-{name}", seed)
        return path

    @contextmanager
    def service(self, family: str, settings: dict[str, Any], *, adapters: bool = True) -> Iterator[Service]:
        path = self._checkpoint(family)
        fields = {"dtype": "bfloat16"} | BASE | settings
        if "disk_cache_size" in fields:
            fields["disk_cache"] = self._root / f"{family}-disk"
        if adapters:
            fields["lora"] = {name: self._root / f"{family}-{name}" for name in ADAPTERS}
        service = Service(self._build(family, engine_settings(path, **fields)))
        try:
            yield service
        finally:
            service.close()

    def _build(self, family: str, settings: Any) -> EngineParts:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_build, "load_model", partial(self._model, family))
            patch.setattr(engine_build, "Tokenizer", lambda path, **_: self._tokenizer(family, path))
            return build_engine(settings)

    def _model(self, family: str, settings: Any, progress: Any, *, predicts: bool, **others: Any) -> Any:
        key = family, settings.dtype, predicts
        if key not in self._models:
            self._models[key] = load_model(settings, progress, predicts=predicts, **others)
        return self._models[key]

    def _tokenizer(self, family: str, path: Path) -> Tokenizer:
        if family not in self._tokenizers:
            self._tokenizers[family] = Tokenizer(path)
        return self._tokenizers[family]

    def alone(self, family: str, settings: dict[str, Any], ask: Ask) -> Answer:
        """Return the answer to a request that nothing stands beside, is cached for or drafted."""
        plain: dict[str, Any] = {}
        for name in ("dtype", "kv_cache_dtype"):
            if name in settings:
                plain[name] = settings[name]
        key = family, plain.get("dtype", ""), plain.get("kv_cache_dtype", ""), ask
        if key not in self._alone:
            whole = replace(ask, is_pinned=False, abort_after=None)
            with self.service(family, plain, adapters=ask.adapter is not None) as service:
                [self._alone[key]] = service.serve([whole], [0])
        return self._alone[key]


def _write_adapter(checkpoint: Path, path: Path, seed: int) -> None:
    """Write an adapter that adds to all linear layers but routed experts and what isn't adaptable."""
    names = (
        *("q_proj", "k_proj", "v_proj", "q_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        *("in_proj_qkvz", "in_proj_ba", "out_proj"),
    )
    generator = torch.Generator().manual_seed(seed)
    matrices = {}
    weights = load_file(checkpoint / "model.safetensors")
    if "head.weight" in weights:  # names as published, not those of transformers, which adapters have
        weights = dict(AutoModelForCausalLM.from_pretrained(checkpoint).named_parameters())
    for key, weight in sorted(weights.items()):
        layer = key.removesuffix(".weight")
        left_out = (".experts.", f"layers.{MTP_LAYER}.", "visual.", "mtp.")
        if layer.endswith(names) and not any(part in layer for part in left_out):
            down = torch.randn(4, weight.shape[1], generator=generator) * 0.1
            matrices[layer] = down, torch.randn(weight.shape[0], 4, generator=generator) * 0.1
    write_adapter(path, matrices)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("features"))


def features_of(kind: str) -> tuple[str, ...]:
    sees = OTHER_FAMILIES.get(kind) == IMAGES
    others = {LEFT_OUT.get(kind)} | set(() if sees else ("image",)) | set(() if kind in FULL else CACHING)
    return tuple(name for name in FEATURES if name not in others)


def check_engine(workshop: Workshop, kind: str, seed: int) -> Service:
    """Serve the requests of a seed, twice and in two orders; each gets what it gets alone."""
    family, settings = OTHER_FAMILIES.get(kind, "qwen2"), ENGINES[kind]
    features = features_of(kind)
    asks = draw_asks(seed, NUM_ASKS, features)
    rng = random.Random(seed)
    with workshop.service(family, settings, adapters="adapter" in features) as service:
        for round_number, (longest_gap, size) in enumerate(((3, NUM_ASKS), (0, GROUP), (0, GROUP))):
            order = rng.sample(asks, len(asks))
            answers: list[Answer] = []
            for first in range(0, len(order), size):
                group = order[first : first + size]
                answers += service.serve(group, [rng.randint(0, longest_gap) for _ in group])
            for ask, answer in zip(order, answers, strict=True):
                expected = workshop.alone(family, settings, ask)
                place = (
                    f"{kind}, seed {seed}, round {round_number}, request {ask.number}: {sorted(ask.features)}"
                )
                if ask.abort_after is None:
                    assert answer == expected, place
                else:
                    assert answer.begins(expected), f"{place}: {answer} is not how {expected} begins"
    return service


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW)) for kind in ENGINES]
)
def test_answers_are_those_of_requests_alone(kind: str, workshop: Workshop) -> None:
    service = check_engine(workshop, kind, SEEDS.get(kind, SEED))
    features = features_of(kind)
    pairs = combinations_with_replacement(features, 2)
    never = [pair for pair in pairs if not service.beside[frozenset(pair)]]
    assert never == [], "features that never stood in one step"
    drafts = service.engine.stats().drafts_by_source
    assert {name for name, count in drafts.items() if count.num_proposed} >= SOURCES.get(kind, set())
    assert all(count.num_accepted for name, count in drafts.items() if name != "mtp")
    assert (service.engine.stats().num_preemptions > 0) is (kind in ("small", "images small"))
    if kind == "waiting writes":
        assert service.most_waiting
    if kind == "shared slabs":
        kept = service.engine.cache.stats()
        assert kept.num_evicted_blocks
        assert kept.num_evicted_checkpoints


@pytest.mark.parametrize("kind", ENGINES)
def test_requests_have_all_pairs_of_features(kind: str) -> None:
    features = features_of(kind)
    pairs = {pair for pair in combinations(features, 2) if go_together(*pair)}
    asks = draw_asks(SEEDS.get(kind, SEED), NUM_ASKS, features)
    assert {(a, b) for a, b in pairs if not any({a, b} <= ask.features for ask in asks)} == set()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 100 + int(os.environ.get("STEMMA_FEATURE_SEEDS", "25"))))
@pytest.mark.parametrize("kind", ENGINES)
def test_more_answers_are_those_of_requests_alone(kind: str, seed: int, workshop: Workshop) -> None:
    check_engine(workshop, kind, seed)
