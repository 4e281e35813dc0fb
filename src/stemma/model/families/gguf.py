"""How a family looks in a GGUF file: its metadata, and what llama.cpp's converter made of its tensors.

transformers' own table leaves out what decides answers: Gemma 1, the head size of Qwen3, llama.cpp's scale of
Gemma's queries, and the rotary factors that Llama 3.1 files carry as a tensor. What metadata say of sizes is
compared with the tensors first, so that no absurd count reaches transformers. A key that would change numbers
in a way that isn't known here is refused. Each family's config is imported where it is made: some bring much
with them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stemma.errors import ModelError, UnsupportedModel
from stemma.model.families.gguf_changes import Change, Join, unchanged
from stemma.model.files.gguf_keys import NEUTRAL, YARN_KEYS, shown, standing_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from stemma.model.files.gguf_header import GGUFHeader

_MAX_NUMBER = (1 << 31) - 1
_LAYER = re.compile(r"blk\.([0-9]{1,9})\.")
ROTARY_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies [head_dim / 2], float32: how a file states Llama 3.1's scaling."""
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
EXPERTS = {f"ffn_{part}_exps": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}
FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Gemma 2 and 3 normalize before and after attention and the network."""


@dataclass(frozen=True, slots=True)
class GGUFForm:
    """One architecture of GGUF files."""

    architecture: str
    """As llama.cpp names it."""
    config: Callable[[Fields], PreTrainedConfig]
    layer_names: Mapping[str, str]
    """Names of a layer's tensors in the file -> in transformers, without ``.weight`` and ``.bias``, or both
    with all of it."""
    top_names: Mapping[str, str] = field(default_factory=lambda: TOP_NAMES)
    """Names of the tensors of no layer, likewise."""
    experts: Mapping[str, str] = field(default_factory=lambda: EXPERTS)
    """Names of tensors that stack a layer's experts -> of an expert's weight, with ``{}`` for its number."""
    change: Callable[[str, Any], Change | None] = unchanged
    """Takes a weight's name within its layer, and the config."""
    joins: Mapping[str, Join] = field(default_factory=dict)
    """By names within a layer."""
    has_experts: bool = False
    """Whether it is a mixture of an architecture that is also dense."""
    read_by_config: frozenset[str] = frozenset()
    """Tensors that are no weights."""


