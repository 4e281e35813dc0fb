"""Compiles every kernel that the fused decoder launches, at shapes of real models; prints JSON, a line each.

Arguments: the compute capability, e.g. 90, and names of `MODELS`, or ``sampler``. Launches are caught on
their way to a device, so what is compiled is what would run.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout, StoredAs
from stemma.model.attend.attention import AttentionCall
from stemma.model.attend.batch import ForwardBatch
from stemma.model.cpu.heads import kv_shape_of
from stemma.model.cuda import products
from stemma.model.cuda.fused import LayoutDecoder
from stemma.model.cuda.layers import LayerStep
from stemma.model.cuda.low_rank import AdapterStep
from stemma.model.cuda.sampler import choose
from stemma.model.cuda.state_list import StateList
from stemma.model.families.layout import Linear, ModelLayout, Norm
from stemma.model.families.registry import family_of
from stemma.model.opened.draw_rules import DrawRules
from stemma.model.weights.named import Affine
from stemma.model.weights.quantized import ActivationScheme, QuantizedWeight
from stemma.model.weights.stored import CodedFloats

GROUP = 128
"""Inputs that share a scale, in models of 4 bits."""
VOCAB_SIZES = (32_000, 50_257, 151_936, 262_144)
COUNTS = (1, 17, 128, 2048)
STORED: tuple[StoredAs, ...] = ("plain", "int8", "fp8")
_TOLD = ("BLOCK_T", "BLOCK_N", "PIECES", "GATE", "EXPERTS")
_PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas-blackwell"
_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float64: "*fp64",
}


def _config(name: str, **fields: Any) -> Any:
    make = getattr(transformers, name)
    return make(num_hidden_layers=1, tie_word_embeddings=True, vocab_size=2048, **fields)


MODELS: dict[str, Callable[[], Any]] = {
    "8B": lambda: _config(
        "LlamaConfig",
        hidden_size=4096,
        intermediate_size=14_336,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "0.5B": lambda: _config(
        "Qwen2Config", hidden_size=896, intermediate_size=4864, num_attention_heads=14, num_key_value_heads=2
    ),
    "axes": lambda: _config(
        "Qwen3VLTextConfig",
        hidden_size=1024,
        intermediate_size=1024,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        rope_parameters={"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
    ),
    "gemma": lambda: _config(
        "Gemma3TextConfig",
        hidden_size=3840,
        intermediate_size=15_360,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
    ),
    "mixture": lambda: _config(
        "Qwen3MoeConfig",
        hidden_size=512,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
    ),
    "latent": lambda: transformers.DeepseekV3Config(
        num_hidden_layers=2,
        first_k_dense_replace=1,
        vocab_size=2048,
        hidden_size=1024,
        intermediate_size=1024,
        moe_intermediate_size=256,
        n_routed_experts=64,
    ),
    "delta rule": lambda: transformers.Qwen3_5TextConfig(
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        vocab_size=2048,
        hidden_size=2048,
        intermediate_size=2048,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
    ),
    "mamba 2": lambda: transformers.GraniteMoeHybridConfig(
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        vocab_size=2048,
        hidden_size=1536,
        shared_intermediate_size=2048,
        num_local_experts=0,
        num_attention_heads=12,
        num_key_value_heads=4,
        mamba_n_heads=48,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
        position_embedding_type="rope",
    ),
}


MODELS |= {f"{name} in {kind}": MODELS[name] for name in ("8B", "mixture") for kind in ("4 bits", "fp8")}


class EmptyWeights:
    """`NamedWeights` of any layout, in bfloat16, that hold anything."""

    def __init__(self, model: ModelLayout, *, are_codes: bool, are_floats: bool) -> None:
        self.shapes, self._are_codes, self._are_floats = model.shapes(), are_codes, are_floats

    def bias(self, linear: Linear) -> torch.Tensor | None:
        return torch.empty(linear.outputs).bfloat16() if linear.has_bias else None

    def coded(self, linear: Linear) -> CodedFloats | None:
        if not self._are_floats:
            return None
        codes = torch.zeros(linear.outputs, linear.inputs, dtype=torch.float8_e4m3fn)
        scales = torch.ones(linear.outputs, -(-linear.inputs // GROUP))
        return CodedFloats(codes, scales, GROUP, torch.bfloat16)

    def affine(self, linear: Linear) -> Affine:
        bias = self.bias(linear)
        shape = linear.outputs, linear.inputs
        if not self._are_codes:
            return Affine(torch.empty(shape, dtype=torch.bfloat16), bias)
        codes, zeros = (torch.zeros(shape[0], k, dtype=torch.int8) for k in (shape[1], shape[1] // GROUP))
        scales = torch.ones(zeros.shape)
        return Affine(
            QuantizedWeight(codes, scales, zeros, 4, GROUP, ActivationScheme.NONE, is_unsigned=True), bias
        )

    def norm(self, norm: Norm) -> torch.Tensor:
        return torch.empty(norm.size, dtype=torch.float32 if norm.in_floats else torch.bfloat16)

    def tensor(self, name: str) -> torch.Tensor:
        return torch.empty(self.shapes[name], dtype=torch.bfloat16)

    def floats(self, name: str) -> torch.Tensor:
        return torch.empty(self.shapes[name])


class EmptyReader:
    """Attends to nothing."""

    def __init__(self, slots: torch.Tensor) -> None:
        self.slots = slots

    def read(self, call: AttentionCall, query: torch.Tensor, value_dim: int | None = None) -> torch.Tensor:
        width = call.latent.rank if call.latent else value_dim or query.shape[2]
        return query.new_empty(*query.shape[:2], width)


def layout_of(config: Any) -> ModelLayout:
    """Return the layout that a config makes."""
    family = family_of(config.model_type)
    assert family is not None
    assert family.layout is not None
    made = family.layout(config, 100_000)
    assert made is not None
    return made


class Catcher:
    """Compiles launches for a device that isn't there."""

    def __init__(self, capability: int) -> None:
        self._capability = capability
        self._seen: set[str] = set()
        self.name = ""

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """Compile it unless an equal one was."""
        names = kernel.arg_names
        given = dict(zip(names, args, strict=False)) | {n: options[n] for n in names if n in options}
        if "WIDEN" in given:
            given["WIDEN"] = False
        how = {name: value for name, value in options.items() if name not in names}
        constants = {p.name: given[p.name] for p in kernel.params if p.is_constexpr}
        unknown = {p.name for p in kernel.params if p.do_not_specialize}
        signature, aligned = {}, {}
        for index, name in enumerate(names):
            value = given[name]
            if name in constants:
                signature[name] = "constexpr"
                continue
            if isinstance(value, torch.Tensor):
                signature[name] = _TYPES[value.dtype]
                is_aligned = value.data_ptr() % 16 == 0
            elif isinstance(value, float):
                signature[name], is_aligned = "fp32", False
            elif name in unknown:
                signature[name], is_aligned = "i32", False
            elif value == 1:
                signature[name], constants[name] = "constexpr", 1
                continue
            else:
                signature[name], is_aligned = "i32", value % 16 == 0
            if is_aligned:
                aligned[(index,)] = [["tt.divisibility", 16]]
        key = repr((kernel.fn.__name__, signature, sorted(constants.items(), key=str), sorted(aligned), how))
        if key in self._seen:
            return
        self._seen.add(key)
        compiled = triton.compile(
            ASTSource(kernel, signature, constants, aligned),
            target=GPUTarget("cuda", self._capability, 32),
            options=how,
        )
        ptx = compiled.asm["ptx"]
        registers, spilled = _usage(ptx, self._capability)
        answer = {
            "model": self.name,
            "kernel": kernel.fn.__name__,
            "tiles": {name: value for name, value in constants.items() if name in _TOLD},
            "shared_bytes": compiled.metadata.shared,
            "registers": registers,
            "spilled_bytes": spilled,
            "num_tensor_core_products": ptx.count("wgmma.mma_async") + ptx.count("mma.sync"),
        }
        print(json.dumps(answer), flush=True)


