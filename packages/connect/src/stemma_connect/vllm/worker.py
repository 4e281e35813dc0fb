"""The half of the connector in vLLM's worker: it owns the tiers, loads blocks and copies full ones down."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import partial

from stemma.memory.device.copy import BlockCopy
from stemma.memory.tiers.opening import open_tiers
from stemma.prefix.keys import KeySpace
from stemma.supervision import Supervisor
from stemma_connect.settings import ConnectorSettings
from stemma_connect.vllm.lookup import TierLookup
from stemma_connect.vllm.work import LoadWork, StepWork

_PROMPT_SHARE = 0.9
"""A step with at least this share of prompt tokens measures what computing a prompt costs."""
_IDLE_WAIT_S = 0.02
"""How long a step without tokens waits for a load: else vLLM's loop would spin, on the cores that load."""


@dataclass(frozen=True, slots=True)
class _Loading:
    work: LoadWork
    future: Future[int]


class WorkerSide:
    """The tiers below vLLM's blocks. vLLM's worker thread owns it; `lookup` is for any thread."""

    def __init__(
        self,
        settings: ConnectorSettings,
        blocks: BlockCopy,
        space: KeySpace,
        supervisor: Supervisor,
        step_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the tiers. `step_tokens`: the most that a step of vLLM computes.

        Raises what `open_tiers` raises.
        """
        self._transfer = open_tiers(
            settings.tiers,
            blocks,
            space,
            step_tokens=step_tokens,
            blocks_may_wait=False,  # vLLM doesn't tell what it evicts
            eviction=settings.eviction,
            pool=settings.pool,
            supervisor=supervisor,
        )
        self.lookup = TierLookup(self._transfer)
        self._block_size = space.block_size
        self._block_bytes = blocks.block_bytes
        # On CUDA a step has only been launched when its time is taken.
        self._measures = not blocks.pins_memory
        self._clock = clock
        self._loading: list[_Loading] = []
        self._failed: set[int] = set()
        self._handed_over: set[str] = set()
        self._load_s = 0.0
        self._reported: dict[str, float] = {}
        self._begun_at = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._begun_at = self._clock()

    def start_loads(self, work: StepWork) -> None:
        """Start the loads of a step, and stop lookups that nobody needs any more."""
        self.lookup.settle(work.settled)
        for load in work.loads:
            self.lookup.settle([load.request_id])
            started = self._clock()
            future = self._transfer.load(load.keys, load.block_ids)
            future.add_done_callback(partial(self._note_time, started))
            self._loading.append(_Loading(load, future))

    def save(self, work: StepWork) -> None:
        """The step has run: learn from its time, and copy down what became full. Done on return."""
        num_prompt, total = work.num_prompt_tokens, work.num_tokens
        if self._measures and num_prompt >= max(self._block_size, _PROMPT_SHARE * total):
            self._transfer.observe_prefill(num_prompt, self._clock() - self._begun_at)
        if work.hits:
            self._transfer.on_hit(work.hits)
        if work.saves:
            self._transfer.on_commit(work.saves)
        self._handed_over.update(work.handed_over)

    def finished(self, *, is_idle: bool) -> tuple[set[str], set[str]]:
        """Return requests whose last saves are done, and requests whose loads have ended, well or not.

        `is_idle`: the step computed nothing; wait a little for a load to end.
        """
        if is_idle and self._loading:
            wait([one.future for one in self._loading], _IDLE_WAIT_S, FIRST_COMPLETED)
        done = [one for one in self._loading if one.future.done()]
        self._loading = [one for one in self._loading if not one.future.done()]
        for one in done:
            self._failed.update(one.work.block_ids[self._num_loaded(one.future) :])
        saved, self._handed_over = self._handed_over, set()
        return saved, {one.work.request_id for one in done}

    def take_failed(self) -> set[int]:
        """Return vLLM's blocks whose load failed since the last call; their tokens must be computed."""
        failed, self._failed = self._failed, set()
        return failed

    def take_counts(self) -> dict[str, float]:
        """Return what happened since the last call, as numbers above 0 by name."""
        stats = self._transfer.stats()
        now: dict[str, float] = {
            "load_seconds": self._load_s,
            "dropped_writes": sum(stats.dropped_writes.values()),
        }
        for tier, count in stats.loads.loaded_blocks.items():
            now[f"loaded_blocks/{tier}"] = count
            now[f"loaded_bytes/{tier}"] = count * self._block_bytes
        for (tier, result), count in stats.loads.lost_blocks.items():
            now[f"lost_blocks/{tier}/{result}"] = count
        now["late_loads"] = stats.loads.num_late_loads
        for tier, one in stats.tiers.items():
            for put, count in one.counters.puts.items():
                now[f"writes/{tier}/{put}"] = count
            now[f"evicted_blocks/{tier}"] = one.counters.num_evicted
            for reason, count in one.counters.reasons.items():
                now[f"failures/{tier}/{reason}"] = count
        new = {name: value - self._reported.get(name, 0) for name, value in now.items()}
        self._reported = now
        return {name: value for name, value in new.items() if value > 0}

    def drain(self, timeout_s: float) -> bool:
        """Wait until queued writes are done; return whether they are."""
        return self._transfer.drain(timeout_s)

    def close(self) -> None:
        """Write what is queued and close the tiers."""
        self._transfer.close()

    def _note_time(self, started: float, future: Future[int]) -> None:
        self._load_s += self._clock() - started

    @staticmethod
    def _num_loaded(future: Future[int]) -> int:
        return 0 if future.cancelled() or future.exception() is not None else future.result()


def total_of(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the sums of counts by name."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0) + value
    return total