class Fields:
    """Metadata of one architecture, by keys without its name; raises ModelError for what isn't as
    expected."""

    def __init__(self, header: GGUFHeader, floats: Callable[[str], list[float]]) -> None:
        """`floats` takes the name of a tensor of the file; returns its numbers."""
        self.header = header
        self.floats = floats
        self._prefix = header.architecture + "."
        self._used: set[str] = set()

    def check_all_used(self) -> None:
        """Raise UnsupportedModel for a key that nobody asked for and that may change numbers."""
        for key, value in self.header.metadata.items():
            standing = standing_of(key, self.header.architecture)
            name = key.removeprefix(self._prefix)
            if standing == "harmless" or (standing == "read" and name in self._used):
                continue
            if type(value) in (int, float, bool) and value == NEUTRAL.get(name, 0):
                continue
            raise UnsupportedModel(
                f"{self.header.path}: {key} is {shown(value)}, which isn't read for "
                f"{self.header.architecture} and may change answers. "
                "Give the directory of the original checkpoint"
            )

    def get(self, key: str) -> Any:
        """Return a value as the file has it, or None."""
        self._used.add(key)
        return self.header.metadata.get(self._prefix + key)

    def whole(self, key: str, default: int | None = None) -> int:
        """Return a whole number, 1 or more."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 1 <= value <= _MAX_NUMBER:
            raise ModelError(
                f"{self.header.path}: {self._prefix}{key} is {shown(value)}, must be a whole number from 1 "
                f"to {_MAX_NUMBER}; download it again"
            )
        return value

    def by_layer(self, key: str, num_layers: int) -> list[int]:
        """Return a whole number for each layer, 0 or more; a file may have one for all."""
        value = self.get(key)
        each = value if isinstance(value, list) else [value] * num_layers
        if len(each) != num_layers or any(
            type(one) is not int or not 0 <= one <= _MAX_NUMBER for one in each
        ):
            raise ModelError(
                f"{self.header.path}: {self._prefix}{key} is {shown(value)}, must be a whole number for each "
                f"of {num_layers} layers; download it again"
            )
        return each

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive finite number."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0.0:
            raise ModelError(
                f"{self.header.path}: {self._prefix}{key} is {shown(value)}, must be a number above 0; "
                "download it again"
            )
        return float(value)

    def shape(self, tensor: str, num_dimensions: int = 2) -> tuple[int, ...]:
        """Return the shape of a tensor that every model of the family has."""
        if tensor not in self.header.tensors:
            raise ModelError(f"{self.header.path} has no tensor {tensor}; download it again")
        shape = self.header.tensors[tensor].shape
        if len(shape) != num_dimensions:
            raise ModelError(
                f"{self.header.path}: {tensor} of shape {list(shape)} must have {num_dimensions} dimensions; "
                "download it again"
            )
        return shape


def count_layers(fields: Fields, *, guesses: bool = False) -> int:
    """Return the number of layers, compared with the tensors.

    `guesses`: the family may have layers behind them that guess tokens, which aren't counted.
    """
    header = fields.header
    layers = {int(match[1]) for match in map(_LAYER.match, header.tensors) if match}
    stated = fields.whole("block_count")
    if len(layers) != stated or max(layers) != stated - 1:
        raise ModelError(f"{header.path} counts {stated} layers, its tensors make {len(layers)}")
    guessing = fields.get("nextn_predict_layers") if guesses else None
    if guessing is not None and (type(guessing) is not int or not 0 <= guessing < stated):
        raise ModelError(f"{header.path}: nextn_predict_layers is {shown(guessing)}, of {stated} layers")
    return stated - (guessing or 0)


def base(
    fields: Fields,
    *,
    num_layers: int | None = None,
    kv_heads: int | None = None,
    attention: tuple[str, ...] = ("blk.0.attn_q", "blk.0.attn_k"),
    has_gates: bool = False,
    is_partial: bool = False,
    angles: Callable[[Fields], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return what all families share, compared with the tensors.

    `attention`: the tensors of queries and keys of a layer, or the one of queries, keys and values; none: no
    layer attends. `has_gates`: queries come with gates. `is_partial`: a part of a head may be rotated.
    `angles` makes `rope_parameters`, by default `rope`.
    """
    header, heads = fields.header, fields.whole("attention.head_count")
    num_layers = count_layers(fields) if num_layers is None else num_layers
    if kv_heads is None:
        kv_heads = fields.whole("attention.head_count_kv", heads)
    vocab_size, hidden_size = fields.shape("token_embd.weight")
    head_dim = fields.whole("attention.key_length", max(1, hidden_size // heads))
    rotated = fields.whole("rope.dimension_count", head_dim)
    found = {
        "embedding_length": (fields.whole("embedding_length"), hidden_size),
        "attention.value_length": (fields.whole("attention.value_length", head_dim), head_dim),
        "rope.dimension_count": (rotated, min(rotated, head_dim) if is_partial else head_dim),
    }
    rows = [heads * head_dim * (1 + has_gates), kv_heads * head_dim]
    if len(attention) == 1:
        rows = [rows[0] + 2 * rows[1]]
    keys = ("attention.head_count", "attention.head_count_kv")
    for key, tensor, wanted in zip(keys, attention, rows, strict=False):
        found[key] = wanted, fields.shape(f"{tensor}.weight")[0]
    for key, (stated, stored) in found.items():
        if stated != stored:
            raise ModelError(
                f"{header.path}: {header.architecture}.{key} makes {stated}, the tensors have {stored}"
            )
    partial = {"partial_rotary_factor": rotated / head_dim} if is_partial else {}
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": fields.whole("context_length"),
        "rope_parameters": (angles or rope)(fields) | partial,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": _token_id(header, "bos"),
        "eos_token_id": _token_id(header, "eos"),
        "pad_token_id": _token_id(header, "padding"),
    }


def _token_id(header: GGUFHeader, name: str) -> int | None:
    value = header.metadata.get(f"tokenizer.ggml.{name}_token_id")
    return value if type(value) is int and 0 <= value <= _MAX_NUMBER else None


def experts(fields: Fields) -> tuple[int, int, int]:
    """Return experts, those that a token gets, and their width, compared with the tensors."""
    num_experts, width, _ = fields.shape("blk.0.ffn_up_exps.weight", num_dimensions=3)
    if num_experts != fields.whole("expert_count"):
        raise ModelError(f"{fields.header.path}: expert_count isn't that of its tensors, {num_experts}")
    if width != fields.whole("expert_feed_forward_length", width):
        raise ModelError(
            f"{fields.header.path}: expert_feed_forward_length isn't that of its tensors, {width}"
        )
    num_used = fields.whole("expert_used_count")
    if num_used > num_experts:
        raise ModelError(f"{fields.header.path}: expert_used_count is {num_used}, of {num_experts} experts")
    return num_experts, num_used, width


def dense(fields: Fields, *, is_joined: bool = False, **shapes: Any) -> dict[str, Any]:
    """Return the fields of a model without experts.

    `is_joined`: gate and up are one tensor. `shapes`: for `base`.
    """
    if fields.get("expert_count"):
        raise UnsupportedModel(
            f"{fields.header.path} is a {fields.header.architecture} with experts, of which GGUF files "
            "aren't read; give the directory of the original checkpoint"
        )
    fields.get("expert_used_count")  # of no experts: nothing
    width = fields.whole("feed_forward_length")
    if width * (1 + is_joined) != fields.shape("blk.0.ffn_up.weight")[0]:
        raise ModelError(f"{fields.header.path}: feed_forward_length is {width}, its tensors have another")
    return base(fields, **shapes) | {"intermediate_size": width}


def rope(fields: Fields) -> dict[str, Any]:
    """Return `rope_parameters` of a model with one kind of rotary embedding."""
    theta = fields.number("rope.freq_base", 10_000.0)
    kind = fields.get("rope.scaling.type") or "none"
    yarn = _yarn(fields)
    if ROTARY_FACTORS in fields.header.tensors:
        if kind not in ("none", "linear") or fields.get("rope.scaling.factor") not in (None, 1.0):
            raise UnsupportedModel(f"{fields.header.path} scales its rotary embedding twice")
        return _factors(fields, theta)
    if kind == "none" or (kind == "linear" and fields.get("rope.scaling.factor") is None):
        return {"rope_type": "default", "rope_theta": theta}
    factor = fields.number("rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": fields.whole("rope.scaling.original_context_length"),
            **yarn,
        }
    raise UnsupportedModel(
        f"{fields.header.path} scales its rotary embedding by {shown(kind)}; read are none, linear and yarn"
    )


def _yarn(fields: Fields) -> dict[str, float]:
    """Return what YaRN's own keys say; they are looked at with YaRN alone.

    llama.cpp's converter copies a checkpoint's `attention_factor`, `beta_fast` and `beta_slow`: they mean
    what transformers means by them. llama.cpp itself computes without them in these families. Its own
    `attn_factor` multiplies cosines and sines.
    """
    blend = fields.get("rope.scaling.yarn_ext_factor")
    if fields.get("rope.scaling.type") != "yarn":
        for key in YARN_KEYS:
            fields.get(key)
        return {}
    if blend is not None and (type(blend) not in (int, float) or (blend >= 0.0 and blend != 1.0)):
        raise UnsupportedModel(
            f"{fields.header.path}: rope.scaling.yarn_ext_factor is {shown(blend)}; only 1, YaRN as "
            "published, is read. Give the directory of the original checkpoint"
        )
    published = 1.0 + 0.1 * math.log(max(1.0, fields.number("rope.scaling.factor", 1.0)))
    return {
        "beta_fast": fields.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": fields.number("rope.scaling.yarn_beta_slow", 1.0),
        "attention_factor": fields.number("rope.scaling.yarn_attn_factor", published)
        * fields.number("rope.scaling.attn_factor", 1.0),
    }


def _factors(fields: Fields, theta: float) -> dict[str, Any]:
    """Return parameters that divide each rotary frequency by the file's own factor.

    transformers' `longrope` does that; with the same factors for short and long contexts nothing changes with
    the length.
    """
    factors = fields.floats(ROTARY_FACTORS)
    if not all(math.isfinite(factor) and factor > 0.0 for factor in factors):
        raise ModelError(f"{fields.header.path}: {ROTARY_FACTORS} must be numbers above 0; download it again")
    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
        "factor": 1.0,
        "original_max_position_embeddings": fields.whole("context_length"),
    }
