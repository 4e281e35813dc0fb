"""A real model over real text; `python -m benchmarks.invariance --prompts 1000` is the same at length."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.invariance import count_differences

from stemma.native.library import load_kernels


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.skipif(load_kernels() is None, reason="needs a C++ compiler")
def test_answers_are_the_same_bits(real_model: Path) -> None:
    differences = count_differences(real_model, 10, max_tokens=8)
    assert differences
    assert not any(differences.values()), differences
