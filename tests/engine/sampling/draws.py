"""Logits and rules of drawing that tests of samplers share."""

from __future__ import annotations

import torch

from stemma.engine.sampling.params import SamplingParams

V = 40


def logits_of(seed: int, vocab_size: int = V, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocab_size, generator=generator) * scale


FILTERS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=2.0),
    SamplingParams(top_k=1),
    SamplingParams(top_k=7),
    SamplingParams(top_k=1000),
    SamplingParams(top_p=0.6),
    SamplingParams(top_p=0.97, temperature=3.0),
    SamplingParams(min_p=0.1),
    SamplingParams(min_p=0.05, top_k=9, top_p=0.8, temperature=1.3),
    SamplingParams(top_k=300, top_p=0.9, temperature=4.0),
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(frequency_penalty=0.7, presence_penalty=-0.4),
    SamplingParams(repetition_penalty=0.6, frequency_penalty=-1.0, presence_penalty=0.9, top_k=6),
    SamplingParams(min_tokens=9, stop_token_ids=(3,), top_p=0.9),
]
