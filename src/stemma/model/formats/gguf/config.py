"""From a GGUF file's metadata to the config of transformers.

transformers' own table leaves out what decides answers: Gemma 1, the head size of Qwen3, llama.cpp's scale of
Gemma's queries, and the rotary factors that Llama 3.1 files carry as a tensor. What metadata say of sizes is
compared with the tensors first, so that no absurd count reaches transformers. A key that would change numbers
in a way that isn't known here is refused. Each family's config is imported where it is made: some bring much
with them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from gguf import dequantize
from transformers import PreTrainedConfig

from stemma.errors import ModelError, UnsupportedModel
from stemma.model.formats.gguf.keys import NEUTRAL, YARN_KEYS, standing_of
from stemma.model.formats.gguf.tensors import raw_data
from stemma.model.gguf_header import GGUFHeader, shown
from stemma.model.llama_config import LlamaConfig

_MAX_NUMBER = (1 << 31) - 1
_LAYER = re.compile(r"blk\.([0-9]{1,9})\.")
ROTARY_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies [head_dim / 2], float32: how a file states Llama 3.1's scaling."""
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62
"""llama.cpp tells the 27B models, whose queries are scaled otherwise, by their number of layers."""


class _Fields:
    """Metadata of one architecture, by keys without its name; raises ModelError for what isn't as
    expected."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
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


def read_config(header: GGUFHeader) -> PreTrainedConfig:
    """Return the config of the model in a GGUF file.

    Raises UnsupportedModel for an architecture that isn't read, ModelError for metadata that are missing or
    contradict the tensors.
    """
    make = _FAMILIES.get(header.architecture)
    if make is None:
        raise UnsupportedModel(
            f"{header.path} holds the architecture {shown(header.architecture)}; read from GGUF are "
            f"{', '.join(_FAMILIES)}. Give the directory of the original checkpoint"
        )
    fields = _Fields(header)
    config = make(fields)
    fields.check_all_used()
    return config


def _base(fields: _Fields) -> dict[str, Any]:
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
        "rope_parameters": _rope(fields),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": _token_id(header, "bos"),
        "eos_token_id": _token_id(header, "eos"),
    }


def _token_id(header: GGUFHeader, name: str) -> int | None:
    value = header.metadata.get(f"tokenizer.ggml.{name}_token_id")
    return value if type(value) is int and 0 <= value <= _MAX_NUMBER else None


def _dense(fields: _Fields) -> dict[str, Any]:
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
    return _base(fields) | {"intermediate_size": width}


def _rope(fields: _Fields) -> dict[str, Any]:
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


def _yarn(fields: _Fields) -> dict[str, float]:
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


def _factors(fields: _Fields, theta: float) -> dict[str, Any]:
    """Return parameters that divide each rotary frequency by the file's own factor.

    transformers' `longrope` does that; with the same factors for short and long contexts nothing changes with
    the length.
    """
    tensor = fields.header.tensors[ROTARY_FACTORS]
    factors = dequantize(raw_data(fields.header.path, tensor), tensor.type).reshape(-1).tolist()
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


def _llama(fields: _Fields) -> PreTrainedConfig:
    if fields.get("attention.sliding_window"):
        raise UnsupportedModel(
            f"{fields.header.path} is a llama with a sliding window, which isn't read from GGUF; give the "
            "directory of the original checkpoint"
        )
    has_bias = "blk.0.attn_q.bias" in fields.header.tensors
    return LlamaConfig(architectures=["LlamaForCausalLM"], attention_bias=has_bias, **_dense(fields))


def _qwen2(fields: _Fields) -> PreTrainedConfig:
    from transformers import Qwen2Config

    return Qwen2Config(architectures=["Qwen2ForCausalLM"], use_sliding_window=False, **_dense(fields))


def _qwen3(fields: _Fields) -> PreTrainedConfig:
    from transformers import Qwen3Config

    return Qwen3Config(architectures=["Qwen3ForCausalLM"], use_sliding_window=False, **_dense(fields))


def _qwen3_moe(fields: _Fields) -> PreTrainedConfig:
    from transformers import Qwen3MoeConfig

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
    return Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        num_experts=num_experts,
        num_experts_per_tok=num_used,
        moe_intermediate_size=width,
        intermediate_size=fields.whole("feed_forward_length", width),
        norm_topk_prob=True,  # llama.cpp's graph of the family always does
        decoder_sparse_step=1,
        mlp_only_layers=[],
        use_sliding_window=False,
        **_base(fields),
    )


def _gemma(fields: _Fields) -> PreTrainedConfig:
    from transformers import GemmaConfig

    return GemmaConfig(architectures=["GemmaForCausalLM"], hidden_act="gelu_pytorch_tanh", **_dense(fields))


def _gemma2(fields: _Fields) -> PreTrainedConfig:
    from transformers import Gemma2Config

    config = _dense(fields)
    return Gemma2Config(
        architectures=["Gemma2ForCausalLM"],
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=fields.whole("attention.sliding_window", 4096),
        layer_types=_layer_types(config["num_hidden_layers"], 2),
        attn_logit_softcapping=fields.number("attn_logit_softcapping", 50.0),
        final_logit_softcapping=fields.number("final_logit_softcapping", 30.0),
        query_pre_attn_scalar=_query_scalar(config, _GEMMA2_27B_LAYERS),
        **config,
    )


def _gemma3(fields: _Fields) -> PreTrainedConfig:
    from transformers import Gemma3TextConfig

    config = _dense(fields)
    local = fields.number("rope.freq_base_swa", 10_000.0)
    pattern = fields.get("attention.sliding_window_pattern")
    layer_types = _layer_types(config["num_hidden_layers"], 6)
    if pattern not in (None, 6, [kind == "sliding_attention" for kind in layer_types]):
        raise UnsupportedModel(
            f"{fields.header.path}: attention.sliding_window_pattern is {shown(pattern)}; read is 6, "
            "Gemma 3's own"
        )
    config["rope_parameters"] = {
        "full_attention": config["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }
    return Gemma3TextConfig(
        architectures=["Gemma3ForCausalLM"],
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=fields.whole("attention.sliding_window"),
        layer_types=layer_types,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        query_pre_attn_scalar=_query_scalar(config, _GEMMA3_27B_LAYERS),
        **config,
    )


def _layer_types(num_layers: int, period: int) -> list[str]:
    """Every layer slides but the last of each `period`."""
    return [
        "full_attention" if layer % period == period - 1 else "sliding_attention"
        for layer in range(num_layers)
    ]


def _query_scalar(config: dict[str, Any], layers_of_27b: int) -> int:
    """Return the number whose square root divides Gemma's scores, as llama.cpp chooses it."""
    if config["num_hidden_layers"] == layers_of_27b:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


_FAMILIES: dict[str, Callable[[_Fields], PreTrainedConfig]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}
