"""The structures that Python and the C++ kernels exchange: ctypes mirrors of those in the headers.

`abi.h` has the library describe its own; a library whose description differs from these is refused.
"""

from __future__ import annotations

import ctypes


class BatchArgs(ctypes.Structure):
    """`Batch` of plan.h: a step's sequences."""

    _fields_ = (
        ("num_seqs", ctypes.c_int32),
        ("query_starts", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("block_size", ctypes.c_int32),
        ("limits", ctypes.c_void_p),
    )


class KVFormat(ctypes.Structure):
    """`KVFormat` of kv_format.h: how rows of KV are stored."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("stored", "num_scales", "first_dims", "scale_offset")),
        ("column_stride", ctypes.c_int64),
    )


class WriteArgs(ctypes.Structure):
    """`WriteArgs` of kv_format.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("source", "target", "slots")),
        *((name, ctypes.c_int64) for name in ("tokens", "source_token_stride", "source_head_stride")),
        *((name, ctypes.c_int64) for name in ("block_stride", "token_stride", "head_stride")),
        *((name, ctypes.c_int32) for name in ("heads", "dim", "block_size", "is_bf16", "threads")),
        ("format", KVFormat),
    )


class AttendArgs(ctypes.Structure):
    """`AttendArgs` of kv_rows.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "keys", "values", "output")),
        *((name, ctypes.c_int64) for name in ("query_token_stride", "query_head_stride")),
        *((name, ctypes.c_int64) for name in ("block_stride", "token_stride", "head_stride")),
        *((name, ctypes.c_int32) for name in ("key_dim", "value_dim", "window", "first_key", "is_bf16")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        ("sinks", ctypes.c_void_p),
        ("format", KVFormat),
        *((name, ctypes.c_void_p) for name in ("lows", "partials")),
    )


class MergeArgs(ctypes.Structure):
    """`MergeArgs` of attention_merge.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("parts", "output", "sinks")),
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("num_parts", "heads", "value_dim", "is_bf16", "threads")),
    )


class NormArgs(ctypes.Structure):
    """`NormArgs` of layers.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("delta", "residual", "weight", "output")),
        *((name, ctypes.c_int64) for name in ("rows", "dim")),
        *((name, ctypes.c_int32) for name in ("is_bf16", "threads")),
        ("eps", ctypes.c_float),
    )


class RotateArgs(ctypes.Structure):
    """`RotateArgs` of layers.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "cos", "sin", "q_norm", "k_norm", "query")),
        *((name, ctypes.c_void_p) for name in ("keys", "values", "slots")),
        *((name, ctypes.c_int64) for name in ("tokens", "block_stride", "token_stride", "head_stride")),
        *(
            (name, ctypes.c_int32)
            for name in ("heads", "kv_heads", "dim", "block_size", "is_bf16", "threads")
        ),
        ("eps", ctypes.c_float),
        ("format", KVFormat),
    )


class GateArgs(ctypes.Structure):
    """`GateArgs` of layers.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gate_up", "output")),
        *((name, ctypes.c_int64) for name in ("rows", "dim")),
        *((name, ctypes.c_int32) for name in ("is_bf16", "threads")),
    )


class Codes(ctypes.Structure):
    """`Codes` of strips.h: how a packed weight is quantized."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("bits", "group", "scale_bytes", "has_offsets", "activations")),
        ("input_scale", ctypes.c_float),
        ("input_zero", ctypes.c_int32),
    )


class Strips(ctypes.Structure):
    """`Strips` of strips.h: a packed weight [n, k] and its bias."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("data", "bias")),
        *((name, ctypes.c_int64) for name in ("n", "k")),
        ("codes", Codes),
        ("patches", ctypes.c_void_p),
    )


class PackCodesArgs(ctypes.Structure):
    """`PackCodesArgs` of quantized.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "offsets")),
        *((name, ctypes.c_int64) for name in ("rows", "first")),
        ("target", Strips),
        ("threads", ctypes.c_int32),
    )


class GatedWeights(ctypes.Structure):
    """`GatedWeights` of mixture.h."""

    _fields_ = tuple((name, Strips) for name in ("gate", "up", "down"))


class PackArgs(ctypes.Structure):
    """`PackArgs` of strips.h."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("stride", "rows", "first")),
        ("target", Strips),
        *((name, ctypes.c_int32) for name in ("is_bf16", "threads")),
    )


class CompressArgs(ctypes.Structure):
    """`CompressArgs` of compressing.h."""

    _fields_ = (
        ("sources", ctypes.c_void_p),
        ("num_sources", ctypes.c_int64),
        ("target", Strips),
        *((name, ctypes.c_void_p) for name in ("patches", "counts")),
        ("most_patches", ctypes.c_int64),
        ("threads", ctypes.c_int32),
    )


class MultiplyArgs(ctypes.Structure):
    """`MultiplyArgs` of products.h."""

    _fields_ = (
        ("weight", Strips),
        *((name, ctypes.c_void_p) for name in ("x", "output")),
        *((name, ctypes.c_int64) for name in ("x_stride", "output_stride", "rows")),
        *((name, ctypes.c_int32) for name in ("is_bf16", "threads")),
    )


class MixtureArgs(ctypes.Structure):
    """`MixtureArgs` of mixture.h."""

    _fields_ = (
        ("experts", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("num_experts", "top_k")),
        *((name, ctypes.c_void_p) for name in ("x", "ids", "weights", "output", "added", "room")),
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("is_bf16", "threads")),
    )


class LatentWeights(ctypes.Structure):
    """`LatentWeights` of latent.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("fold", "project")),
        ("expand", Strips),
        *((name, ctypes.c_void_p) for name in ("query_norm", "latent_norm")),
        *((name, ctypes.c_float) for name in ("query_eps", "latent_eps")),
    )


