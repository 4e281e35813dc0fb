"""Treatment of each metadata key of a GGUF file: read, known to change nothing, or refused."""

from __future__ import annotations

from typing import Literal

_MAX_SHOWN = 60
YARN_KEYS = tuple(
    f"rope.scaling.{name}" for name in ("yarn_beta_fast", "yarn_beta_slow", "yarn_attn_factor", "attn_factor")
)
_ARCHITECTURE_READ = frozenset(
    {
        *("block_count", "context_length", "embedding_length", "feed_forward_length", "expert_count"),
        *(
            "expert_used_count",
            "expert_feed_forward_length",
            "attn_logit_softcapping",
            "final_logit_softcapping",
        ),
        *(f"attention.{name}" for name in ("head_count", "head_count_kv", "key_length", "value_length")),
        *("attention.layer_norm_rms_epsilon", "attention.sliding_window", "attention.sliding_window_pattern"),
        *("rope.dimension_count", "rope.freq_base", "rope.freq_base_swa", "rope.scaling.type"),
        *("rope.scaling.factor", "rope.scaling.original_context_length"),
        *("rope.scaling.yarn_ext_factor", *YARN_KEYS),
        *("attention.scale", "embedding_scale", "residual_scale", "logit_scale", "shortconv.l_cache"),
        *(f"ssm.{name}" for name in ("conv_kernel", "inner_size", "state_size", "group_count")),
        *("ssm.time_step_rank", "full_attention_interval", "rope.dimension_sections"),
        *("expert_shared_feed_forward_length", "nextn_predict_layers"),
    }
)
"""Keys of an architecture, without its name, that some family reads here."""
_ARCHITECTURE_HARMLESS = frozenset({"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"})
"""Say what tensors say too, or what was done once."""
NEUTRAL: dict[str, float] = {
    "attention.causal": True,
    "expert_gating_func": 1,  # softmax
    "expert_weights_norm": True,
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale", "expert_weights_scale"), 1.0),
}
"""Values of unread keys that change nothing in the families here; of others 0."""
_TOKENIZER_READ = frozenset(
    f"tokenizer.ggml.{name}"
    for name in (
        *("model", "pre", "tokens", "token_type", "token_type_count", "scores", "merges", "add_space_prefix"),
        *("add_bos_token", "add_eos_token", "remove_extra_whitespaces"),
        *(
            f"{name}_token_id"
            for name in ("bos", "eos", "eot", "eom", "unknown", "padding", "seperator", "mask")
        ),
        *(f"fim_{name}_token_id" for name in ("pre", "suf", "mid", "pad", "rep", "sep")),
        *(f"{name}_token_id" for name in ("prefix", "suffix", "middle")),
    )
)
"""Keys that `tokenizer.py` reads, and names of tokens, which change nothing."""
_HARMLESS = frozenset({"tokenizer.chat_template", "tokenizer.chat_templates", "tokenizer.huggingface.json"})
_HARMLESS_SPACES = (
    *("general.", "split.", "imatrix.", "quantize.imatrix.", "tokenizer.chat_template."),
    *("GGUF.", "unsloth.", "mradermacher."),
)
"""Where a file came from and how it was made; `header.py` refuses parts and other alignments."""


def standing_of(key: str, architecture: str) -> Literal["read", "harmless", "refused"]:
    """Return what is done with a metadata key of a model of `architecture`.

    ``read``: by the families that know it; a file of another one is refused, unless the value says "none".
    """
    if key in _TOKENIZER_READ or key in _HARMLESS or key.startswith(_HARMLESS_SPACES):
        return "harmless"  # what of it decides anything is read elsewhere
    prefix = architecture + "."
    name = key.removeprefix(prefix)
    if key.startswith(prefix) and name in _ARCHITECTURE_READ:
        return "read"
    if key.startswith(prefix) and name in _ARCHITECTURE_HARMLESS:
        return "harmless"
    return "refused"


def shown(value: object) -> str:
    """Return a value of the metadata in few characters, for an error."""
    if isinstance(value, list):
        return f"an array of {len(value)}"
    return repr(value[:_MAX_SHOWN] if isinstance(value, str) else value)[:_MAX_SHOWN]