def _usage(ptx: str, capability: int) -> tuple[int, int]:
    """Return registers of a thread, and bytes that it spills."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        name = f"sm_{capability}a" if capability == 90 else f"sm_{capability}"
        done = subprocess.run(
            [_PTXAS, "-v", f"--gpu-name={name}", file.name, "-o", "/dev/null"], capture_output=True, text=True
        )
    registers = re.search(r"Used (\d+) registers", done.stderr)
    spills = re.findall(r"(\d+) bytes spill", done.stderr)
    assert registers is not None, done.stderr
    return int(registers[1]), sum(map(int, spills))


def step(decoder: LayoutDecoder, model: ModelLayout, num_tokens: int, stored: StoredAs) -> None:
    """Launch what a step of so many tokens launches, over KV stored so."""
    shape = kv_shape_of(model)
    shapes = shape.num_layers, shape.num_parts, 64, shape.num_kv_heads, shape.head_dim
    kept = KVLayout(*shapes, "bfloat16", state=shape.state)
    if stored != "plain":
        kept = replace(kept, stored=stored, latent_rank=shape.latent_rank)
    kv = DeviceKV(kept, kept.aligned(-(-num_tokens // 64)), num_states=0 if shape.state is None else 1)
    rows = torch.arange(num_tokens)
    batch = ForwardBatch(
        token_ids=torch.zeros_like(rows),
        positions=rows,
        slots=rows,
        query_starts=[0, num_tokens],
        context_lens=[num_tokens],
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        logits_rows=rows,
    )
    states = StateList(torch.zeros(1, dtype=torch.int32), 0, num_tokens)
    decoder.head(decoder.states(batch, LayerStep(EmptyReader(rows), kv, states=states)))
    if stored == "int8":
        adapters = AdapterStep(torch.zeros(8, 3, dtype=torch.int64), 64)
        decoder.states(batch, LayerStep(EmptyReader(rows), kv, adapters))


def main() -> None:
    """Compile what steps of the named models launch."""
    catcher: Any = Catcher(int(sys.argv[1]))
    asked: Any = products
    asked.has_warpgroups = lambda _device: int(sys.argv[1]) >= 90
    JITFunction.run = lambda kernel, *args, **options: catcher.run(kernel, *args, **options)
    for name in sys.argv[2:]:
        if name == "sampler":
            catcher.name = name
            for vocab_size in VOCAB_SIZES:
                choose(torch.empty(1, vocab_size), DrawRules.greedy(1))
            continue
        catcher.name, model = name, layout_of(MODELS[name]())
        weights: Any = EmptyWeights(model, are_codes="4 bits" in name, are_floats="fp8" in name)
        decoder = LayoutDecoder(model, weights, torch.bfloat16, torch.device("cpu"), max_positions=4096)
        for stored in STORED if name in ("8B", "latent") else STORED[:1]:
            for num_tokens in COUNTS:
                step(decoder, model, num_tokens, stored)


if __name__ == "__main__":
    main()
