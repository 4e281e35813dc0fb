"""What a connector is configured with, from a JSON object that a user wrote."""

from __future__ import annotations

import pytest

from stemma.errors import ConfigError
from stemma_connect.settings import ConnectorSettings


def test_settings_become_those_of_the_tiers():
    settings = ConnectorSettings.parse(
        {"host_cache": "64MB", "disk_cache": "/somewhere", "load_when": "always"}, where="extra"
    )
    assert settings.tiers.host_cache == 64_000_000
    assert settings.tiers.host_write == settings.tiers.disk_write == "write_through"
    assert settings.tiers.load_when == "always"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "no tier: give host_cache, disk_cache or pool"),
        ({"host_cache": "64MB", "hots": 1}, "hots: Extra inputs are not permitted"),
        ({"host_cache": "much"}, "not a size: 'much'"),
        ({"host_cache": "64MB", "load_timeout_s": 0}, "load_timeout_s"),
        ({"pool": {"name": "directory", "dead": 1}}, "pool.dead"),
    ],
)
def test_wrong_settings_are_named(given, says):
    with pytest.raises(ConfigError, match="extra") as caught:
        ConnectorSettings.parse(given, where="extra")
    assert says in str(caught.value)
