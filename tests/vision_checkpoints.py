"""Tiny seeded checkpoints of vision models with their processors' files, and images for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AddedToken,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from stemma.model.files.tiny import build_tokenizer, randomize

IMAGE_TOKENS = {"smolvlm": "<image>", "qwen2.5-vl": "<|image_pad|>", "qwen3-vl": "<|image_pad|>"}
IMAGE_TOKENS["qwen3-vl-moe"] = "<|image_pad|>"
IMAGE_TOKENS["gemma3"] = "<start_of_image>"
_SMOLVLM_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
_QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


_GEMMA3_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] | trim }}"
    "{% else %}{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}{{ '<start_of_image>' }}"
    "{% elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)


def _id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    return int(tokenizer.convert_tokens_to_ids(token))  # type: ignore[arg-type]


def vision_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """The byte-level tokenizer of the tiny models with the special tokens of a vision model."""
    tokenizer = build_tokenizer()
    if family == "smolvlm":
        special = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
        special += [f"<row_{row + 1}_col_{column + 1}>" for row in range(4) for column in range(4)]
        tokenizer.chat_template = _SMOLVLM_TEMPLATE
    elif family == "gemma3":
        special = ["<start_of_image>", "<image_soft_token>", "<end_of_image>"]
        tokenizer.chat_template = _GEMMA3_TEMPLATE
    else:
        special = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
        tokenizer.chat_template = _QWEN_TEMPLATE
    tokenizer.add_tokens([AddedToken(one, special=True, normalized=False) for one in special])
    return tokenizer


def _text_fields(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _smolvlm(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    config = SmolVLMConfig(
        text_config={"model_type": "llama", **_text_fields(tokenizer)},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 64,
            "patch_size": 8,
        },
        image_token_id=_id(tokenizer, "<image>"),
        scale_factor=2,
        tie_word_embeddings=False,
    )
    return SmolVLMForConditionalGeneration(config)


def _qwen(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    config = Qwen2_5_VLConfig(
        text_config={
            **_text_fields(tokenizer),
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
            "window_size": 56,
        },
        image_token_id=_id(tokenizer, "<|image_pad|>"),
        video_token_id=_id(tokenizer, "<|video_pad|>"),
        vision_start_token_id=_id(tokenizer, "<|vision_start|>"),
        vision_end_token_id=_id(tokenizer, "<|vision_end|>"),
        tie_word_embeddings=False,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def _qwen3_fields(tokenizer: PreTrainedTokenizerFast, **text_fields: Any) -> dict[str, Any]:
    return {
        "text_config": {
            **_text_fields(tokenizer),
            "num_hidden_layers": 4,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
            **text_fields,
        },
        "vision_config": {
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 2],
        },
        "image_token_id": _id(tokenizer, "<|image_pad|>"),
        "video_token_id": _id(tokenizer, "<|video_pad|>"),
        "vision_start_token_id": _id(tokenizer, "<|vision_start|>"),
        "vision_end_token_id": _id(tokenizer, "<|vision_end|>"),
    }


def _qwen3(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    config = Qwen3VLConfig(**_qwen3_fields(tokenizer), tie_word_embeddings=True)
    return Qwen3VLForConditionalGeneration(config)


def _qwen3_moe(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [1],
    }
    config = Qwen3VLMoeConfig(**_qwen3_fields(tokenizer, **experts), tie_word_embeddings=False)
    return Qwen3VLMoeForConditionalGeneration(config)


def _gemma3(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Windows of fewer tokens than an image has."""
    text = {
        **_text_fields(tokenizer),
        "num_hidden_layers": 4,
        "head_dim": 16,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 16,
    }
    config = Gemma3Config(
        text_config=text,
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 64,
            "patch_size": 8,
            "vision_use_head": False,
        },
        mm_tokens_per_image=16,
        image_token_index=_id(tokenizer, "<image_soft_token>"),
        boi_token_index=_id(tokenizer, "<start_of_image>"),
        eoi_token_index=_id(tokenizer, "<end_of_image>"),
        tie_word_embeddings=True,
    )
    return Gemma3ForConditionalGeneration(config)


_MODELS: dict[str, Callable[[PreTrainedTokenizerFast], PreTrainedModel]] = {
    "smolvlm": _smolvlm,
    "qwen2.5-vl": _qwen,
    "qwen3-vl": _qwen3,
    "qwen3-vl-moe": _qwen3_moe,
    "gemma3": _gemma3,
}
_PREPROCESSORS: dict[str, dict[str, Any]] = {
    "smolvlm": {
        "image_processor_type": "SmolVLMImageProcessor",
        "processor_class": "SmolVLMProcessor",
        "size": {"longest_edge": 128},
        "max_image_size": {"longest_edge": 64},
        "do_image_splitting": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    "qwen2.5-vl": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": 4 * 28 * 28,
        "max_pixels": 64 * 28 * 28,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
    },
    "qwen3-vl": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": 4 * 32 * 32, "longest_edge": 64 * 32 * 32},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
    },
}
_PREPROCESSORS["gemma3"] = {
    "image_processor_type": "Gemma3ImageProcessor",
    "processor_class": "Gemma3Processor",
    "size": {"height": 64, "width": 64},
    "do_pan_and_scan": None,
    "do_convert_rgb": None,
}
_PREPROCESSORS["qwen3-vl-moe"] = _PREPROCESSORS["qwen3-vl"]
VISION_FAMILIES = tuple(_MODELS)


def vision_params(*quick: str) -> list[Any]:
    """Return a test's parameters, one a family; those that aren't `quick` run in `make test-all`."""
    slow = pytest.mark.slow
    return [pytest.param(family, marks=() if family in quick else slow) for family in VISION_FAMILIES]


def lay_out_as_published(family: str, path: Path) -> None:
    """Have experts lie in [experts, inputs, outputs], as in Qwen's files; transformers writes the reverse."""
    if family != "qwen3-vl-moe":
        return
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if ".mlp.experts." in name:
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})


def make_vision_checkpoint(family: str, path: Path, dtype: str = "float32", *, seed: int = 0) -> Path:
    """Write a checkpoint of `family` to `path`; return it."""
    torch.manual_seed(seed)
    tokenizer = vision_tokenizer(family)
    model = _MODELS[family](tokenizer)
    randomize(model, seed)
    model = model.to(getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(path)
    lay_out_as_published(family, path)
    tokenizer.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(_PREPROCESSORS[family]))
    (path / "processor_config.json").write_text(
        json.dumps({"processor_class": _PREPROCESSORS[family]["processor_class"], "image_seq_len": 16})
    )
    return path


def picture(seed: int, width: int = 90, height: int = 60) -> Image.Image:
    """A random picture of smooth colours."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
