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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stemma.errors import ModelError, UnsupportedModel
from stemma.model.gguf_keys import NEUTRAL, YARN_KEYS, shown, standing_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from stemma.model.gguf_header import GGUFHeader

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
    """Names of a layer's tensors in the file -> in transformers."""
    pairs_rotate: bool = False
    """Whether rows of queries and keys that rotate together lie next to each other, not half a head apart."""
    norm_offset: float = 0.0
    """The number that the file's norms have more than transformers'."""


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


def base(fields: Fields) -> dict[str, Any]:
    """Return what all families share, compared with the tensors."""
    header = fields.header
    layers = {int(match[1]) for match in map(_LAYER.match, header.tensors) if match}
    num_layers, heads = fields.whole("block_count"), fields.whole("attention.head_count")
    if len(layers) != num_layers or max(layers) != num_layers - 1:
        raise ModelError(f"{header.path} counts {num_layers} layers, its tensors make {len(layers)}")
    kv_heads = fields.whole("attention.head_count_kv", heads)
    vocab_size, hidden_size = fields.shape("token_embd.weight")
    head_dim = fields.whole("attention.key_length", max(1, hidden_size // heads))
    found = {
        "embedding_length": (fields.whole("embedding_length"), hidden_size),
        "attention.head_count": (heads * head_dim, fields.shape("blk.0.attn_q.weight")[0]),
        "attention.head_count_kv": (kv_heads * head_dim, fields.shape("blk.0.attn_k.weight")[0]),
        "attention.value_length": (fields.whole("attention.value_length", head_dim), head_dim),
        "rope.dimension_count": (fields.whole("rope.dimension_count", head_dim), head_dim),
    }
    for key, (stated, stored) in found.items():
        if stated != stored:
            raise ModelError(
                f"{header.path}: {header.architecture}.{key} makes {stated}, the tensors have {stored}"
            )
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": fields.whole("context_length"),
        "rope_parameters": rope(fields),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": _token_id(header, "bos"),
        "eos_token_id": _token_id(header, "eos"),
    }


def _token_id(header: GGUFHeader, name: str) -> int | None:
    value = header.metadata.get(f"tokenizer.ggml.{name}_token_id")
    return value if type(value) is int and 0 <= value <= _MAX_NUMBER else None


def dense(fields: Fields) -> dict[str, Any]:
    """Return the fields of a model without experts."""
    if fields.get("expert_count"):
        raise UnsupportedModel(
            f"{fields.header.path} is a {fields.header.architecture} with experts (Mixtral or its kin), of "
            "which "
            "GGUF files aren't read; give the directory of the original checkpoint"
        )
    fields.get("expert_used_count")  # of no experts: nothing
    width = fields.whole("feed_forward_length")
    if width != fields.shape("blk.0.ffn_up.weight")[0]:
        raise ModelError(f"{fields.header.path}: feed_forward_length is {width}, its tensors have another")
    return base(fields) | {"intermediate_size": width}


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
