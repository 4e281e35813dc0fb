"""A rank other than 0, a process that does what rank 0 says: ``python -m stemma.engine.ranks.follower FD``.

It ends when its link does, whatever the reason: rank 0 closed, failed, or was killed.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from stemma.config.settings import PoolSettings, WritePolicy
from stemma.engine.ranks.messages import (
    Ask,
    ClearSlab,
    Close,
    CopyHead,
    Failed,
    Link,
    LoadBlocks,
    Open,
    Reached,
    Reply,
    Start,
    StartPrefetch,
    Step,
    StopPrefetch,
    Tell,
)
from stemma.engine.ranks.settings import dealing_of, pool_part, rank_key_space, settings_of_rank
from stemma.errors import EngineFailed, StemmaError
from stemma.memory.device.accelerator import accelerator_of, resolve_device
from stemma.memory.device.copy import DeviceCopy
from stemma.memory.device.kv import DeviceKV
from stemma.memory.tiers.loads import Prefetch
from stemma.memory.tiers.opening import open_tiers
from stemma.memory.tiers.pool.opening import open_pool
from stemma.memory.tiers.pool.pool_store import PoolStore
from stemma.memory.tiers.transfer import TierTransfer
from stemma.model.attend.batch import ForwardBatch
from stemma.model.load.loading import load_model
from stemma.model.parallel.group import STEP_TIMEOUT_S, RankGroup
from stemma.native.copying import copy_function
from stemma.native.process_memory import trim_heap
from stemma.supervision import Supervisor
from stemma.types import Tier

logger = logging.getLogger(__name__)
_TOLD = frozenset(
    {"on_commit", "on_hit", "on_renew", "on_evict", "on_drop", "copy_waiting", "set_quotas", "unpin"}
)
_ASKED = frozenset({"lookup", "pin", "flush", "drain", "check", "wait_for_queued"})
_NUM_BESIDE = 4
"""Threads for what may take long: one that waits for a pool doesn't hold up the others."""


