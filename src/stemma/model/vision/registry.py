"""The one list of vision models that are served."""

from __future__ import annotations

from stemma.model.vision.family import VisionFamily
from stemma.model.vision.gemma3 import GEMMA3
from stemma.model.vision.qwen_vl import QWEN2_5_VL, QWEN3_VL, QWEN3_VL_MOE
from stemma.model.vision.smolvlm import SMOLVLM

VISION_FAMILIES: tuple[VisionFamily, ...] = (QWEN2_5_VL, QWEN3_VL, QWEN3_VL_MOE, SMOLVLM, GEMMA3)
_BY_TYPE = {family.model_type: family for family in VISION_FAMILIES}


def vision_family_of(model_type: object) -> VisionFamily | None:
    """Return the family of a config's `model_type`; None: none of the list."""
    return _BY_TYPE.get(model_type) if isinstance(model_type, str) else None
