"""MindIE's plugin_params string: prefix cache and drafts on, off or refused, never a wish ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stemma.config.settings import SpeculationSettings
from stemma.errors import ConfigError
from stemma_mindie.config.plugin_params import read_plugin_params


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"plugin_type": "prefix_cache"}, {"mode": "off"}),
        ({"plugin_type": "splitfuse,prefix_cache"}, {"mode": "off"}),
        ({"plugin_type": "mtp,prefix_cache", "num_speculative_tokens": 0}, {"mode": "off"}),
        ({"plugin_type": "mtp,prefix_cache", "num_speculative_tokens": 2}, {"mode": "mtp", "mtp_tokens": 2}),
        ({"plugin_type": "mtp"}, {"mode": "mtp", "mtp_tokens": 1}),
        (
            {"plugin_type": "la,prefix_cache", "level": 3, "window": 6, "guess_set_size": 2},
            {"mode": "la", "la_level": 3, "la_window": 6, "la_guess_set_size": 2, "max_draft_tokens": 8},
        ),
        ({"plugin_type": "la"}, {"mode": "la", "max_draft_tokens": 8}),
        (
            {"plugin_type": "prefix_cache, memory_decoding", "decoding_length": 8, "dynamic_algo": False},
            {"mode": "tree", "max_draft_tokens": 8, "adaptive": False},
        ),
        (
            {"plugin_type": "memory_decoding"},
            {"mode": "tree", "max_draft_tokens": 16, "adaptive": True},
        ),
    ],
)
def test_plugins_become_settings(params: dict[str, Any], expected: dict[str, Any]) -> None:
    plugins = read_plugin_params(json.dumps(params))

    assert plugins.speculation == SpeculationSettings(**expected)
    assert plugins.prefix_cache == ("prefix_cache" in params["plugin_type"])
    assert plugins.splitfuse == ("splitfuse" in params["plugin_type"])


def test_no_plugins() -> None:
    plugins = read_plugin_params("  ")

    assert (plugins.prefix_cache, plugins.splitfuse, plugins.speculation.mode) == (False, False, "off")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"plugin_type": "prefix_cache,turbo"}', "Unsupported plugin type: turbo"),
        ("{plugin_type}", "not JSON"),
        ("[]", "must be a JSON object"),
        ('{"plugin_type": 3}', "must be a string"),
        ('{"plugin_type": "la", "level": 17}', "level must be between 2 and 16"),
        ('{"plugin_type": "la", "window": "5"}', "window must be between 1 and 16"),
        ('{"plugin_type": "memory_decoding", "decoding_length": 0}', "decoding_length must be between 1"),
        ('{"plugin_type": "memory_decoding", "dynamic_algo": 1}', "dynamic_algo must be true or false"),
        ('{"plugin_type": "la,memory_decoding"}', "exclude each other"),
        ('{"plugin_type": "mtp", "num_speculative_tokens": 6}', "num_speculative_tokens must be between 0"),
        ('{"plugin_type": "prefix_cache", "num_speculative_tokens": 1}', "belongs to mtp"),
        ('{"plugin_type": "la", "levle": 4}', "reads 'levle'"),
        (" " + "x" * 1024, "at most 1024"),
    ],
)
def test_bad_input_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_plugin_params(text)


def test_speculation_gamma_must_have_room() -> None:
    text = '{"plugin_type": "la"}'
    assert read_plugin_params(text, speculation_gamma=30).speculation.mode == "la"
    with pytest.raises(ConfigError, match=r"at least .* = 30, got 29"):
        read_plugin_params(text, speculation_gamma=29)
    with pytest.raises(ConfigError, match="decoding_length"):
        read_plugin_params('{"plugin_type": "memory_decoding"}', speculation_gamma=4)
