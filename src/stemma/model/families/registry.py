"""The one list of families: which are tested, fused, read without modules, and cut for several ranks."""

from __future__ import annotations

from stemma.model.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from stemma.model.families.family import Dense, Family
from stemma.model.families.gemma import GEMMA2
from stemma.model.families.llama import LLAMA
from stemma.model.families.mistral import MISTRAL
from stemma.model.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from stemma.model.families.seed_oss import SEED_OSS
from stemma.model.families.smollm3 import SMOLLM3

FAMILIES: tuple[Family, ...] = (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GEMMA2,
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    SEED_OSS,
    SMOLLM3,
)
_BY_TYPE = {family.model_type: family for family in FAMILIES}

TESTED = frozenset(family.architecture for family in FAMILIES)
"""Classes whose logits tests/model compares with plain transformers, on every path and on several ranks."""
FUSED_LAYERS = frozenset(family.layer_class for family in FAMILIES if family.layer_class is not None)
"""Classes of decoder layers that the native step computes."""
PREDICTING = frozenset(family.architecture for family in FAMILIES if family.prediction)
"""Classes whose layer for multi-token prediction is run."""


def family_of(model_type: object) -> Family | None:
    """Return the family of a config's `model_type`; None: none of the list."""
    return _BY_TYPE.get(model_type) if isinstance(model_type, str) else None


def dense_of(model_type: object) -> Dense | None:
    """Return how a family's tensors are read without modules; None: they aren't."""
    family = family_of(model_type)
    return None if family is None else family.dense
