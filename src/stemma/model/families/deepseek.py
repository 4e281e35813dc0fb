"""DeepSeek-V2 and V3 (R1, V3.1): one latent a token, mixtures of experts behind grouped routers."""

from __future__ import annotations

from stemma.model.families.family import Family

DEEPSEEK_V2 = Family("deepseek_v2", "DeepseekV2ForCausalLM", "DeepseekV2DecoderLayer")
DEEPSEEK_V3 = Family("deepseek_v3", "DeepseekV3ForCausalLM", "DeepseekV3DecoderLayer", prediction=True)
