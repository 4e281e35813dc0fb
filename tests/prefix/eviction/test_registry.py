import numpy as np
import pytest

from stemma.errors import ConfigError
from stemma.prefix.eviction.policy import BlockTraits, EvictionPolicy, HintedRun
from stemma.prefix.eviction.registry import POLICIES, make_policy
from stemma.types import NO_HINT, RetentionHint


def test_every_name_builds_its_policy() -> None:
    for name in POLICIES:
        policy = make_policy(name)
        assert isinstance(policy, EvictionPolicy)
        assert policy.name == name


def test_unknown_names_and_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'lrru'; known: .*lru"):
        make_policy("lrru")
    with pytest.raises(ConfigError, match=r"known: hazard, lru, retention \(stemma replay --policy compares"):
        make_policy("arc")
    with pytest.raises(ConfigError, match="colour"):
        make_policy("lru:colour=3")


def test_options_follow_the_name() -> None:
    few, some = make_policy("hazard:max_ghosts=10"), make_policy("hazard:max_ghosts=20")
    assert 0 < few.reserved_bytes(100) < some.reserved_bytes(100) < make_policy("hazard").reserved_bytes(100)


@pytest.mark.parametrize("option", ["", "max_ghosts", "max_ghosts=0", "max_ghosts=-1", "max_ghosts=x", "=3"])
def test_options_that_are_none_are_refused(option: str) -> None:
    with pytest.raises(ConfigError, match="hazard"):
        make_policy(f"hazard:{option}")


FIRM, LOOSE = RetentionHint(100), RetentionHint(0)


@pytest.mark.parametrize("name", ["retention", "hazard"])
def test_blocks_of_one_insert_may_have_different_hints(name):
    """What has the lower hint goes first, whatever its place; `part` keeps the hints of what is left."""
    policy = make_policy(name)
    ids = np.arange(6, dtype=np.int32)
    runs = (HintedRun(0, 2, FIRM), HintedRun(2, 4, LOOSE))
    traits = BlockTraits(fingerprints=np.arange(1, 8, dtype=np.uint64), leading=runs)
    assert traits.runs(1) == [HintedRun(0, 1, FIRM)]
    assert traits.part(1, 7).runs(6) == [
        HintedRun(0, 1, FIRM),
        HintedRun(1, 3, LOOSE),
        HintedRun(3, 6, NO_HINT),
    ]
    policy.insert(ids, 0.0, traits.part(1))
    for block_id in ids.tolist():
        policy.offer(block_id)
    order = []
    for now in range(6):
        victim = policy.victim(1.0 + now)
        assert victim is not None
        policy.drop(victim, 1.0 + now, evicted=True)
        order.append(victim)
    assert set(order[:2]) == {1, 2}
    assert order[-1] == 0
