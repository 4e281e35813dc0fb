"""Compiles attention kernels for shapes of real models and prints what each takes, one JSON object a line.

Arguments: the compute capability, e.g. 90, and whether `few` or `all` shapes of `attend_kernel`, or those of
`attend_listed`, which are `listed`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stemma.memory.device.layout import KVLayout, StoredAs
from stemma.model.attend.attention import Sight
from stemma.model.cuda.attention_list import ListShape
from stemma.model.cuda.coded_kv import stored_constants
from stemma.model.cuda.listed_attention import TileShape, tile_shape
from stemma.model.cuda.listed_kernels import attend_listed, join_listed
from stemma.model.cuda.triton_attention import launch_shape, split_dim
from stemma.model.cuda.triton_kernels import attend_kernel, reduce_kernel

NUM_PROGRAMS = 264
NUM_PREFILL = 2048
NUM_SHARING = 16


@dataclass(frozen=True)
class Layer:
    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    is_gemma: bool = False
    has_sinks: bool = False
    stored: StoredAs = "plain"


LAYERS = (
    Layer("0.5B", 14, 2, 64, 64),
    Layer("8B", 32, 8, 128, 128),
    Layer("gemma2", 16, 8, 256, 256, is_gemma=True),
)
LATENT = Layer("deepseek-v3 latent", 128, 1, 576, 512)


def compile_layer(layer: Layer, num_queries: int, capability: int, part: str = "all") -> dict[str, object]:
    """Compile as `TritonAttentionStep._run` would launch it in bf16.

    `part`: "all" keys; a "prefix" that `num_queries` decodes share; the "suffix" of each.
    """
    group = layer.num_heads // layer.num_kv_heads
    num_rows = [group] * num_queries if part == "suffix" else [num_queries * group]
    shape = launch_shape(num_rows, layer.num_kv_heads, 2 * layer.head_dim, NUM_PROGRAMS)
    main, rest = split_dim(layer.head_dim)
    constants = {
        "GROUP": group,
        "HEAD_DIM": layer.head_dim,
        "VALUE_DIM": layer.value_dim,
        "BLOCK_SIZE": 64,
        "MAIN": main,
        "REST": rest,
        "VALUES": layer.value_dim,
        "BLOCK_M": shape.block_m,
        "BLOCK_N": shape.block_n,
        "NUM_SPLITS": shape.num_splits,
        "HAS_WINDOW": layer.is_gemma,
        "HAS_SOFTCAP": layer.is_gemma,
        "VALUES_ARE_KEYS": layer.value_dim < layer.head_dim,
        "WIDEN": False,
        "IS_PREFIX": part == "prefix",
        "IS_SUFFIX": part == "suffix",
    }
    types = dict.fromkeys(("query", "cache_k", "cache_v", "output"), "*bf16")
    types |= dict.fromkeys(
        ("partial", "partial_weight"), "*bf16" if shape.num_splits == 1 and part == "all" else "*fp32"
    )
    types |= dict.fromkeys(("tiles", "query_starts", "context_lens", "block_tables"), "*i32")
    types |= dict.fromkeys(("first_keys", "members", "member_starts", "num_shared_keys"), "*i32")
    types |= {"scale": "fp32", "softcap": "fp32", "window": "i32"} | dict.fromkeys(constants, "constexpr")
    names = attend_kernel.arg_names
    signature = {name: types.get(name, "i32") for name in names}
    is_aligned = [name.startswith("stride_") or signature[name].startswith("*") for name in names]
    aligned = {(index,): [["tt.divisibility", 16]] for index, yes in enumerate(is_aligned) if yes}
    kernel = triton.compile(
        ASTSource(attend_kernel, signature, constants, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": shape.num_warps, "num_stages": shape.num_stages},
    )
    ptx = kernel.asm["ptx"]
    assert kernel.asm["cubin"]
    return {
        "name": layer.name,
        "num_queries": num_queries,
        "part": part,
        "tile": [shape.block_m, shape.block_n],
        "shared_bytes": kernel.metadata.shared,
        "num_tensor_core_products": ptx.count("wgmma.mma_async") + ptx.count("mma.sync"),
    }


def compile_reduction(capability: int) -> None:
    """Compile the join of pieces with those of a shared prefix; raises if it doesn't."""
    constants = {"GROUP": 7, "VALUE_DIM": 64, "VALUES": 64, "BLOCK_M": 16, "NUM_SPLITS": 8, "NUM_SHARED": 16}
    types = dict.fromkeys(("partial", "partial_weight", "shared_partial", "shared_weight"), "*fp32")
    types |= dict.fromkeys(("member_of", "tiles", "query_starts"), "*i32") | {"output": "*bf16"}
    types |= dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in reduce_kernel.arg_names}
    source = ASTSource(reduce_kernel, signature, constants)
    assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]


