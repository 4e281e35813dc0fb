"""The load of a checkpoint, begun while the interpreter still imports libraries.

Imports keep one core busy for two seconds. Reading ahead, making memory ready, the fingerprint and packing
need files alone, so threads do them meanwhile. The load asks the plan for each of them; what the plan doesn't
have, or has of other files, the load makes by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stemma.config.settings import ModelSettings
from stemma.model.files.directory import is_gguf, weight_files
from stemma.model.files.fingerprint import EarlyFingerprint
from stemma.model.load.located import present_path
from stemma.native.early_memory import EarlyMemory
from stemma.native.process_memory import available_bytes
from stemma.native.read_ahead import read_ahead
from stemma.supervision import Supervisor

if TYPE_CHECKING:
    from stemma.model.load.early_packing import EarlyPacking


class LoadPlan:
    """Parts of one load on their way. `close` ends what nobody took."""

    def __init__(self, settings: ModelSettings, supervisor: Supervisor, *, is_whole: bool) -> None:
        """Begin, unless the checkpoint isn't on this machine yet.

        `is_whole`: one process loads all of the model, and no layer beside it, so weights may be packed.
        Raises ModelError if there are no weights.
        """
        self.packing: EarlyPacking | None = None
        """The weights; None: the load packs them."""
        self._memory: EarlyMemory | None = None
        self._fingerprint: EarlyFingerprint | None = None
        path = present_path(settings)
        if path is None:
            return
        num_bytes, is_small = begin_to_read(path, supervisor)
        packs = is_small and _is_on_cpu(settings) and settings.quantize == "none"
        if packs:
            self._memory = EarlyMemory(num_bytes, supervisor)
        if settings.trust_remote_code:
            return  # the checkpoint's own code, if it has any, is part of the fingerprint
        after = self._memory.wait if self._memory is not None else lambda: None
        self._fingerprint = EarlyFingerprint(path, after, supervisor)
        if packs and is_whole and not is_gguf(path):
            from stemma.model.load.early_packing import EarlyPacking

            self.packing = EarlyPacking(path, settings.isa, self.take_memory, supervisor)

    def fingerprint(self, path: Path) -> str | None:
        """Wait, and return the fingerprint of the files that `path` has now; None: the load reads it."""
        return None if self._fingerprint is None else self._fingerprint.take(path)

    def take_memory(self) -> EarlyMemory | None:
        """Return memory for the weights, once; None: there is none. Whoever takes it closes it."""
        memory, self._memory = self._memory, None
        return memory

    def drop_packed(self) -> None:
        """Free packed weights that nobody took."""
        if self.packing is not None:
            self.packing.close()

    def close(self) -> None:
        """Free what nobody took."""
        self.drop_packed()
        if (memory := self.take_memory()) is not None:
            memory.close()


def begin_to_read(path: Path, supervisor: Supervisor) -> tuple[int, bool]:
    """Begin to read a checkpoint's weights, if memory is twice as large; return their bytes, and if it is.

    Raises ModelError if there are none.
    """
    files = weight_files(path)
    num_bytes = sum(file.stat().st_size for file in files)
    is_small = 2 * num_bytes < available_bytes()
    if is_small:
        read_ahead(files, supervisor)
    return num_bytes, is_small


def _is_on_cpu(settings: ModelSettings) -> bool:
    """Whether the model will run on CPU, told without importing torch."""
    return settings.device in ("auto", "cpu") and not Path("/dev/nvidiactl").exists()
