import pytest

from stemma.errors import ConfigError
from stemma.prefix.eviction.policy import EvictionPolicy
from stemma.prefix.eviction.registry import make_policy, policy_names


def test_every_name_builds_its_policy() -> None:
    for name in policy_names():
        policy = make_policy(name)
        assert isinstance(policy, EvictionPolicy)
        assert policy.name == name


def test_unknown_names_and_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'lrru'; known: .*lru"):
        make_policy("lrru")
    with pytest.raises(ConfigError, match="colour"):
        make_policy("lru", colour="red")