def compile_listed(layer: Layer, num_rows: int, capability: int) -> dict[str, object]:
    """Compile as `ListedAttentionStep` would launch it in bf16, in a step of `num_rows` rows."""
    tile = tile_shape(
        2 * layer.head_dim,
        is_large=num_rows == NUM_PREFILL and capability == 90,
        is_coded=layer.stored != "plain",
        has_warpgroups=capability == 90,
    )
    shape = ListShape(layer.num_heads, layer.num_kv_heads, layer.value_dim, tile.block_m, 1024, Sight())
    constants = listed_constants(layer, shape, tile)
    kernel = _compile(attend_listed, constants, capability, tile, stored=layer.stored)
    ptx, sass = kernel.asm["ptx"], _disassembled(kernel.asm["cubin"])
    return {
        "name": layer.name,
        "num_rows": num_rows,
        "tile": [tile.block_m, tile.block_n],
        "shared_bytes": kernel.metadata.shared,
        "num_tensor_core_products": ptx.count("wgmma.mma_async") + ptx.count("mma.sync"),
        "products": sorted(set(re.findall(r"m\d+n\d+k\d+", ptx))),
        "layouts": sorted(set(re.findall(r"warpsPerCTA = \[(\d+, \d+)\]", _mma_lines(kernel.asm["ttgir"])))),
        "spills_in_loop": spills_in_loop(sass),
    }


def listed_constants(layer: Layer, shape: ListShape, tile: TileShape) -> dict[str, int | bool]:
    main, rest = split_dim(layer.head_dim)
    rank = layer.value_dim if layer.stored != "plain" and layer.value_dim < layer.head_dim else 0
    shape_of = (1, 1, 64, layer.num_kv_heads, layer.head_dim)
    return {
        **stored_constants(KVLayout(*shape_of, "bfloat16", layer.stored, rank)),
        "RANK": rank,
        "NUM_HEADS": layer.num_heads,
        "GROUP": layer.num_heads // layer.num_kv_heads,
        "HEADS": shape.heads,
        "UNITS": shape.units,
        "HEAD_DIM": layer.head_dim,
        "VALUE_DIM": layer.value_dim,
        "BLOCK_SIZE": 64,
        "MAIN": main,
        "REST": rest,
        "VALUES": 1 << (layer.value_dim - 1).bit_length(),
        "PIECE": shape.piece,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "HAS_FIRSTS": layer.is_gemma,
        "HAS_SOFTCAP": layer.is_gemma,
        "HAS_SINKS": layer.has_sinks,
        "VALUES_ARE_KEYS": layer.value_dim < layer.head_dim,
        "WIDEN": False,
    }


