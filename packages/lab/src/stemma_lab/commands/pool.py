"""`stemma pool`: what a pool of many devices costs and holds; which pools there are."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table

from stemma.config.sizes import format_size, parse_size
from stemma.errors import ConfigError, ModelError
from stemma.foreign_code import ForeignCode
from stemma.memory.device.layout import DTYPE_BYTES, KVLayout, StoredAs
from stemma.model.attend.compression import compressed_layout
from stemma.model.files.directory import is_gguf
from stemma_lab.pool_plan import MAX_LINKS, PoolPlan, PoolTokens, plan_pool, plan_tokens

_STORED = ("int8", "fp8")
"""KV dtypes that are stored as codes with scales (--kv-cache-dtype)."""

app = typer.Typer(no_args_is_help=True, help="Blocks shared by machines.")


@app.command("list")
def list_command() -> None:
    """Print the names that --pool takes, those of installed packages included."""
    from stemma.memory.tiers.pool.registry import known_pools

    for name in known_pools():
        typer.echo(name)


@app.command("plan")
def plan_command(
    nodes: Annotated[int, typer.Option(min=1, help="Machines in the pool.")],
    devices_per_node: Annotated[int, typer.Option(min=1, help="Devices (dies) of each machine.")],
    model: Annotated[
        Path | None, typer.Option(help="Checkpoint directory (its config.json is enough): count tokens too.")
    ] = None,
    bytes_per_token: Annotated[
        int | None, typer.Option(min=1, help="KV bytes of a token, instead of --model.")
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16, float32, int8 or fp8; default: the checkpoint's.")
    ] = None,
    dram: Annotated[str, typer.Option(help="DRAM of each node for the pool, e.g. 512GB.")] = "0",
    ssd: Annotated[str, typer.Option(help="SSD of each node for the pool, e.g. 4TB.")] = "0",
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Devices that share one model.")] = 1,
    memory_fraction: Annotated[float, typer.Option(help="Fraction of device memory used now.")] = 0.92,
    will_grow: Annotated[bool, typer.Option("--will-grow", help="Leave room for further machines.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the device memory that links take, the fraction to set for it, and the tokens that fit."""
    plan = plan_pool(nodes, devices_per_node, memory_fraction=memory_fraction, will_grow=will_grow)
    if model is not None and bytes_per_token is not None:
        raise ConfigError("give --model or --bytes-per-token, not both")
    if model is not None:
        bytes_per_token = layout_of(model, kv_dtype).bytes_per_token
    tokens = None
    dram_bytes, ssd_bytes = nodes * parse_size(dram), nodes * parse_size(ssd)
    if bytes_per_token is not None:
        tokens = plan_tokens(
            plan, bytes_per_token, dram_bytes=dram_bytes, ssd_bytes=ssd_bytes, tp_size=tensor_parallel
        )
    if as_json:
        typer.echo(json.dumps({"plan": asdict(plan), "tokens": None if tokens is None else asdict(tokens)}))
        return
    console = Console(highlight=False)
    console.print(_plan_table(plan, memory_fraction))
    if tokens is not None:
        console.print(_tokens_table(tokens, dram_bytes, ssd_bytes))
    if not plan.fits_link_limit:
        console.print(
            f"{plan.num_devices} devices are more than the {MAX_LINKS} that one pool should have: "
            "links would be torn down and built again. Make several pools.",
            style="yellow",
        )


def layout_of(path: Path, dtype: str | None = None, block_size: int = 64) -> KVLayout:
    """Return the KV layout that a checkpoint's config.json, or a GGUF file's metadata, implies.

    Raises ModelError if the file lacks what it takes, ConfigError for an unknown dtype.
    """
    config = _read_config(path)
    stored = cast(StoredAs, dtype) if dtype in _STORED else "plain"
    named = (dtype if stored == "plain" else None) or config.get("dtype") or config.get("torch_dtype")
    named = named or "bfloat16"
    if named not in DTYPE_BYTES:
        raise ConfigError(f"unknown KV dtype {named!r}; known: {', '.join((*DTYPE_BYTES, *_STORED))}")
    try:
        num_layers, num_heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
        if "kv_lora_rank" in config:  # MLA: one compressed latent for all heads
            rank = int(config["kv_lora_rank"])
            latent_dim = rank + int(config["qk_rope_head_dim"])
            if config.get("index_topk"):  # sparse attention: an indexer's key lies beside the latent
                latent_dim += int(config["index_head_dim"])
            scaled = 0 if stored == "plain" else rank
            return KVLayout(num_layers, 1, block_size, 1, latent_dim, named, stored, scaled)
        if config.get("model_type") == "deepseek_v4":
            return _compressed_layout(path, config, named, block_size)
        num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
        head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // num_heads)
    except KeyError as error:
        raise ModelError(f"{path}: config.json has no {error}") from error
    return KVLayout(num_layers, 2, block_size, num_kv_heads, head_dim, named, stored)


def _compressed_layout(path: Path, fields: dict[str, Any], dtype: str, block_size: int) -> KVLayout:
    """Return the layout of a model that keeps entries in blocks, and rows of tokens in pages."""
    from transformers import AutoConfig

    with ForeignCode(f"transformers can't read {path}"):
        config = AutoConfig.for_model(**fields)
        compressed, windows = compressed_layout(config, int(config.max_position_embeddings))
    dim = compressed.block_dim(block_size)
    return KVLayout(1, 1, block_size, 1, dim, dtype, windows=windows, compressed=compressed)


def _read_config(path: Path) -> dict[str, Any]:
    if is_gguf(path):
        return _read_gguf_config(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"can't read {file}: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file} isn't a JSON object")
    text: dict[str, Any] = config.get("text_config") or config
    return text


def _read_gguf_config(path: Path) -> dict[str, Any]:
    from stemma.model.files.gguf_header import read_header
    from stemma.model.formats.gguf.config import read_config

    header = read_header(path)
    matrices = {tensor.type.name for tensor in header.tensors.values() if len(tensor.shape) > 1}
    config: dict[str, Any] = read_config(header).to_dict()
    return config | {"dtype": "float32" if matrices == {"F32"} else "bfloat16"}


def _plan_table(plan: PoolPlan, old_fraction: float) -> Table:
    table = Table(title="links", show_header=False)
    table.add_row("devices", f"{plan.num_devices:,}")
    table.add_row("links of each device", f"{plan.num_links:,} of at most {MAX_LINKS}")
    table.add_row("device memory they take", f"{format_size(plan.link_bytes)} a device")
    table.add_row(
        "memory fraction", f"{old_fraction:g} - {plan.fraction_for_links:g} = {plan.memory_fraction:g}"
    )
    table.add_row("which frees", f"{format_size(plan.freed_bytes)} a device")
    return table


def _tokens_table(tokens: PoolTokens, dram_bytes: int, ssd_bytes: int) -> Table:
    table = Table(title="tokens", show_header=False)
    table.add_row("KV of a token", f"{tokens.bytes_per_token:,} bytes")
    table.add_row(f"DRAM of all nodes, {format_size(dram_bytes)}", f"{tokens.dram_tokens:,} tokens")
    table.add_row(f"SSD of all nodes, {format_size(ssd_bytes)}", f"{tokens.ssd_tokens:,} tokens")
    table.add_row("context that links cost", f"{tokens.tokens_for_links:,} tokens")
    return table
