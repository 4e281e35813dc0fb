"""The contents of a checkpoint, a directory or a GGUF file: read without torch, checked before anything is
loaded.

A directory that can't be served is refused here with a specific message: LoRA adapters, `.bin` weights, a
download that lacks a shard. Headers of safetensors files are parsed here too: names, dtypes and offsets of
all tensors, for the fingerprint and the checks of the weights.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

from stemma.errors import ModelError, UnsupportedModel
from stemma.model.files.gguf_parts import part_files

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
GGUF_SUFFIX = ".gguf"
FileStates: TypeAlias = dict[Path, tuple[int, ...]]
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format itself."""
_HEADLESS = "embed_tokens.weight"
"""Where a file names the embedding so, it holds a model without its head (Qwen3-Embedding)."""
_MAX_SHOWN = 200
_MAX_TENSOR_NAME_CHARS = 1000
_MAX_NAME_CHARS = 255
"""Length of a file's name that most systems allow."""
_BITS = {"BOOL": 8, "BF16": 16, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a file holds it."""

    name: str
    file: Path
    dtype: str
    """As the format names it: F32, BF16, F8_E4M3, I8, ...; in GGUF Q8_0, Q4_K, ..."""
    shape: tuple[int, ...]
    start: int
    """Offset in the file."""
    num_bytes: int
    stored_name: str
    """As the file has it; `name` is that of the model with its output head."""


def check_directory(path: Path) -> None:
    """Raise ModelError, saying what to do, unless `path` looks like a whole checkpoint.

    That is a Hugging Face checkpoint, or a file whose name ends in `.gguf`.
    """
    if is_gguf(path):
        return
    if not path.is_dir():
        kind = "GGUF file" if path.suffix.lower() == GGUF_SUFFIX else "checkpoint directory"
        raise ModelError(f"no {kind} at {path}; give the path of a downloaded one")
    if has_file(path, "adapter_config.json"):
        beside = "an adapter beside a full model" if has_file(path, CONFIG) else "an adapter (LoRA) alone"
        raise ModelError(
            f"{path} holds {beside} (adapter_config.json), which is no model by itself; serve its base model "
            f"with it (--lora NAME={path}), or take adapter_config.json and adapter_model.* out of the "
            "directory to serve the model without it"
        )
    if not has_file(path, CONFIG):
        if found := sorted(path.glob("*.gguf")):
            raise ModelError(f"{path} holds GGUF files only; give one of them, e.g. {found[0]}")
        raise ModelError(f"{path} has no config.json; give the directory that holds the checkpoint's files")


def is_gguf(path: Path) -> bool:
    """Whether `path` names a GGUF file that exists, rather than a directory."""
    return path.suffix.lower() == GGUF_SUFFIX and path.is_file()


def has_file(path: Path, name: str) -> bool:
    """Whether the directory holds a plain file of that name."""
    return bool(name) and (path / name).is_file()


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
    """Return the files that hold weights, of safetensors as transformers chooses them; raise ModelError."""
    if is_gguf(path):
        return part_files(path)
    single, index = (SINGLE, INDEX) if description_file(path) is None else _described_files(path)
    if has_file(path, single):
        return [path / single]
    if has_file(path, index):
        weight_map = read_json(path / index).get("weight_map")
        listed = list(weight_map.values()) if isinstance(weight_map, dict) else []
        if not listed or not all(map(_is_file_name, listed)):
            raise ModelError(f"{path / index} has no usable weight_map; download it again")
        names = set(listed)
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
    if found := sorted(path.glob("*.gguf")):
        raise ModelError(f"{path} has weights as GGUF only; give one of these files, e.g. {found[0]}")
    raise ModelError(f"{path} has no {SINGLE} and no {INDEX}: can't load weights; is the download complete?")


def lacks_metadata(path: Path) -> bool:
    """Whether a directory's weights have an index without an object `metadata`, which transformers needs."""
    if is_gguf(path) or has_file(path, SINGLE) or not has_file(path, INDEX):
        return False
    return not isinstance(read_json(path / INDEX).get("metadata"), dict)


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name and len(name) <= _MAX_NAME_CHARS


def checkpoint_states(path: Path) -> FileStates:
    """Return what changes when a file of a checkpoint does. Raises ModelError as `weight_files`; OSError."""
    files = weight_files(path)
    if not is_gguf(path):
        described = description_file(path)
        files += [path / CONFIG, *([] if described is None else [described])]
    return file_states(files)


def file_states(files: Iterable[Path]) -> FileStates:
    """Return device, inode, size and time of the last change of each file; raise OSError."""
    found = {file: file.stat() for file in files}
    return {file: (s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for file, s in found.items()}


def description_file(path: Path) -> Path | None:
    """Return the file that describes the formats of weights in a directory of msModelSlim; None in others.

    Raises UnsupportedModel for W8A8SC, which is compressed for one kind of processor, ModelError if there are
    several such files.
    """
    if not path.is_dir():
        return None
    if any(path.glob("part*-of-*/quant_model_description*.json")):
        raise UnsupportedModel(
            f"{path} holds weights that are compressed for Atlas processors (W8A8SC, W16A16SC); take the "
            "checkpoint "
            "that they were made from (W8A8S, W16A16S)"
        )
    found = sorted(path.glob("quant_model_description*.json"))
    if len(found) > 1:
        raise ModelError(
            f"{path} has several descriptions: {', '.join(file.name for file in found)}; keep the one that "
            "fits"
        )
    return found[0] if found else None


def _described_files(path: Path) -> tuple[str, str]:
    """Return the names of the weight file and the index in a directory of msModelSlim."""
    indexes = sorted(file.name for file in path.glob("quant_model_weight*.safetensors.index.json"))
    singles = sorted(file.name for file in path.glob("quant_model_weight*.safetensors"))
    if len(indexes) > 1 or (not indexes and len(singles) > 1):
        raise ModelError(f"{path} has several weights: {', '.join(indexes or singles)}; keep those that fit")
    if indexes:
        return "", indexes[0]
    return (singles[0], "") if singles else (SINGLE, INDEX)


def stored_tensors(path: Path) -> list[StoredTensor]:
    """Return all tensors of the checkpoint in `path`, in order of names; raise ModelError.

    A model that was saved without its head names them without ``model.``, which is put before them here.
    """
    if is_gguf(path):
        from stemma.model.files.gguf_header import read_header

        in_file = read_header(path).tensors
        return [
            StoredTensor(
                name, tensor.file, tensor.type.name, tensor.shape, tensor.start, tensor.num_bytes, name
            )
            for name, tensor in sorted(in_file.items())
        ]
    found: dict[str, StoredTensor] = {}
    for file in weight_files(path):
        for tensor in read_safetensors_header(file):
            if tensor.name in found:
                raise ModelError(f"{tensor.name} is in {found[tensor.name].file.name} and in {file.name}")
            found[tensor.name] = tensor
    if _HEADLESS in found:
        found = {f"model.{name}": replace(one, name=f"model.{name}") for name, one in found.items()}
    return [found[name] for name in sorted(found)]


def read_safetensors_header(file: Path, max_bytes: int = _MAX_HEADER_BYTES) -> list[StoredTensor]:
    """Return the tensors that a safetensors file says it has; raise ModelError.

    `max_bytes`: of the header; a longer one isn't read.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            (header_bytes,) = struct.unpack("<Q", stream.read(8))
            if header_bytes > min(size - 8, max_bytes):
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
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ModelError(
            f"{file} has a malformed header: {str(error)[:_MAX_SHOWN]}; download it again"
        ) from error


def open_safetensors(file: Path) -> Any:
    """Return a reader of a safetensors file's tensors (`safe_open`); raise ModelError.

    Its library checks more of a header than `read_safetensors_header`: metadata, overlaps, gaps.
    """
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"can't read {file}: {str(error)[:_MAX_SHOWN]}; download it again") from error


def _stored_tensor(file: Path, name: str, entry: Any, origin: int, file_bytes: int) -> StoredTensor:
    if len(name) > _MAX_TENSOR_NAME_CHARS:
        raise ValueError(f"a tensor's name has {len(name)} characters")
    shape = tuple(int(size) for size in entry["shape"])
    start, stop = (int(offset) for offset in entry["data_offsets"])
    dtype = str(entry["dtype"])
    if not 0 <= start <= stop <= file_bytes - origin:
        raise ModelError(f"{file} ends before its tensor {name}; is the download complete?")
    if (stop - start) * 8 != prod(shape) * _bits_of(dtype):
        raise ModelError(f"{file}: the size of {name} contradicts its shape; download it again")
    return StoredTensor(name, file, dtype, shape, origin + start, stop - start, name)


def _bits_of(dtype: str) -> int:
    """Return the bits of an element: F32 -> 32, F8_E4M3 -> 8, I64 -> 64; raise ValueError."""
    if dtype in _BITS:
        return _BITS[dtype]
    digits = dtype[1:].split("_")[0]
    if dtype[:1] not in ("F", "I", "U") or not digits.isdigit():
        raise ValueError(f"unknown dtype {dtype}")
    return int(digits)
