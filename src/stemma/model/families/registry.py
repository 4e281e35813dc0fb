"""The one list of families: which are tested, fused, read without modules, and cut for several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from stemma.errors import UnsupportedModel
from stemma.model.families.cuts import Cuts
from stemma.model.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_V4, SPARSE
from stemma.model.families.expert_stacks import stack_experts
from stemma.model.families.family import Family
from stemma.model.families.gemma import GEMMA2, GEMMA3, GEMMA_FORMS
from stemma.model.families.gguf import GGUFForm
from stemma.model.families.glm4 import GLM4_FORM
from stemma.model.families.gpt_oss import GPT_OSS, GPT_OSS_FORM
from stemma.model.families.granite import GRANITE
from stemma.model.families.granite_gguf import GRANITE_FORM
from stemma.model.families.layout import ModelLayout
from stemma.model.families.lfm2 import LFM2, LFM2_FORM
from stemma.model.families.linear import LINEAR
from stemma.model.families.llama import LLAMA, LLAMA_FORMS
from stemma.model.families.mamba import MAMBA
from stemma.model.families.mistral import MISTRAL
from stemma.model.families.nemotron import NEMOTRON_H
from stemma.model.families.olmo import OLMO2_FORM
from stemma.model.families.pattern import LlamaPattern
from stemma.model.families.phi3 import PHI3_FORM
from stemma.model.families.qwen import (
    QWEN2,
    QWEN2_5_VL_TEXT,
    QWEN3,
    QWEN3_MOE,
    QWEN3_VL_MOE_TEXT,
    QWEN3_VL_TEXT,
    QWEN_FORMS,
)
from stemma.model.families.qwen_next import QWEN_NEXT
from stemma.model.families.qwen_next_gguf import QWEN_NEXT_FORMS
from stemma.model.families.seed_oss import SEED_OSS
from stemma.model.families.smollm3 import SMOLLM3

FAMILIES: tuple[Family, ...] = (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_V4,
    *SPARSE,
    GEMMA2,
    GEMMA3,
    GPT_OSS,
    *GRANITE,
    *LFM2,
    *LINEAR,
    LLAMA,
    *MAMBA,
    MISTRAL,
    NEMOTRON_H,
    QWEN2,
    QWEN2_5_VL_TEXT,
    QWEN3,
    QWEN3_MOE,
    QWEN3_VL_TEXT,
    QWEN3_VL_MOE_TEXT,
    *QWEN_NEXT,
    SEED_OSS,
    SMOLLM3,
)
_CONFIG_MODULES = ("transformers.models.", "stemma.model.files.llama_config")
"""Where configs come from that mean what they say; imported by whoever has one."""
_FORMS: tuple[GGUFForm, ...] = (
    *(*LLAMA_FORMS, *QWEN_FORMS, *GEMMA_FORMS, *QWEN_NEXT_FORMS),
    *(GLM4_FORM, GPT_OSS_FORM, GRANITE_FORM, LFM2_FORM, OLMO2_FORM, PHI3_FORM),
)
GGUF_FORMS: dict[tuple[str, bool], GGUFForm] = {
    (form.architecture, form.has_experts): form for form in _FORMS
}
"""Architectures that are read from GGUF files, and whether these are mixtures that may also be dense."""
BY_TYPE = {family.model_type: family for family in FAMILIES}
"""By the `model_type` of config.json."""

TESTED = frozenset(family.architecture for family in FAMILIES)
"""Classes whose logits tests/model compares with plain transformers, on every path and on several ranks."""
CUT = frozenset(family.architecture for family in FAMILIES if family.cuts is not None)
"""Classes that are cut for several ranks."""
PREDICTING = {family.architecture: family.prediction for family in FAMILIES if family.prediction is not None}
"""Classes whose layer for multi-token prediction is run."""


def family_of(model_type: object) -> Family | None:
    """Return the family of a config's `model_type`; None: none of the list."""
    return BY_TYPE.get(model_type) if isinstance(model_type, str) else None


def cuts_of(architecture: str, config: Any, num_ranks: int) -> Cuts:
    """Return how a model's tensors are divided over ranks. Raises UnsupportedModel if they can't be."""
    family = family_of(config.model_type)
    if family is None or family.cuts is None:
        raise UnsupportedModel(
            f"{architecture} isn't served on several ranks; leave tensor_parallel_size and "
            f"context_parallel_size 1. Those that are: {', '.join(sorted(CUT))}"
        )
    return family.cuts(config, num_ranks)


def contained_layout(
    config: Any, dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]]
) -> ModelLayout | None:
    """Return what `config` makes, if all its tensors are among these and the native step computes it."""
    is_known = type(config).__module__.startswith(_CONFIG_MODULES)
    family = family_of(config.model_type)
    if family is None or not is_known or dtype not in (torch.bfloat16, torch.float32):
        return None
    makers = (family.layout, None if family.apart is None else family.apart.layout)
    made = (make(config, len(shapes)) for make in makers if make is not None)
    return next((layout for layout in made if layout is not None and _is_contained(layout, shapes)), None)


def _is_contained(layout: ModelLayout, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    wanted = layout.shapes()
    if any(shapes.get(name) != shape for name, shape in wanted.items()):
        return False
    return all(size > 0 for shape in wanted.values() for size in shape)


def stacked_experts(config: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a quantized checkpoint's tensors as transformers' modules have them; `weights` is used up."""
    family = family_of(config.model_type)
    return weights if family is None or family.apart is None else stack_experts(weights, family.apart.join)


def pattern_of(model_type: object) -> LlamaPattern | None:
    """Return how a family differs from Llama; None: it isn't of that pattern."""
    family = family_of(model_type)
    return None if family is None else family.pattern
