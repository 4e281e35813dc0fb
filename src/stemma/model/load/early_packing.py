"""Weights of a dense checkpoint, checked and packed by a thread while the interpreter imports libraries.

Imports keep one core busy for two seconds, most of a small model's start; packing its weights keeps the
others busy for half of one, and needs torch alone. The thread takes names and shapes from the files and makes
nothing of the config but a guess; the load compares later, and does all by itself where the guess was wrong.
Whatever goes wrong here is no error: the load meets it again, and has the words for it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stemma.model.cpu.fused import PackedWeights, pack_weights
from stemma.model.cpu.packing import Packing
from stemma.model.cpu.weight_memory import weights_together
from stemma.model.families.pattern import as_stored
from stemma.model.families.registry import pattern_of
from stemma.model.files.directory import (
    CONFIG,
    FileStates,
    StoredTensor,
    file_states,
    open_safetensors,
    read_json,
    stored_tensors,
)
from stemma.model.weights.named import NamedWeights
from stemma.native.early_memory import EarlyMemory
from stemma.native.library import load_kernels
from stemma.native.process_memory import MappedFiles, large_blocks_apart
from stemma.supervision import Supervisor, start_thread

_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
_BITS = {
    torch.bfloat16: (torch.int16, np.uint16, 0x7F80),
    torch.float32: (torch.int32, np.uint32, 0x7F800000),
}
"""By dtype: words of its size, and the exponent of NaN and infinity."""
_CHUNK = 1 << 17
"""Numbers that are checked at once: they stay in a core's cache."""


class _Over(Exception):
    """Nobody wants the weights any more."""


@dataclass(frozen=True, slots=True)
class _Source:
    """The source of packed weights, to the bit."""

    stored: list[StoredTensor]
    files: FileStates
    dtype: torch.dtype
    is_tied: bool
    isa: str


class EarlyPacking:
    """A checkpoint's weights on their way; `take` or `close` ends the thread."""

    def __init__(
        self, path: Path, isa: str, take_memory: Callable[[], EarlyMemory | None], supervisor: Supervisor
    ) -> None:
        """Begin with the plain safetensors in the directory `path`, for the kernels of level `isa`.

        `take_memory` returns what was made ready for the weights; the thread calls it once it needs it.
        """
        self._path, self._isa, self._take_memory = path, isa, take_memory
        self._is_over = threading.Event()
        self._found: tuple[_Source, PackedWeights] | None = None
        self._thread = start_thread("stemma-packing", self._run, supervisor)

    def take(
        self, stored: list[StoredTensor], dtype: torch.dtype, *, is_tied: bool, isa: str
    ) -> PackedWeights | None:
        """Wait, and return the weights if they are those of a model of exactly these tensors, else None."""
        self.wait()
        found, self._found = self._found, None
        if found is None:
            return None
        source, packed = found
        wanted = _Source(stored, file_states(tensor.file for tensor in stored), dtype, is_tied, isa)
        return packed if source == wanted else None

    def close(self) -> None:
        """Drop what nobody took."""
        self._is_over.set()
        self.wait()
        self._found = None

    def wait(self) -> None:
        """Wait until the weights are packed, or can't be."""
        self._thread.join()

    def _run(self) -> None:
        try:
            self._found = self._pack()
        except Exception:  # noqa: BLE001 - the load meets it again, and says what it is
            self._found = None

    def _pack(self) -> tuple[_Source, PackedWeights] | None:
        raw = read_json(self._path / CONFIG)
        stored = stored_tensors(self._path)
        dtypes = {tensor.dtype for tensor in stored}
        kernels = load_kernels(self._isa)
        pattern = pattern_of(raw.get("model_type"))
        if pattern is None or len(dtypes) != 1 or kernels is None:
            return None
        dtype = _DTYPES[dtypes.pop()]
        is_tied = raw.get("tie_word_embeddings") is True
        source = _Source(stored, file_states(tensor.file for tensor in stored), dtype, is_tied, self._isa)
        files: dict[Path, Any] = {file: open_safetensors(file) for file in source.files}
        tensors = {tensor.name: files[tensor.file].get_tensor(tensor.stored_name) for tensor in stored}
        layout = as_stored({tensor.name: tensor.shape for tensor in stored}, pattern, is_tied=is_tied)
        weights = NamedWeights(tensors, dtype, self._check)
        checkpoint = MappedFiles(source.files)
        # A core is left to the imports, which everything waits for.
        packing = Packing(kernels, dtype, num_threads=max(1, (os.cpu_count() or 1) - 1))
        with large_blocks_apart(), weights_together(self._take_memory()):
            return source, pack_weights(layout, weights, packing, lambda _share: checkpoint.drop_pages())

    def _check(self, _name: str, weight: torch.Tensor) -> None:
        """Raise ValueError if a weight isn't finite, _Over if nobody wants it."""
        if self._is_over.is_set():
            raise _Over
        if not is_finite(weight):
            raise ValueError("NaN or infinite")


def is_finite(weight: torch.Tensor) -> bool:
    """Whether no number of a contiguous tensor, bfloat16 or float32, is NaN or infinite; one thread looks."""
    words, unsigned, exponent = _BITS[weight.dtype]
    numbers: Any = weight.view(words).numpy().reshape(-1).view(unsigned)
    room = np.empty(min(_CHUNK, len(numbers)), unsigned)
    for begin in range(0, len(numbers), _CHUNK):
        chunk = numbers[begin : begin + _CHUNK]
        if np.bitwise_and(chunk, exponent, out=room[: len(chunk)]).max() == exponent:
            return False
    return True
