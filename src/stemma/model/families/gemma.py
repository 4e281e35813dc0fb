"""Gemma 2: windows in every second layer, soft caps, norms around each part; its modules run."""

from __future__ import annotations

from stemma.model.families.family import Family

GEMMA2 = Family("gemma2", "Gemma2ForCausalLM")
