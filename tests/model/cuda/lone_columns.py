"""A fixture that makes numpy multiply as tensor cores are taken to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def columns_are_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply as tensor cores are taken to: a column's bits don't depend on how many stand beside it."""

    def multiply(a: Any, b: Any, dtype: Any = None) -> Any:
        return np.add.reduce(a[:, :, None] * b[None], axis=1, dtype=dtype)

    monkeypatch.setattr(np, "matmul", multiply)
