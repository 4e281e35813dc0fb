"""Scheduling orders: what each gains and whom it starves."""

import numpy as np
import pytest
from packages.lab.tests.traces import trace_of

from stemma.errors import ConfigError
from stemma_lab.order import ORDERS, QueueServer, replay_order
from stemma_lab.savings import PrefillModel

SERVER = QueueServer(6, "lru", PrefillModel(tokens_per_s=4.0, attention_equal_at=float("inf")), ageing_s=20.0)


def interleaved(num_rounds: int = 8):
    """Three groups that share a long prefix each, arriving in turn: a small cache holds one group's."""
    return trace_of(
        [
            [*(100 * group + i for i in range(1, 5)), 1000 * group + r]
            for r in range(num_rounds)
            for group in (1, 2, 3)
        ]
    )


def test_depth_first_orders_reach_the_optimum_in_a_batch():
    """Theorem 3.1 of arXiv 2312.07104; first come, first served finds nothing."""
    trace = interleaved()
    share = {
        order: replay_order(trace, order, SERVER, time_scale=0.0).share_of_optimal for order in ORDERS[:3]
    }
    assert share == {"fcfs": 0.0, "longest-prefix": 1.0, "dfs-weight": 1.0}


def test_ageing_bounds_the_wait_of_a_prompt_that_shares_nothing():
    shared = [[1, 2, 3, 4, 10 + i] for i in range(60)]
    trace = trace_of([shared[0], [900, 901, 902, 903], *shared[1:]])
    starved = replay_order(trace, "longest-prefix", SERVER).wait_s[1]
    aged = replay_order(trace, "ageing", SERVER).wait_s[1]
    assert starved > 50.0
    assert aged < 25.0


@pytest.mark.parametrize("order", ORDERS)
def test_everyone_is_served_once(order):
    trace = interleaved(4)
    result = replay_order(trace, order, SERVER, time_scale=0.5)
    assert len(result.wait_s) == trace.num_requests
    assert (result.wait_s >= 0).all()
    assert result.busy_s > 0
    assert result.wait_p99_s >= np.median(result.wait_s)


def test_unknown_order():
    with pytest.raises(ConfigError, match="unknown order 'alphabet'"):
        replay_order(interleaved(1), "alphabet", SERVER)