class LatentArgs(ctypes.Structure):
    """`LatentArgs` of latent.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "latents", "slots")),
        *((name, ctypes.c_int64) for name in ("block_stride", "token_stride")),
        *(
            (name, ctypes.c_int32)
            for name in ("heads", "rank", "nope", "rope", "value", "block_size", "rotation")
        ),
        ("format", KVFormat),
    )


class Router(ctypes.Structure):
    """`Router` of mixture.h."""

    _fields_ = (
        ("weight", Strips),
        ("correction", ctypes.c_void_p),
        *(
            (name, ctypes.c_int32)
            for name in ("num_experts", "top_k", "by", "normalize", "num_groups", "top_groups")
        ),
        ("scale", ctypes.c_float),
    )


class LayerWeights(ctypes.Structure):
    """`LayerWeights` of decoder_step.h."""

    _fields_ = (
        *((name, Strips) for name in ("qkv", "output")),
        ("latent", LatentWeights),
        ("dense", GatedWeights),
        ("router", Router),
        *((name, ctypes.c_void_p) for name in ("experts", "input_norm", "post_norm", "q_norm", "k_norm")),
        ("window", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


class LowRankArgs(ctypes.Structure):
    """`LowRank` of low_rank.h: what an adapter adds to one product."""

    _fields_ = (("down", Strips), ("up", Strips), ("scale", ctypes.c_float))


class AdapterLayerArgs(ctypes.Structure):
    """`AdapterLayer` of low_rank.h."""

    _fields_ = tuple(
        (name, LowRankArgs) for name in ("query", "key", "value", "expand", "output", "gate", "up", "down")
    )


class AdapterRowsArgs(ctypes.Structure):
    """`AdapterRows` of low_rank.h: which rows of a step an adapter serves."""

    _fields_ = (
        ("layers", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("begin", "end", "first_logit", "last_logit")),
    )


class StepArgs(ctypes.Structure):
    """`StepArgs` of decoder_step.h."""

    _fields_ = (
        ("layers", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("num_layers", "threads")),
        ("final_norm", ctypes.c_void_p),
        ("head", Strips),
        *((name, ctypes.c_int64) for name in ("rows", "num_logits")),
        ("logits_rows", ctypes.c_void_p),
        ("hidden_dim", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("hidden", "logits", "states", "room")),
        ("layer_bytes", ctypes.c_int64),
        ("rotate", RotateArgs),
        ("latent", LatentArgs),
        ("attend", AttendArgs),
        ("adapters", ctypes.c_void_p),
        ("num_adapters", ctypes.c_int32),
        ("is_bf16", ctypes.c_int32),
        ("eps", ctypes.c_float),
    )


_MIRRORS: dict[str, type[ctypes.Structure]] = {
    "Batch": BatchArgs,
    "LowRank": LowRankArgs,
    "AdapterLayer": AdapterLayerArgs,
    "AdapterRows": AdapterRowsArgs,
    **{
        mirror.__name__: mirror
        for mirror in (
            *(KVFormat, WriteArgs, AttendArgs, MergeArgs, NormArgs, RotateArgs, GateArgs),
            *(Codes, PackCodesArgs, Strips, GatedWeights, PackArgs, CompressArgs, MultiplyArgs),
            *(MixtureArgs, LatentWeights, LatentArgs, Router, LayerWeights, StepArgs),
        )
    },
}
"""Every structure that the library describes, by its name there."""


class LibraryMismatch(Exception):
    """A library whose structures differ from ours: it was compiled from other sources."""


def check_structures(library: ctypes.CDLL) -> None:
    """Raise LibraryMismatch unless size and offsets of every structure are the same on both sides."""
    library.stemma_structures.restype = ctypes.c_char_p
    described = dict(line.split(" ", 1) for line in library.stemma_structures().decode().splitlines())
    ours = {name: _layout_of(mirror) for name, mirror in _MIRRORS.items()}
    for name in sorted({*described, *ours}):
        if described.get(name) != ours.get(name):
            raise LibraryMismatch(
                f"structure {name} is {described.get(name)} in the library and {ours.get(name)} here"
            )


def _layout_of(mirror: type[ctypes.Structure]) -> str:
    offsets = (f"{field[0]}:{getattr(mirror, field[0]).offset}" for field in mirror._fields_)
    return " ".join([str(ctypes.sizeof(mirror)), *offsets])
