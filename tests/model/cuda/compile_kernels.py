"""Compiles `attend_kernel` for shapes of real models and prints what each takes, one JSON object a line.

Arguments: the compute capability, e.g. 90, and whether `few` or `all` shapes.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

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

if __name__ == "__main__":
    capability = int(sys.argv[1])
    compile_reduction(capability)
    for layer, num_queries, part in {"few": FEW, "all": ALL}[sys.argv[2]]:
        print(json.dumps(compile_layer(layer, num_queries, capability, part)))
