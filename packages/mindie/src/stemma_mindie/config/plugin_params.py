"""MindIE's `plugin_params`, a JSON object in a string: the prefix cache and drafts that it asks for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from stemma.config.settings import SpeculationSettings
from stemma.errors import ConfigError

MAX_CHARS = 1024
MAX_MTP_TOKENS = 5
_PARAMETERS: dict[str, tuple[str, ...]] = {
    "prefix_cache": (),
    "splitfuse": (),
    "mtp": ("num_speculative_tokens",),
    "la": ("level", "window", "guess_set_size"),
    "memory_decoding": ("decoding_length", "dynamic_algo"),
}
"""Every plugin and the parameters that it reads."""
_LA_LIMIT = 16


@dataclass(frozen=True, slots=True)
class Plugins:
    """The plugins that `plugin_params` turns on."""

    prefix_cache: bool
    splitfuse: bool
    speculation: SpeculationSettings


def read_plugin_params(text: str, *, speculation_gamma: int | None = None) -> Plugins:
    """Return what `plugin_params` asks for; an empty text turns every plugin off.

    `la` with level, window and guess_set_size becomes lookahead; `memory_decoding` with decoding_length and
    dynamic_algo becomes drafts from the prefix cache. `speculation_gamma` is MindIE's speculationGamma, which
    must have room for what is asked. `mtp` with num_speculative_tokens becomes drafts of the model's own
    layer, which the checkpoint must have. Raises ConfigError.
    """
    plugins, params = _parse(text)
    drafters = [name for name in ("la", "memory_decoding", "mtp") if name in plugins]
    if len(drafters) > 1:
        raise ConfigError(f"plugin_params: {' and '.join(drafters)} exclude each other: one source of drafts")
    known = {parameter for plugin in plugins for parameter in _PARAMETERS[plugin]}
    for name in sorted(params.keys() - known):
        readers = [plugin for plugin, parameters in _PARAMETERS.items() if name in parameters]
        hint = f"; it belongs to {readers[0]}" if readers else ""
        raise ConfigError(f"plugin_params: no plugin of {sorted(plugins)} reads {name!r}{hint}")
    return Plugins(
        prefix_cache="prefix_cache" in plugins,
        splitfuse="splitfuse" in plugins,
        speculation=_speculation(plugins, params, speculation_gamma),
    )


def _parse(text: str) -> tuple[frozenset[str], dict[str, Any]]:
    """Return the plugins named in `plugin_type` and the other parameters."""
    if not text.strip():
        return frozenset(), {}
    if len(text) > MAX_CHARS:
        raise ConfigError(f"plugin_params: at most {MAX_CHARS} characters, got {len(text)}")
    try:
        params = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"plugin_params: not JSON: {error}") from error
    if not isinstance(params, dict):
        raise ConfigError("plugin_params: must be a JSON object")
    plugin_type = params.pop("plugin_type", "")
    if not isinstance(plugin_type, str):
        raise ConfigError("plugin_params: plugin_type must be a string")
    plugins = frozenset(name.strip() for name in plugin_type.split(",") if name.strip())
    for name in sorted(plugins - _PARAMETERS.keys()):
        raise ConfigError(f"Unsupported plugin type: {name}; supported: {', '.join(_PARAMETERS)}")
    return plugins, params


def _speculation(plugins: frozenset[str], params: dict[str, Any], gamma: int | None) -> SpeculationSettings:
    if "la" in plugins:
        level, window = _integer(params, "level", 4, 2), _integer(params, "window", 5, 1)
        guesses = _integer(params, "guess_set_size", 5, 1)
        _require_gamma(gamma, (level - 1) * (window + guesses), "(level - 1) * (window + guess_set_size)")
        return _settings(
            mode="la",
            la_level=level,
            la_window=window,
            la_guess_set_size=guesses,
            max_draft_tokens=level - 1 + window,
        )
    if "memory_decoding" in plugins:
        length = _integer(params, "decoding_length", 16, 1)
        _require_gamma(gamma, length, "decoding_length")
        is_dynamic = params.get("dynamic_algo", True)
        if not isinstance(is_dynamic, bool):
            raise ConfigError(f"plugin_params: dynamic_algo must be true or false, got {is_dynamic!r}")
        return _settings(mode="tree", max_draft_tokens=length, adaptive=is_dynamic)
    if "mtp" in plugins and (number := _integer(params, "num_speculative_tokens", 1, 0, MAX_MTP_TOKENS)):
        return _settings(mode="mtp", mtp_tokens=number)
    return SpeculationSettings(mode="off")


def _integer(params: dict[str, Any], name: str, default: int, least: int, most: int = _LA_LIMIT) -> int:
    value = params.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(f"plugin_params: {name} must be between {least} and {most}, got {value!r}")
    return value


def _require_gamma(speculation_gamma: int | None, needed: int, formula: str) -> None:
    if speculation_gamma is not None and speculation_gamma < needed:
        raise ConfigError(f"speculationGamma must be at least {formula} = {needed}, got {speculation_gamma}")


def _settings(**values: Any) -> SpeculationSettings:
    try:
        return SpeculationSettings(**values)
    except ValidationError as error:
        raise ConfigError(f"plugin_params: {error}") from error
