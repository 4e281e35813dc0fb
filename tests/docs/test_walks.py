"""The walked examples of docs/explanation/architecture.md: each is taken from the page and used."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM

from stemma import LLM, SamplingParams
from stemma.config.settings import ModelSettings, Settings
from stemma.model.cpu.fused import FusedDecoder
from stemma.model.families import registry
from stemma.model.files.tiny import build_tokenizer, write_tiny_model
from stemma.model.formats import reading
from stemma.model.load.loading import load_model
from stemma.prefix.eviction.registry import POLICIES, make_policy
from stemma.server import app as server_app
from tests.server.conftest import engine, settings, tokenizer, tokenizer_path  # noqa: F401
from tests.server.scripted_engine import ScriptedEngine

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
SMALL = {
    "kv_cache_memory": "2MB",
    "block_size": 16,
    "dtype": "float32",
    "speculation": "off",
    "num_threads": 1,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
PROMPT = "A river that runs through the valley carries water from the mountains to the sea. " * 3


def block_of(heading: str, language: str = "python") -> str:
    section = PAGE.split(f"\n### {heading}\n")[1]
    found = re.search(rf"^```{language}\n(.*?)^```$", section, re.M | re.S)
    assert found is not None
    return found[1]


def module_of(heading: str, name: str, patch: pytest.MonkeyPatch) -> types.ModuleType:
    """Run a block as a module of that name."""
    module = types.ModuleType(name)
    exec(compile(block_of(heading), f"<{heading}>", "exec"), module.__dict__)
    patch.setitem(sys.modules, name, module)
    return module


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("walks") / "tiny"
    write_tiny_model(path)
    return path


def answer(path: Path, prompt: str = PROMPT, **more: object) -> list[int]:
    llm = LLM(path, **(SMALL | more))
    try:
        return list(llm.generate(prompt, GREEDY)[0].completions[0].token_ids)
    finally:
        llm.close()


def test_a_model_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixtral runs by the layout, in one native call, and answers what transformers answers."""
    config = MixtralConfig(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=512, sliding_window=None,
        eos_token_id=None, bos_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = MixtralForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    words = build_tokenizer()
    words.save_pretrained(str(tmp_path))
    family = module_of("A model family", "walked_mixtral", monkeypatch).MIXTRAL
    assert family.layout(config, 1000) is not None
    monkeypatch.setitem(registry.BY_TYPE, "mixtral", family)
    ids = torch.tensor([words.encode(PROMPT)])
    theirs = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist()
    opened = load_model(ModelSettings(path=tmp_path, dtype="float32"))
    assert isinstance(opened.decoder, FusedDecoder)
    assert answer(tmp_path) == theirs


def test_a_checkpoint_format(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of int8 rows answers what the same numbers answer as a plain one."""
    plain, rows = tmp_path / "plain", tmp_path / "rows"
    for path in (plain, rows):
        shutil.copytree(tiny, path)
    weights = load_file(tiny / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    scale = weights[name].float().abs().amax(dim=1) / 127
    codes = (weights[name].float() / scale[:, None]).round().to(torch.int8)
    save_file(weights | {name: codes.float() * scale[:, None]}, plain / "model.safetensors", {"format": "pt"})
    save_file(weights | {name: codes, f"{name}_scale": scale}, rows / "model.safetensors", {"format": "pt"})
    config = json.loads((tiny / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "i8rows"}
    (rows / "config.json").write_text(json.dumps(config))
    module_of("A checkpoint format", "walked_i8rows", monkeypatch)
    monkeypatch.setitem(reading.READERS, "i8rows", "walked_i8rows")
    assert answer(rows) == answer(plain)


def test_a_storage_tier(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one engine computed another one finds on the shelf, which a package's entry point names."""
    facts = tmp_path / "walked_shelf-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: walked-shelf\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[stemma.pools]\nshelf = walked_shelf:open_backend\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    shelf = module_of("A storage tier", "walked_shelf", monkeypatch)
    more = {"pool": "shelf", "load_when": "always"}
    first = answer(tiny, **more)
    assert len(shelf.VALUES) > 2
    llm = LLM(tiny, **(SMALL | more))
    try:
        result = llm.generate(PROMPT, GREEDY)[0]
    finally:
        llm.close()
    assert list(result.completions[0].token_ids) == first
    assert {tier.value: count for tier, count in result.cache.cached_by_tier.items()}["pool"] >= 32


async def test_an_endpoint(
    engine: ScriptedEngine,  # noqa: F811
    settings: Settings,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = module_of("An endpoint", "walked_endpoint", monkeypatch).router
    monkeypatch.setattr(server_app, "ROUTERS", (*server_app.ROUTERS, router))
    keyed = settings.model_copy(update={"server": settings.server.model_copy(update={"api_key": "s3cret"})})
    app = server_app.create_app(engine, keyed)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://localhost"
    ) as client:
        assert (await client.get("/v1/context_length")).status_code == 401
        told = await client.get("/v1/context_length", headers={"authorization": "Bearer s3cret"})
        assert told.json() == {"context_length": engine.max_model_len}
    assert "/v1/context_length" in app.openapi()["paths"]


def test_an_eviction_policy(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cache that is too small for what is asked it evicts, and answers stay as they are."""
    policy = module_of("An eviction policy", "walked_policy", monkeypatch).InOrder
    monkeypatch.setattr(make_policy, "__defaults__", ({**POLICIES, policy.name: policy},))
    prompts = [f"{number} {PROMPT}" for number in range(6)]
    room = {"kv_cache_memory": "256KB", "max_model_len": 256}
    expected = [answer(tiny, prompt, enable_prefix_cache=False) for prompt in prompts[:2]]
    llm = LLM(tiny, **(SMALL | room | {"eviction": policy.name}))
    try:
        results = [
            list(llm.generate(prompt, GREEDY)[0].completions[0].token_ids)
            for prompt in [*prompts, *prompts[:2]]
        ]
        stats = llm.engine.stats()
    finally:
        llm.close()
    assert results[:2] == results[-2:] == expected
    assert stats.num_evicted_blocks > 0
    assert stats.num_policy_failures == 0


def test_a_sampling_parameter(tiny: Path, tmp_path: Path) -> None:
    """In a copy with the page's changes: a tiny gap leaves only the likeliest token."""
    copy = tmp_path / "src" / "stemma"
    shutil.copytree(ROOT / "src" / "stemma", copy, ignore=shutil.ignore_patterns("__pycache__"))
    for change in block_of("A sampling parameter", "diff").split("--- ")[1:]:
        file, _, lines = change.partition("\n")
        apply(copy / file, lines)
    program = f"""
from pathlib import Path
from types import SimpleNamespace

from stemma import LLM, SamplingParams
from stemma.config.settings import EngineSettings, ModelSettings, Settings
from stemma.server.schemas.openai import CompletionRequest
from stemma.server.turn.sampling import completion_sampling

settings = Settings(engine=EngineSettings(model=ModelSettings(path=Path({str(tiny)!r}))))
intake = SimpleNamespace(settings=settings, largest_n=1, engine=SimpleNamespace(default_sampling={{}}))
asked = completion_sampling(intake, CompletionRequest(prompt="x", max_tokens=8, seed=1, max_gap=0.001))
llm = LLM({str(tiny)!r}, **{SMALL!r})
sampled, free, greedy = (
    list(llm.generate({PROMPT!r}, params)[0].completions[0].token_ids)
    for params in (asked, SamplingParams(seed=1, max_tokens=8), SamplingParams(temperature=0.0, max_tokens=8))
)
assert sampled == greedy != free, (sampled, greedy, free)
try:
    SamplingParams(max_gap=-1.0)
except Exception as error:
    assert "max_gap" in str(error)
else:
    raise SystemExit("it takes any number")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def apply(file: Path, lines: str) -> None:
    """Put the changes of one file in: lines with a minus, or a context, become those with a plus."""
    text = file.read_text()
    for hunk in re.findall(r"((?:^[ -].*\n)+)((?:^\+.*\n)+)", lines, re.M):
        before, added = ([line[1:] for line in part.splitlines()] for part in hunk)
        kept = [line for line, raw in zip(before, hunk[0].splitlines(), strict=True) if raw[0] == " "]
        old, new = "\n".join(before), "\n".join([*kept, *added])
        assert text.count(old) == 1, (file, old)
        text = text.replace(old, new)
    file.write_text(text)
