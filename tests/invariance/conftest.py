"""Models and engines are made as other tests make them."""

from __future__ import annotations

from tests.model.conftest import load_family as load_family
