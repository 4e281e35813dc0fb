"""Small traces for the tests of the lab."""

from collections.abc import Sequence

import numpy as np

from stemma_lab.traces.columns import Trace, collect
from stemma_lab.traces.request import TraceRequest


def trace_of(chains: Sequence[Sequence[int]], block_size: int = 4, every_s: float = 1.0) -> Trace:
    """Return a trace of chains of raw ids, one request every `every_s` seconds."""
    requests = [
        TraceRequest(
            timestamp_s=number * every_s,
            block_ids=np.asarray(chain, dtype=np.int64),
            input_tokens=len(chain) * block_size,
            output_tokens=1,
            num_prompt_blocks=len(chain),
        )
        for number, chain in enumerate(chains)
    ]
    return collect("test", lambda: block_size, requests)
