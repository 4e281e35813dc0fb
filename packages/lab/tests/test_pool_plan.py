"""The link memory of pools, with the figures of MindIE's manual."""

from __future__ import annotations

import pytest

from stemma.errors import ConfigError
from stemma_lab.pool_plan import plan_pool, plan_tokens


def test_the_manuals_example_of_four_and_four_machines_with_16_devices() -> None:
    plan = plan_pool(8, 16)
    assert (plan.num_devices, plan.num_links, plan.link_bytes) == (128, 127, 508 * 10**6)
    assert (plan.fraction_for_links, plan.memory_fraction) == (0.01, 0.91)
    assert plan.freed_bytes == 600 * 10**6 > plan.link_bytes


@pytest.mark.parametrize(
    ("num_devices", "for_links"), [(2, 0.01), (151, 0.01), (152, 0.02), (301, 0.02), (302, 0.03), (512, 0.04)]
)
def test_a_step_of_the_fraction_per_600_mb(num_devices: int, for_links: float) -> None:
    assert plan_pool(1, num_devices).fraction_for_links == for_links


def test_a_pool_that_will_grow_gives_up_the_most() -> None:
    assert plan_pool(1, 8, will_grow=True).memory_fraction == 0.88


def test_more_devices_than_links_is_told() -> None:
    assert plan_pool(32, 16).fits_link_limit
    plan = plan_pool(33, 16)
    assert not plan.fits_link_limit
    assert plan.fraction_for_links == 0.04


def test_tokens() -> None:
    tokens = plan_tokens(plan_pool(8, 16), 70_272, dram_bytes=8 * 10**12, ssd_bytes=10**14, tp_size=8)
    assert tokens.dram_tokens == 8 * 10**12 // 70_272
    assert tokens.ssd_tokens == 10**14 // 70_272
    assert tokens.tokens_for_links == 600 * 10**6 * 8 // 70_272


@pytest.mark.parametrize(("nodes", "devices", "fraction"), [(1, 1, 0.92), (2, 2, 0.04), (2, 2, 1.1)])
def test_nonsense_is_refused(nodes: int, devices: int, fraction: float) -> None:
    with pytest.raises(ConfigError):
        plan_pool(nodes, devices, memory_fraction=fraction)
