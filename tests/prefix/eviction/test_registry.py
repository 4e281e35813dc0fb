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
        make_policy("lru:colour=3")


def test_options_follow_the_name() -> None:
    few, some = make_policy("hazard:max_ghosts=10"), make_policy("hazard:max_ghosts=20")
    assert 0 < few.reserved_bytes(0) < some.reserved_bytes(0) < make_policy("hazard").reserved_bytes(0)


@pytest.mark.parametrize("option", ["", "max_ghosts", "max_ghosts=0", "max_ghosts=-1", "max_ghosts=x", "=3"])
def test_options_that_are_none_are_refused(option: str) -> None:
    with pytest.raises(ConfigError, match="hazard"):
        make_policy(f"hazard:{option}")
