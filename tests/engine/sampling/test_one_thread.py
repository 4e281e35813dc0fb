"""A few rows are drawn from by one thread; afterwards there are as many as before. The draw is the same."""

import pytest
import torch

from stemma.engine.sampling.one_thread import MAX_NUMBERS, one_thread_for
from stemma.engine.sampling.params import SamplingParams
from stemma.engine.sampling.sampler import Sampler
from stemma.engine.sampling.state import SamplingState

VOCAB_SIZE = 40_000


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_few_rows_are_for_one_thread(two_threads):
    with one_thread_for(torch.empty(8, 32_000)):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with one_thread_for(torch.empty(MAX_NUMBERS + 1)):
        assert torch.get_num_threads() == 2


def test_errors_leave_the_number_of_threads(two_threads):
    with pytest.raises(ValueError, match="draw"), one_thread_for(torch.empty(8, 32_000)):
        raise ValueError("no draw")
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": 8},
        {"temperature": 0.7},
        {"temperature": 1.0, "logprobs": 5},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 0.8, "top_k": 20, "min_p": 0.01},
        {"repetition_penalty": 1.2},
        {"min_tokens": 3},
    ],
)
def test_draws_are_the_same_with_one_thread_and_with_all(two_threads, monkeypatch, fields):
    generator = torch.Generator().manual_seed(1)
    # Rounded to bfloat16 many are equal: the order of equal ones counts too.
    logits = (4 * torch.randn(6, VOCAB_SIZE, generator=generator)).bfloat16().float()

    def draw():
        params = SamplingParams(**({"temperature": 0.0, "seed": 5} | fields))
        states = [SamplingState(params, [1, 2], VOCAB_SIZE, index=i) for i in range(6)]
        return Sampler().sample(logits, states)

    by_one = draw()
    monkeypatch.setattr("stemma.engine.sampling.one_thread.MAX_NUMBERS", 0)
    assert draw() == by_one
