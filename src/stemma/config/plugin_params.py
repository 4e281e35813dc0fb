"""MindIE's `plugin_params`, a JSON object in a string: which drafts it asks for."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from stemma.config.settings import SpeculationSettings
from stemma.errors import ConfigError

MAX_CHARS = 1024
_PLUGINS = ("prefix_cache", "mtp", "splitfuse", "la", "memory_decoding")
_LA_LIMIT = 16


def parse_plugin_params(text: str) -> tuple[frozenset[str], dict[str, Any]]:
    """Return the plugins named in `plugin_type` and the other parameters. Raises ConfigError."""
    if not text.strip():
        return frozenset(), {}
    if len(text) > MAX_CHARS:
        raise ConfigError(f"plugin_params: at most {MAX_CHARS} characters, got {len(text)}")
    try:
        params = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"plugin_params: not JSON: {error}") from error
    if not isinstance(params, dict):
        raise ConfigError("plugin_params: must be a JSON object")
    plugin_type = params.pop("plugin_type", "")
    if not isinstance(plugin_type, str):
        raise ConfigError("plugin_params: plugin_type must be a string")
    plugins = frozenset(name.strip() for name in plugin_type.split(",") if name.strip())
    for name in sorted(plugins - set(_PLUGINS)):
        raise ConfigError(f"Unsupported plugin type: {name}")
    return plugins, params


def speculation_from_plugin_params(text: str, *, speculation_gamma: int | None = None) -> SpeculationSettings:
    """Return the draft settings that `plugin_params` asks for; `off` if it names no draft plugin.

    `la` with level, window and guess_set_size becomes lookahead; `memory_decoding` with decoding_length and
    dynamic_algo becomes drafts from the prefix cache. `speculation_gamma` is MindIE's speculationGamma, which
    must have room for what is asked. `mtp` asks for no drafts of ours. Raises ConfigError.
    """
    plugins, params = parse_plugin_params(text)
    if {"la", "memory_decoding"} <= plugins:
        raise ConfigError("plugin_params: la and memory_decoding exclude each other")
    if "la" in plugins:
        level, window = _integer(params, "level", 4, 2), _integer(params, "window", 5, 1)
        guesses = _integer(params, "guess_set_size", 5, 1)
        _require_gamma(
            speculation_gamma, (level - 1) * (window + guesses), "(level - 1) * (window + guess_set_size)"
        )
        return _settings(
            mode="la",
            la_level=level,
            la_window=window,
            la_guess_set_size=guesses,
            max_draft_tokens=level - 1 + window,
        )
    if "memory_decoding" in plugins:
        length = _integer(params, "decoding_length", 16, 1)
        _require_gamma(speculation_gamma, length, "decoding_length")
        is_dynamic = params.get("dynamic_algo", True)
        if not isinstance(is_dynamic, bool):
            raise ConfigError(f"plugin_params: dynamic_algo must be true or false, got {is_dynamic!r}")
        return _settings(mode="tree", max_draft_tokens=length, adaptive=is_dynamic)
    return SpeculationSettings(mode="off")


def _integer(params: dict[str, Any], name: str, default: int, least: int) -> int:
    value = params.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _LA_LIMIT:
        raise ConfigError(f"plugin_params: {name} must be between {least} and {_LA_LIMIT}, got {value!r}")
    return value


def _require_gamma(speculation_gamma: int | None, needed: int, formula: str) -> None:
    if speculation_gamma is not None and speculation_gamma < needed:
        raise ConfigError(f"speculationGamma must be at least {formula} = {needed}, got {speculation_gamma}")


def _settings(**values: Any) -> SpeculationSettings:
    try:
        return SpeculationSettings(**values)
    except ValidationError as error:
        raise ConfigError(f"plugin_params: {error}") from error