def _compile(
    function: Any,
    constants: dict[str, int | bool],
    capability: int,
    tile: TileShape,
    *,
    stored: StoredAs = "plain",
) -> Any:
    types = dict.fromkeys(("query", "output"), "*bf16")
    types |= dict.fromkeys(("cache_k", "cache_v"), "*bf16" if stored == "plain" else "*u8")
    types |= dict.fromkeys(("partial", "partial_weight", "sinks"), "*fp32") | {"numbers": "*i32"}
    types |= {"scale": "fp32", "softcap": "fp32"} | dict.fromkeys(constants, "constexpr")
    names = function.arg_names
    signature = {name: types.get(name, "i32") for name in names}
    odd = () if constants.get("SCALES_AT", 0) % 128 == 0 else ("stride_k_token", "stride_v_token")
    is_aligned = [name.startswith("stride_") or signature[name].startswith("*") for name in names]
    aligned = {
        (index,): [["tt.divisibility", 4 if names[index] in odd else 16]]
        for index, yes in enumerate(is_aligned)
        if yes
    }
    return triton.compile(
        ASTSource(function, signature, constants, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
    )


def _mma_lines(ttgir: str) -> str:
    return "\n".join(line for line in ttgir.splitlines() if "nvidia_mma" in line and line.startswith("#"))


def _disassembled(cubin: bytes) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout


def spills_in_loop(sass: str) -> int:
    """Count moves between registers and the stack in the loop over keys: the smallest with products in it."""
    lines = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);", sass)]
    products = [at for at, text in lines if re.search(r"H?G?MMA\.", text)]
    jumps = [(int(text.split()[-1], 16), at) for at, text in lines if re.search(r"\bBRA\b.*0x", text)]
    loops = [loop for loop in jumps if loop[0] < loop[1] and any(loop[0] <= at <= loop[1] for at in products)]
    begin, end = min(loops, key=lambda loop: loop[1] - loop[0])
    return sum(bool(re.search(r"\b(STL|LDL)\b", text)) for at, text in lines if begin <= at <= end)


SMALL, LARGE, GEMMA = LAYERS
FEW = (
    *((LARGE, NUM_PREFILL, "all"), (GEMMA, 1, "all"), (LATENT, 1, "all")),
    *((LARGE, NUM_SHARING, "prefix"), (LATENT, NUM_SHARING, "suffix")),
)
"""Each kind of layer and each part once."""
ALL = (
    *((layer, num_queries, "all") for layer in LAYERS for num_queries in (1, NUM_PREFILL)),
    (LATENT, 1, "all"),
    *((layer, NUM_SHARING, part) for layer in (SMALL, LARGE, LATENT) for part in ("prefix", "suffix")),
)

LISTED = (
    *((replace(layer, name=f"{layer.name} fp8", stored="fp8"), 64) for layer in (SMALL, LARGE, LATENT)),
    *((replace(LARGE, name=f"8B {stored}", stored=stored), NUM_PREFILL) for stored in ("int8", "fp8")),
    *((layer, num_rows) for layer in (SMALL, LARGE) for num_rows in (64, NUM_PREFILL)),
    *((GEMMA, 64), (LATENT, 64)),
    (Layer("head dim 96, sinks", 32, 32, 96, 96, has_sinks=True), NUM_PREFILL),
)


def compile_join(capability: int) -> None:
    """Compile what joins the pieces; raises if it doesn't."""
    constants = {
        **{"NUM_HEADS": 14, "UNIT": 7, "HEADS": 4, "VALUE_DIM": 64, "VALUES": 64},
        "HAS_SINKS": True,
    }
    assert _compile(join_listed, constants, capability, TileShape(0, 0, 4, 2)).asm["cubin"]


if __name__ == "__main__":
    capability = int(sys.argv[1])
    if sys.argv[2] == "listed":
        compile_join(capability)
        for layer, num_rows in LISTED:
            print(json.dumps(compile_listed(layer, num_rows, capability)), flush=True)
        sys.exit()
    compile_reduction(capability)
    for layer, num_queries, part in {"few": FEW, "all": ALL}[sys.argv[2]]:
        print(json.dumps(compile_layer(layer, num_queries, capability, part)))
