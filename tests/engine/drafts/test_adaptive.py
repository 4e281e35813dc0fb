"""The cost model learns what steps take, and the draft length follows from it."""

from __future__ import annotations

import numpy as np
import pytest
from tests.engine.drafts.known_cost import KnownCost

from stemma.engine.drafts.adaptive import Acceptance, AcceptanceTable, Probe, StepCost, best_length


def fitted(base_s: float, row_s: float, context_s: float = 0.0, noise: float = 0.0) -> StepCost:
    """Return the cost learned from 200 steps of this shape; context grows as it does in decoding."""
    cost, generator = StepCost(), np.random.default_rng(0)
    for step in range(200):
        num_rows, context = int(generator.integers(1, 10)), 500 + 5 * step
        duration_s = base_s + row_s * num_rows + context_s * context / 1024
        cost.observe(num_rows, context, num_rows, duration_s * (1 + noise * generator.standard_normal()))
    return cost


@pytest.mark.parametrize("row_s", [0.0, 0.001, 0.02])
def test_cost_of_a_row_is_found(row_s: float) -> None:
    assert fitted(0.03, row_s, 0.004).row_s == pytest.approx(row_s, abs=2e-4)


def test_noise_moves_the_cost_of_a_row_only_a_little() -> None:
    assert fitted(0.03, 0.001, noise=0.05).row_s == pytest.approx(0.001, abs=4e-4)


def test_as_long_as_all_steps_are_alike_a_row_costs_nothing() -> None:
    """Then drafts are tried, and the next steps tell."""
    cost = StepCost()
    for _ in range(50):
        cost.observe(1, 300, 1, 0.025)
    assert cost.row_s < 0.025 * 0.02
    assert cost.token_s == pytest.approx(0.025)


def test_a_step_that_gave_nothing_is_not_learned_from() -> None:
    cost = fitted(0.03, 0.001)
    before = cost.token_s
    cost.observe(1, 100, 0, 4.0)
    assert cost.token_s == before


@pytest.mark.parametrize(
    ("probability", "row_share", "expected"),
    [(0.99, 0.02, 16), (0.9, 0.2, 15), (0.5, 0.2, 2), (0.1, 0.2, 0), (0.0, 0.0, 0)],
)
def test_draft_length_is_where_the_next_token_no_longer_pays(
    probability: float, row_share: float, expected: int
) -> None:
    """The k-th token pays if probability ** k exceeds a row's cost as a share of a token's time."""
    length, gain = best_length(probability, 16, KnownCost(row_share))
    assert length == expected
    assert (gain > 0) == (expected > 0)


def test_acceptance_moves_from_the_prior_to_what_was_seen() -> None:
    acceptance = Acceptance(0.5)
    assert acceptance.probability == 0.5
    for _ in range(20):
        acceptance.observe(4, 0)
    assert acceptance.probability < 0.2
    for _ in range(10):
        acceptance.observe(8, 8)
    assert acceptance.probability > 0.9


def test_tokens_behind_the_first_failure_say_nothing() -> None:
    one, other = Acceptance(0.5), Acceptance(0.5)
    one.observe(2, 1)
    other.observe(16, 1)
    assert one.probability == other.probability


def test_a_new_request_starts_with_what_others_learned() -> None:
    table = AcceptanceTable()
    first = table.for_request()["lookup-medium"]
    for _ in range(50):
        first.observe(4, 4)
    assert table.for_request()["lookup-medium"].probability > 0.9
    assert table.for_request()["tree"].probability == pytest.approx(0.8)


def test_probes_become_rarer_until_one_succeeds() -> None:
    probe = Probe()
    probed = [step for step in range(600) if probe.decline()]
    assert probed == [7, 23, 55, 119, 247, 503]
    probe = Probe()
    assert [step for step in range(30) if probe.decline()] == [7, 23]
    probe.succeed()
    assert [step for step in range(10) if probe.decline()] == [7]
