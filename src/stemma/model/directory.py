"""The contents of a checkpoint directory: read without torch, checked before anything is loaded.

A directory that can't be served is refused here with a specific message: GGUF, LoRA adapters, `.bin` weights,
a download that lacks a shard. Headers of safetensors files are parsed here too: names, dtypes and offsets of
all tensors, for the fingerprint and the checks of the weights.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from stemma.errors import ModelError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format itself."""
_BITS = {"BOOL": 8, "BF16": 16, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a safetensors file holds it."""

    name: str
    file: Path
    dtype: str
    """As the format names it: F32, BF16, F8_E4M3, I8, ..."""
    shape: tuple[int, ...]
    start: int
    """Offset in the file."""
    num_bytes: int


def check_directory(path: Path) -> None:
    """Raise ModelError, saying what to do, unless `path` looks like a whole Hugging Face checkpoint."""
    if path.suffix == ".gguf":
        raise ModelError(
            f"{path} is a GGUF file, which isn't served as it is; give the directory of the original "
            "checkpoint, or convert the file: transformers' from_pretrained(..., gguf_file=...) reads it, "
            "save_pretrained(...) writes a directory that is served"
        )
    if not path.is_dir():
        raise ModelError(f"no checkpoint directory at {path}; give the path of a downloaded one")
    if has_file(path, "adapter_config.json"):
        beside = "an adapter beside a full model" if has_file(path, CONFIG) else "an adapter (LoRA) alone"
        raise ModelError(
            f"{path} holds {beside} (adapter_config.json), and adapters aren't served; merge it into its "
            "base model (peft: merge_and_unload, then save_pretrained), or take adapter_config.json and "
            "adapter_model.* out of the directory to serve the model without it"
        )
    if not has_file(path, CONFIG):
        if any(path.glob("*.gguf")):
            raise ModelError(f"{path} holds GGUF files only; give the directory of the original checkpoint")
        raise ModelError(f"{path} has no config.json; give the directory that holds the checkpoint's files")


def has_file(path: Path, name: str) -> bool:
    """Whether the directory holds a plain file of that name."""
    return (path / name).is_file()


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`; raise ModelError if there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"can't read {file}: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} isn't a JSON object")
    return content


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files that are loaded, as transformers chooses them; raise ModelError."""
    if has_file(path, SINGLE):
        return [path / SINGLE]
    if has_file(path, INDEX):
        weight_map = read_json(path / INDEX).get("weight_map")
        names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
        if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise ModelError(f"{path / INDEX} has no usable weight_map; download it again")
        lacking = sorted(name for name in names if not has_file(path, name))
        if lacking:
            raise ModelError(
                f"{path} lacks {len(lacking)} of {len(names)} weight files, e.g. {lacking[0]}; "
                "is the download complete?"
            )
        return [path / name for name in sorted(names)]
    if any(path.glob("*.bin")) or any(path.glob("*.pt")) or any(path.glob("*.pth")):
        raise ModelError(
            f"{path} has weights as .bin or .pt files only, which can run code when they are read; convert "
            "them once: transformers' from_pretrained(...) and save_pretrained(...) write safetensors"
        )
    if any(path.glob("*.gguf")):
        raise ModelError(f"{path} has weights as GGUF only; give the original checkpoint's safetensors")
    raise ModelError(f"{path} has no {SINGLE} and no {INDEX}: can't load weights; is the download complete?")


def stored_tensors(path: Path) -> list[StoredTensor]:
    """Return all tensors of the checkpoint in `path`, in order of names; raise ModelError."""
    found: dict[str, StoredTensor] = {}
    for file in weight_files(path):
        for tensor in _read_header(file):
            if tensor.name in found:
                raise ModelError(f"{tensor.name} is in {found[tensor.name].file.name} and in {file.name}")
            found[tensor.name] = tensor
    return [found[name] for name in sorted(found)]


def _read_header(file: Path) -> list[StoredTensor]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            (header_bytes,) = struct.unpack("<Q", stream.read(8))
            if header_bytes > min(size - 8, _MAX_HEADER_BYTES):
                raise ModelError(f"{file} is cut short or no safetensors file; download it again")
            header = json.loads(stream.read(header_bytes))
    except (OSError, ValueError, struct.error, RecursionError) as error:
        raise ModelError(f"can't read {file}: {error}; download it again") from error
    try:
        return [
            _stored_tensor(file, name, entry, 8 + header_bytes, size)
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{file} has a malformed header: {error}; download it again") from error


def _stored_tensor(file: Path, name: str, entry: Any, origin: int, file_bytes: int) -> StoredTensor:
    shape = tuple(int(size) for size in entry["shape"])
    start, stop = (int(offset) for offset in entry["data_offsets"])
    dtype = str(entry["dtype"])
    if not 0 <= start <= stop <= file_bytes - origin:
        raise ModelError(f"{file} ends before its tensor {name}; is the download complete?")
    if (stop - start) * 8 != prod(shape) * _bits_of(dtype):
        raise ModelError(f"{file}: the size of {name} contradicts its shape; download it again")
    return StoredTensor(name, file, dtype, shape, origin + start, stop - start)


def _bits_of(dtype: str) -> int:
    """Return the bits of an element: F32 -> 32, F8_E4M3 -> 8, I64 -> 64; raise ValueError."""
    if dtype in _BITS:
        return _BITS[dtype]
    digits = dtype[1:].split("_")[0]
    if dtype[:1] not in ("F", "I", "U") or not digits.isdigit():
        raise ValueError(f"unknown dtype {dtype}")
    return int(digits)
