"""Prices of tokens: per million hits, misses and output tokens, by model."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stemma.errors import ConfigError

_MILLION = 1_000_000


class Price(BaseModel):
    """Prices per million tokens, in the table's currency."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hit: float = Field(ge=0)
    miss: float = Field(ge=0)
    output: float = Field(ge=0)


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    currency: str = "USD"
    default: Price | None = None
    models: Mapping[str, Price] = {}


@dataclass(frozen=True, slots=True)
class PriceTable:
    """Prices of one or several models; models that it doesn't name have the default price, or none."""

    currency: str
    default: Price | None
    models: Mapping[str, Price]

    @classmethod
    def read(cls, path: Path) -> PriceTable:
        """Read a TOML file; `examples/prices.toml` shows one. Raises ConfigError."""
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
            file = _File.model_validate(data)
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"can't read the prices in {path}: {error}") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ConfigError(f"{path}: {where}: {first['msg']}") from error
        return cls(file.currency, file.default, file.models)

    def cost(self, model: str, hit_tokens: int, miss_tokens: int, output_tokens: int) -> float | None:
        """Return the price of these tokens, or None if the model has none."""
        price = self.models.get(model, self.default)
        if price is None:
            return None
        total = hit_tokens * price.hit + miss_tokens * price.miss + output_tokens * price.output
        return total / _MILLION

    def saved(self, model: str, hit_tokens: int) -> float | None:
        """Return what the hits would have cost more as misses."""
        price = self.models.get(model, self.default)
        return None if price is None else hit_tokens * (price.miss - price.hit) / _MILLION