class Follower:
    """Serves one engine."""

    def __init__(self, link: Link, start: Start) -> None:
        """Load this rank's share, together with the other ranks. Raises as `load_model`."""
        self._link = link
        self._share = start.share
        self._part = pool_part(start.share)
        self._settings = settings_of_rank(start.settings, start.share)
        self._dealing = dealing_of(start.settings)
        device = resolve_device(self._settings.model.device)
        link.send(Reached("started"))
        self._group = RankGroup(start.share, start.meeting_file, device.type)
        self._model = load_model(self._settings.model, group=self._group)
        trim_heap()
        link.send(Reached("loaded"))
        self._prefetches: dict[int, Prefetch] = {}
        # What may take long isn't done between two steps, which all ranks take together.
        self._beside = ThreadPoolExecutor(_NUM_BESIDE, thread_name_prefix="stemma-answer")
        self._opened: PoolStore | None = None
        """A pool that isn't attached yet."""

    def open(self, message: Open) -> None:
        """Allocate KV and open the tiers. Raises EngineFailed if blocks differ from those of rank 0."""
        cache = self._settings.cache
        layout = self._model.layout(cache.block_size, cache.kv_cache_dtype, cache.kv_layout)
        if layout.describe() != message.layout:
            raise EngineFailed(f"blocks are {layout.describe()} here, {message.layout} on rank 0")
        self._key_space, self._block_bytes = message.key_space, layout.block_bytes
        self._kv = DeviceKV(layout, message.num_blocks, self._model.device, slab=message.slab)
        self._tiers: TierTransfer = open_tiers(
            # Rank 0 decides what is worth loading.
            self._settings.tiers.model_copy(update={"load_when": "always"}),
            DeviceCopy(self._kv, copy_function(self._settings.model.isa)),
            rank_key_space(message.key_space, self._share),
            step_tokens=self._settings.scheduler.max_batch_tokens,
            eviction=cache.eviction,
            pool=cache.pool,
            part=self._part,
            role=self._settings.role,
            supervisor=_EndingSupervisor(self._link),
        )
        self._group.end_loading()
        self._link.send(Reached("open"))

    def serve(self) -> None:
        """Do what messages say until `Close`, or the end of the link."""
        try:
            with accelerator_of(self._model.device).scope():
                while not isinstance(message := self._link.receive(), Close):
                    self._handle(message)
        except (EOFError, OSError):
            logger.warning("rank 0 has ended")
        finally:
            self._tiers.close()
            self._drop_pool()

    def _handle(self, message: object) -> None:
        match message:
            case Step():
                self._step(message)
            case CopyHead(src, dst, num_tokens):
                held = self._dealing.num_held_of_block(self._share.context_rank, num_tokens)
                self._kv.copy_block_head(src, dst, held)
            case ClearSlab(slab):
                self._kv.clear_slab(slab)
            case Tell(method, arguments) if method in _TOLD:
                getattr(self._tiers, method)(*arguments)
            case Ask(number, "num_held", (keys,)):
                self._link.send(Reply(number, len(self._tiers.match(keys))))
            case Ask(number, method, arguments) if method in _ASKED:
                self._answer_later(number, partial(getattr(self._tiers, method), *arguments))
            case Ask(number, "open_pool", (settings,)):
                self._answer_later(number, partial(self._open_pool, settings))
            case Ask(number, "drop_pool", ()):
                self._answer_later(number, self._drop_pool)
            case Tell("attach_pool", (write,)):
                self._attach_pool(write)
            case Ask(number, "detach_pool", ()):
                rest = self._tiers.detach(Tier.POOL)
                self._answer_later(number, rest or (lambda: None))
            case LoadBlocks(number, keys, block_ids):
                self._tiers.load(keys, block_ids).add_done_callback(partial(self._answer, number))
            case StartPrefetch(number):
                self._prefetch(message)
            case StopPrefetch(number):
                if (stopped := self._prefetches.pop(number, None)) is not None:
                    stopped.stop()
            case _:
                raise EngineFailed(f"rank 0 sent what nobody knows: {type(message).__name__}")

    def _prefetch(self, message: StartPrefetch) -> None:
        def answer(_probe: Future[None]) -> None:
            with suppress(OSError):  # rank 0 has ended, which `serve` notices
                self._link.send(Reply(message.number, self._tiers.asks.ask_s))

        asked = message.parent, message.keys, message.owners
        if (started := self._tiers.prefetch(*asked, ask=message.ask)) is not None:
            self._prefetches[message.number] = started
            started.probe.add_done_callback(answer)
        else:
            self._link.send(Reply(message.number, self._tiers.asks.ask_s))

    def _step(self, step: Step) -> None:
        device = self._model.device
        wants_logits = self._share.context_size > 1 and self._share.rank == 0
        logits_rows = step.logits_rows if wants_logits else step.logits_rows[:0]
        batch = ForwardBatch(
            token_ids=torch.from_numpy(step.token_ids).to(device),
            positions=torch.from_numpy(step.positions).to(device),
            slots=torch.from_numpy(step.slots).to(device),
            query_starts=step.query_starts,
            context_lens=step.context_lens,
            block_tables=torch.from_numpy(step.block_tables),
            logits_rows=torch.from_numpy(logits_rows).to(device),
            states=step.states,
        )
        self._model.forward(batch, self._kv)

    def _open_pool(self, settings: PoolSettings) -> None:
        """Open a pool that rank 0 is about to attach. Errors as `open_pool`."""
        pins = self._tiers.pins_memory
        store = open_pool(settings, self._key_space, self._block_bytes, pin_memory=pins, part=self._part)
        try:
            self._tiers.introduce(store)
        except StemmaError:
            store.close()
            raise
        self._opened = store

    def _attach_pool(self, write: WritePolicy) -> None:
        if self._opened is None:
            raise EngineFailed("rank 0 attaches a pool that was not opened here")
        self._tiers.attach(self._opened, write)
        self._opened = None

    def _drop_pool(self) -> None:
        """Close a pool that was opened and isn't attached."""
        store, self._opened = self._opened, None
        if store is not None:
            store.close()

    def _answer_later(self, number: int, function: Callable[[], Any]) -> None:
        asked: Future[Any] = self._beside.submit(function)
        asked.add_done_callback(partial(self._answer, number))

    def _answer(self, number: int, future: Future[Any]) -> None:
        error = future.exception()
        with suppress(OSError):  # rank 0 has ended, which `serve` notices
            self._link.send(Reply(number, future.result() if error is None else _sendable(error)))


class _EndingSupervisor(Supervisor):
    """An error in one of this rank's threads ends the rank, and with it the engine."""

    def __init__(self, link: Link) -> None:
        self._link = link

    @override
    def on_thread_failure(self, name: str, error: BaseException) -> None:
        logger.critical("thread %s failed: %r", name, error, exc_info=error)
        try:
            self._link.send(Failed(EngineFailed(f"thread {name} failed: {type(error).__name__}: {error}")))
        finally:
            os._exit(1)


def _sendable(error: BaseException) -> Exception:
    """Return an error that the other side can read: of the same type if it is one of ours."""
    if isinstance(error, StemmaError) and error.args == (str(error),):
        make: Callable[[str], Exception] = type(error)
        return make(str(error))
    return EngineFailed(f"{type(error).__name__}: {error}")


def main() -> int:
    """Serve rank 0, which has the other end of the socket named on the command line; return an exit code."""
    # A terminal and systemd signal all processes: rank 0 decides when to end, and closes the link.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link = Link(socket.socket(fileno=int(sys.argv[1])), send_timeout_s=STEP_TIMEOUT_S)
    start: Start | None = None
    try:
        start = link.receive()
        assert start is not None
        logging.basicConfig(format=f"rank {start.share.number}: %(levelname)s %(name)s: %(message)s")
        follower = Follower(link, start)
        follower.open(link.receive())
        follower.serve()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 1
    except Exception as error:
        logger.exception("this rank ends")
        with suppress(OSError):
            link.send(Failed(_sendable(error)))
        return 1
    finally:
        if start is not None:  # rank 0 may have been killed: nobody else removes it then
            shutil.rmtree(start.meeting_file.parent, ignore_errors=True)
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # threads of gloo and torch aren't waited for
