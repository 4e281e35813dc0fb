"""Messages from rank 0 to the other ranks, their answers, and the link in between."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stemma.config.settings import EngineSettings
from stemma.memory.tiers.pool_asks import PoolAsk
from stemma.model.attend.batch import StateMoves
from stemma.model.parallel.share import Share
from stemma.prefix.keys import KeySpace
from stemma.types import BlockKey


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: load the model."""

    settings: EngineSettings
    share: Share
    meeting_file: Path


@dataclass(frozen=True, slots=True)
class Open:
    """Allocate the device tier, open the tiers below."""

    num_blocks: int
    key_space: KeySpace
    slab: int
    """As in `DeviceKV`."""
    layout: str
    """Rank 0's description of a block, which each rank's must equal."""


@dataclass(frozen=True, slots=True)
class Step:
    """A `ForwardBatch`, as arrays."""

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    query_starts: list[int]
    context_lens: list[int]
    block_tables: npt.NDArray[np.int32]
    logits_rows: npt.NDArray[np.int64]
    """Rank 0 alone gets them; ranks that divide the tokens compute those of their rows for it."""
    states: StateMoves | None


@dataclass(frozen=True, slots=True)
class ClearSlab:
    """Zero a slab of the device tier."""

    slab: int


@dataclass(frozen=True, slots=True)
class CopyHead:
    """Copy the KV of the first tokens of a block into another one."""

    src: int
    dst: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Call a method of the tiers; nobody waits for it."""

    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """Call a method of the tiers and answer with what it returns."""

    number: int
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class LoadBlocks:
    """Load blocks from the tiers; answer with how many leading ones arrived, once they have."""

    number: int
    keys: Sequence[BlockKey]
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class StartPrefetch:
    """Promote the blocks of a queued prompt; answer once the probe is done, with what asking takes here."""

    number: int
    parent: BlockKey
    keys: Sequence[BlockKey]
    owners: Sequence[str]
    ask: PoolAsk
    """How to ask the pool: rank 0's word, whatever this rank measured."""


@dataclass(frozen=True, slots=True)
class StopPrefetch:
    """End a prefetch that `StartPrefetch` began."""

    number: int


@dataclass(frozen=True, slots=True)
class Close:
    """The last message: close the tiers and end."""


@dataclass(frozen=True, slots=True)
class Reached:
    """A rank's answer to `Start` (before it loads, and once it has) and to `Open`."""

    stage: str


@dataclass(frozen=True, slots=True)
class Reply:
    """To `Ask`, `LoadBlocks` or `StartPrefetch`: a value, or the exception."""

    number: int
    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank's last words."""

    error: Exception


class Link:
    """Messages to one other process, in order. Any thread may send; one receives.

    They are pickled: the other end is a process that we started, over a socket that only the two of us have.
    """

    def __init__(self, end: socket.socket, *, send_timeout_s: float) -> None:
        """Take over `end`. A message that can't be sent within the time limit raises OSError."""
        seconds = int(send_timeout_s)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))
        self._socket = end
        self._connection: Connection[Any, Any] = Connection(os.dup(end.fileno()))
        self._lock = threading.Lock()

    def send(self, message: object) -> None:
        """Send a message; raise OSError if the other end is closed or doesn't read."""
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        with self._lock:
            self._connection.send_bytes(data)

    def receive(self) -> Any:
        """Wait for the next message; raise EOFError or OSError if there will be none."""
        return pickle.loads(self._connection.recv_bytes())

    def close(self) -> None:
        """End it: both ends notice. Any thread; a second call does nothing."""
        with suppress(OSError):  # the other end was faster
            self._socket.shutdown(socket.SHUT_RDWR)
