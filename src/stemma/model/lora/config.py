"""Fields of adapter_config.json that change results.

Fields that this server doesn't know must have no effect (null, false, empty): a later PEFT may have found
another way to adapt a layer, and leaving it out would give wrong text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import regex

from stemma.errors import AdapterError

_NEUTRAL = frozenset(
    {
        *(
            "auto_mapping",
            "base_model_name_or_path",
            "revision",
            "task_type",
            "inference_mode",
            "peft_version",
        ),
        *("lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config"),
        *("layers_to_transform", "layers_pattern", "exclude_modules", "fan_in_fan_out", "qalora_group_size"),
        *("megatron_core", "init_lora_weights", "ensure_weight_tying"),
    }
)
"""Fields that don't change what the matrices mean: they say how the adapter was made, or which layers it has,
which the tensors show."""
_CHECKED = frozenset(
    {"peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "rank_pattern", "alpha_pattern", "bias"}
)
_REASONS = {
    "use_dora": "DoRA isn't served",
    "modules_to_save": "modules saved whole aren't served",
    "trainable_token_indices": "embeddings of adapters aren't served",
    "target_parameters": "adapters of experts' parameters aren't served",
    "lora_bias": "biases of adapters aren't served",
    "layer_replication": "repeated layers aren't served",
    "alora_invocation_tokens": "activated LoRA isn't served",
    "use_qalora": "QALoRA isn't served",
}
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Ways to initialize an adapter that change the base model's weights beside it."""
_WORD = re.compile(r"[A-Za-z0-9_.]+")
_MAX_SHOWN = 50
_MAX_PATTERN = 4096
"""Characters of a regular expression."""
_MATCH_TIMEOUT_S = 1.0
"""For matching a regular expression with all layers: some take for ever on some names."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The fields that the computation depends on."""

    alpha: float
    by_root: bool
    """Divide by the root of the rank (rsLoRA, arXiv:2312.03732) instead of the rank."""
    alphas: Mapping[str, float]
    """Other values of `alpha`, by the end of a layer's name."""
    ranks: frozenset[int]
    """Those that layers may have."""
    targets: str | tuple[str, ...]
    """A regular expression for whole names of layers, or ends of them."""

    @classmethod
    def of(cls, raw: Mapping[str, Any], path: Path) -> AdapterConfig:
        """Check the fields of an adapter_config.json. Raises AdapterError."""
        if raw.get("peft_type") != "LORA":
            raise AdapterError(f"{path}: peft_type is {_shown(raw.get('peft_type'))}; LORA alone is served")
        if raw.get("bias", "none") != "none":
            raise AdapterError(
                f"{path}: bias is {_shown(raw['bias'])}; biases of adapters aren't served: use 'none'"
            )
        for name, value in raw.items():
            if name in _CHECKED or name in _NEUTRAL or not value:
                continue
            reason = _REASONS.get(name, "this server doesn't know what it does")
            raise AdapterError(f"{path}: adapter_config.json sets {name[:100]} ({reason})")
        made = raw.get("init_lora_weights")
        if isinstance(made, str) and made.lower().startswith(_CHANGES_BASE):
            raise AdapterError(
                f"{path}: init_lora_weights is {_shown(made)}, which changes the base model too; convert the "
                "adapter (peft: save_pretrained with path_initial_model_for_weight_conversion)"
            )
        alphas = _numbers(raw.get("alpha_pattern") or {}, "alpha_pattern", path)
        ranks = raw.get("rank_pattern") or {}
        if not isinstance(ranks, dict):
            raise AdapterError(f"{path}: rank_pattern must map names of layers to numbers")
        return cls(
            alpha=_number(raw.get("lora_alpha"), "lora_alpha", path),
            by_root=raw.get("use_rslora") is True,
            alphas=alphas,
            ranks=frozenset(int(_number(r, "r", path)) for r in (raw.get("r"), *ranks.values())),
            targets=_targets(raw.get("target_modules"), path),
        )

    def scale(self, name: str, rank: int) -> float:
        """Return the factor of the layer `name`, whose matrices have this rank. Raises AdapterError."""
        if rank not in self.ranks:
            raise AdapterError(
                f"{name} has rank {rank}, which its adapter_config.json doesn't name: the two files don't "
                "belong together"
            )
        alpha = next((a for end, a in self.alphas.items() if _ends_with(name, end)), self.alpha)
        return alpha / (math.sqrt(rank) if self.by_root else rank)

    def check_targets(self, names: Iterable[str], path: Path) -> None:
        """Raise AdapterError if the file adapts a layer that `target_modules` doesn't name."""
        for name in names:
            if not self._is_target(name, path):
                raise AdapterError(
                    f"{path} has matrices for {name}, which its target_modules leave out: its two files "
                    "don't belong together"
                )

    def _is_target(self, name: str, path: Path) -> bool:
        if not isinstance(self.targets, str):
            return any(_ends_with(name, end) for end in self.targets)
        if self.targets == "all-linear":
            return True
        try:
            match = regex.fullmatch(self.targets, name, timeout=_MATCH_TIMEOUT_S, concurrent=True)
        except TimeoutError:
            raise AdapterError(f"{path}: the expression target_modules takes too long to match") from None
        except (regex.error, RecursionError, OverflowError, MemoryError) as error:
            raise AdapterError(f"{path}: target_modules is no regular expression: {error}") from error
        return match is not None


def _shown(value: Any) -> str:
    return repr(value)[:_MAX_SHOWN]


def _ends_with(name: str, end: str) -> bool:
    return name == end or name.endswith("." + end)


def _targets(given: Any, path: Path) -> str | tuple[str, ...]:
    if isinstance(given, str) and 0 < len(given) <= _MAX_PATTERN:
        return given
    if isinstance(given, list) and given and all(isinstance(each, str) and each for each in given):
        return tuple(given)
    raise AdapterError(f"{path}: target_modules must be a list of names or one expression")


def _number(given: Any, name: str, path: Path) -> float:
    if isinstance(given, int | float) and not isinstance(given, bool) and 0 < given < 1e6:
        return float(given)
    raise AdapterError(f"{path}: {name} must be a positive number, not {_shown(given)}")


def _numbers(given: Any, name: str, path: Path) -> dict[str, float]:
    """Return numbers by the ends of layers' names; expressions in place of names are refused."""
    if not isinstance(given, dict) or not all(_WORD.fullmatch(key) for key in given):
        raise AdapterError(f"{path}: {name} must map names of layers, without wildcards, to numbers")
    return {key: _number(value, name, path) for key, value in given.items()}
