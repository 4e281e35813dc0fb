"""Operations of torch on CPU by the calling thread alone.

torch divides passes over logits among its threads and waits for the last of them. A pass over a few rows
takes some 50 us. Where other threads use the cores too, as those of a server do, the wait for a second
thread takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

MAX_NUMBERS = 1 << 19
"""On idle cores, a second thread saves more than it costs with more of them; 16 rows of 32,000."""


@contextmanager
def one_thread_for(x: torch.Tensor) -> Iterator[None]:
    """Keep torch from using other threads for passes over `x`, unless it is large or on another device.

    The number of threads is the calling thread's own; to set it takes 0.1 us.
    """
    num_threads = torch.get_num_threads()
    if x.device.type != "cpu" or x.numel() > MAX_NUMBERS or num_threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
