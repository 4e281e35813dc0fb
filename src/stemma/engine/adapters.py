"""The adapters (LoRA) that an engine serves, by name. Any thread may ask; files are read by who loads.

All of them lie in host memory as they were stored. What a step computes with, packed matrices, is made when a
request needs it and kept for the `max_loras` used last (`core/adapter_seats.py`). On CPU both are the same
memory, so `max_loras` bounds the packed copies and how many adapters a step mixes; on CUDA it bounds what the
device holds.

A name can go at any time: requests hold the adapter itself, not its name, so those under way end as they
began.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

from stemma.config.settings import LoraSettings
from stemma.errors import AdapterError, UnknownModel
from stemma.model.lora.adapter import Adapter, LinearShape
from stemma.model.lora.reading import read_adapter, served

MAX_NAME = 256
"""Characters of a name."""


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """An adapter as `/v1/models` lists it."""

    name: str
    path: Path
    adapter: Adapter


class AdapterRegistry:
    """Names and adapters."""

    def __init__(
        self, linears: Mapping[str, LinearShape], settings: LoraSettings, model_names: Sequence[str]
    ) -> None:
        """`linears`: the layers of the model that adapters may add to; `model_names`: taken."""
        self.linears = linears
        """The layers that adapters may add to."""
        self._settings = settings
        self._model_names = frozenset(model_names)
        self._lock = Lock()
        self._named: dict[str, NamedAdapter] = {}

    def load(self, name: str, path: Path, *, within: Sequence[Path] | None = None) -> NamedAdapter:
        """Read the adapter in `path` and serve it as `name`; None of `within`: from anywhere.

        Raises AdapterError if the name is taken or no name, if there are `max_cpu_loras` already, and as
        `read_adapter` does.
        """
        self._check_name(name)
        adapter = read_adapter(path, self.linears, max_rank=self._settings.max_lora_rank, within=within)
        with self._lock:
            self._check_free(name)
            same = next((n.adapter for n in self._named.values() if n.adapter.key == adapter.key), adapter)
            named = self._named[name] = NamedAdapter(name, path, replace(same, name=name))
        return named

    def unload(self, name: str) -> None:
        """Serve `name` no more; requests under way end as they began. Raises UnknownModel."""
        with self._lock:
            if self._named.pop(name, None) is None:
                raise UnknownModel(f"no adapter is loaded as {name[:MAX_NAME]!r}", param="lora_name")

    def find(self, name: str) -> Adapter | None:
        """Return the adapter of that name; None if there is none."""
        named = self._named.get(name)
        return None if named is None else named.adapter

    def get(self, name: str) -> Adapter:
        """Return the adapter of that name; raise UnknownModel."""
        adapter = self.find(name)
        if adapter is None:
            raise UnknownModel(f"no adapter is loaded as {name[:MAX_NAME]!r}", param="lora")
        return adapter

    def all(self) -> list[NamedAdapter]:
        """Return all, in the order in which they were loaded."""
        with self._lock:
            return list(self._named.values())

    def keys(self) -> list[str]:
        """Return the keys of all adapters, each once."""
        return list(dict.fromkeys(named.adapter.key for named in self.all()))

    def _check_name(self, name: str) -> None:
        """Raise AdapterError before anything is read, where it is plain that `load` can't succeed."""
        if not (0 < len(name) <= MAX_NAME and name.isprintable() and name == name.strip()):
            raise AdapterError(f"an adapter's name has 1 to {MAX_NAME} printable characters: {name[:50]!r}")
        if not self.linears:
            raise AdapterError(served(self.linears))
        with self._lock:
            self._check_free(name)

    def _check_free(self, name: str) -> None:
        if name in self._model_names:
            raise AdapterError(f"{name!r} is the name of the model itself; call the adapter something else")
        if name in self._named:
            raise AdapterError(f"an adapter is loaded as {name!r} already; unload it, or take another name")
        if len(self._named) >= self._settings.max_cpu_loras:
            raise AdapterError(
                f"{len(self._named)} adapters are loaded, the limit (max_cpu_loras); unload one first"
            )
