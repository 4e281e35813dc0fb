"""From a directory that PEFT wrote (adapter_config.json, adapter_model.safetensors) to an `Adapter`.

Whatever the directory holds, the result is an adapter that this model serves exactly, or an AdapterError
that names what isn't served. Nothing is read before its name, type and shape were compared with the
model's layers, so the file can't ask for more memory than `max_rank` allows.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stemma.errors import AdapterError, ModelError
from stemma.model.files.directory import StoredTensor, read_json, read_safetensors_header
from stemma.model.lora.adapter import Adapter, LinearShape, LowRankPair
from stemma.model.lora.config import AdapterConfig

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 1 << 24
_FORMAT = b"stemma adapter 1"
"""Version of the method by which adapters are named; changes with what is hashed, and how."""
_PREFIX = "base_model.model."
_LANGUAGE_MODEL = re.compile(r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?")
"""Where models that read images have the layers of the language model; elsewhere ``model.``."""
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WHOLE_VOCABULARY = ("lm_head", "embed_tokens")
"""Layers of which PEFT saves a copy beside the matrices of an adapter."""
_REFUSED = {
    "lora_embedding_": "embeddings of adapters aren't served",
    "lora_magnitude_vector": "DoRA isn't served",
    "modules_to_save": "modules saved whole (modules_to_save) aren't served",
    "bias": "biases of adapters aren't served",
}
"""Parts of tensor names that have a known reason."""
_EXPONENTS = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}
"""All bits of an exponent; NaN and infinity have them all."""


def read_adapter(
    path: Path,
    linears: Mapping[str, LinearShape],
    *,
    max_rank: int,
    within: Sequence[Path] | None = None,
) -> Adapter:
    """Return the adapter in `path` for a model with these `linears`. Any thread: no torch operation runs.

    `within`: directories that all its files must lie in, links resolved; None: anywhere. Raises AdapterError.
    """
    config, weights_file, stored = _read_headers(path, within)
    found = _pair_up(path, stored, linears)
    for name, (down, up) in found.items():
        _check_shapes(path, name, linears[name], down, up, max_rank)
    named = {name: down.name.removeprefix(_PREFIX).removesuffix(_DOWN) for name, (down, _) in found.items()}
    config.check_targets(dict.fromkeys(named.values()), path)
    ranks = {name: down.shape[0] for name, (down, _) in found.items()}
    scales = {name: config.scale(named[name], rank) for name, rank in ranks.items()}
    matrices = _read_matrices(weights_file, [tensor for pair in found.values() for tensor in pair])
    pairs: dict[str, LowRankPair] = {}
    digest = hashlib.sha256(_FORMAT)
    for name in sorted(found):
        raw = [matrices[tensor.name] for tensor in found[name]]
        _update(digest, name.encode(), struct.pack("<d", scales[name]))
        for tensor, data in zip(found[name], raw, strict=True):
            _update(digest, f"{tensor.dtype} {list(tensor.shape)}".encode(), data)
        plain = [_tensor(tensor, data) for tensor, data in zip(found[name], raw, strict=True)]
        pairs[name] = LowRankPair(plain[0], plain[1], scales[name])
    num_bytes = sum(pair.down.nbytes + pair.up.nbytes for pair in pairs.values())
    return Adapter(digest.hexdigest(), max(ranks.values()), pairs, num_bytes)


def check_adapter(path: Path, shapes: Mapping[str, LinearShape], *, max_rank: int) -> None:
    """Raise AdapterError if the adapter in `path` can't be served, as far as its headers tell.

    `shapes`: layers of the model whose shapes are known; others are compared when the adapter is read.
    """
    _, _, stored = _read_headers(path, None)
    named = {name.removeprefix(_PREFIX).removesuffix(_DOWN).removesuffix(_UP) for name in stored}
    unknown = LinearShape(0, 0)
    linears = {
        name: shapes.get(name, shapes.get(_LANGUAGE_MODEL.sub("model.", name), unknown)) for name in named
    }
    for name, (down, up) in _pair_up(path, stored, linears).items():
        if linears[name] is not unknown:
            _check_shapes(path, name, linears[name], down, up, max_rank)


def _read_headers(
    path: Path, within: Sequence[Path] | None
) -> tuple[AdapterConfig, Path, dict[str, StoredTensor]]:
    """Return an adapter's config, the file of its tensors, and these by name. Raises AdapterError."""
    config_file, weights_file = (_plain_file(path, name, within) for name in (CONFIG, WEIGHTS))
    if config_file.stat().st_size > MAX_CONFIG_BYTES:
        raise AdapterError(f"{config_file} has more than {MAX_CONFIG_BYTES} bytes: it is no adapter's config")
    try:
        config = AdapterConfig.of(read_json(config_file), path)
        stored = read_safetensors_header(weights_file, MAX_HEADER_BYTES)
    except AdapterError:
        raise
    except ModelError as error:
        raise AdapterError(str(error)) from error
    return config, weights_file, {tensor.name: tensor for tensor in stored}


def _plain_file(path: Path, name: str, within: Sequence[Path] | None) -> Path:
    """Return the resolved path of a plain file in `path`. Raises AdapterError."""
    try:
        file = (path / name).resolve(strict=True)
        is_file = file.is_file()
        allowed = within is None or any(file.is_relative_to(folder.resolve()) for folder in within)
    except (OSError, RuntimeError, ValueError) as error:
        raise AdapterError(f"{path} holds no adapter: {_lacking(path, name)}") from error
    if not allowed:
        raise AdapterError(f"{path / name} leads out of the directories that adapters may be loaded from")
    if not is_file:
        raise AdapterError(f"{path / name} isn't a plain file")
    return file


def _lacking(path: Path, name: str) -> str:
    try:
        if name == WEIGHTS and (path / "adapter_model.bin").exists():
            return (
                "its weights are in adapter_model.bin, which can run code when it is read; save it with "
                "safe_serialization=True"
            )
    except (OSError, ValueError):
        pass
    return f"it has no {name}"


def _pair_up(
    path: Path, stored: Mapping[str, StoredTensor], linears: Mapping[str, LinearShape]
) -> dict[str, tuple[StoredTensor, StoredTensor]]:
    """Return the two tensors of every layer that the file has any for. Raises AdapterError."""
    halves: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        target = next((each for each in _WHOLE_VOCABULARY if f".{each}." in name), None)
        if target is not None:
            raise AdapterError(
                f"{path} adapts {target}: adapters of embeddings and of the output head aren't served. "
                f"Train it without {target} among its target_modules. {served(linears)}"
            )
        suffix = next((each for each in (_DOWN, _UP) if name.endswith(each)), None)
        reason = next((why for part, why in _REFUSED.items() if part in name), None)
        if suffix is None or not name.startswith(_PREFIX) or reason is not None:
            raise AdapterError(
                f"{path}: tensor {name[:200]} isn't served ({reason or 'no LoRA matrix as PEFT names it'}). "
                f"{served(linears)}"
            )
        layer = name.removeprefix(_PREFIX).removesuffix(suffix)
        if layer not in linears:
            layer = _LANGUAGE_MODEL.sub("model.", layer)
        if layer not in linears:
            raise AdapterError(f"{path} adapts {layer[:200]}, which isn't served. {served(linears)}")
        halves.setdefault(layer, {})[suffix] = tensor
    if not halves:
        raise AdapterError(f"{path / WEIGHTS} has no tensors")
    for layer, half in halves.items():
        if len(half) != 2:
            lacking = "lora_B" if _DOWN in half else "lora_A"
            raise AdapterError(f"{path}: {layer} has no {lacking}; is the file complete?")
    return {layer: (half[_DOWN], half[_UP]) for layer, half in halves.items()}


def served(linears: Iterable[str]) -> str:
    """Return a sentence that says which layers of the model can be adapted."""
    kinds = sorted({name.rsplit(".", 1)[-1] for name in linears})
    if not kinds:
        return "This model serves no adapters"
    return f"Adapters of this model may touch {', '.join(kinds)} of its decoder layers (LoRA alone)"


def _check_shapes(
    path: Path, name: str, linear: LinearShape, down: StoredTensor, up: StoredTensor, max_rank: int
) -> None:
    for tensor in (down, up):
        if tensor.dtype not in _DTYPES:
            raise AdapterError(f"{path}: {tensor.name} is {tensor.dtype}; adapters are F32, F16 or BF16")
    rank = down.shape[0] if len(down.shape) == 2 else 0
    if rank < 1 or down.shape != (rank, linear.in_features) or up.shape != (linear.out_features, rank):
        raise AdapterError(
            f"{path}: the matrices of {name} are {list(down.shape)} and {list(up.shape)}, but the layer is "
            f"[{linear.out_features}, {linear.in_features}]; was the adapter trained for another model?"
        )
    if rank > max_rank:
        raise AdapterError(f"{path} has rank {rank} at {name}; this server takes {max_rank} (max_lora_rank)")


def _read_matrices(file: Path, tensors: Iterable[StoredTensor]) -> dict[str, bytearray]:
    """Return the bytes of tensors. Read, not mapped: a file cut short meanwhile would end the process."""
    matrices: dict[str, bytearray] = {}
    try:
        with file.open("rb", buffering=0) as stream:
            for tensor in tensors:
                data = bytearray().join(_pieces(stream.fileno(), tensor))
                if len(data) != tensor.num_bytes:
                    raise AdapterError(f"{file} ends within {tensor.name}; is the file complete?")
                matrices[tensor.name] = data
    except OSError as error:
        raise AdapterError(f"can't read {file}: {error}") from error
    return matrices


def _pieces(descriptor: int, tensor: StoredTensor) -> Iterator[bytes]:
    at, end = tensor.start, tensor.start + tensor.num_bytes
    while at < end and (piece := os.pread(descriptor, end - at, at)):
        at += len(piece)
        yield piece


def _tensor(stored: StoredTensor, data: bytearray) -> torch.Tensor:
    dtype = _DTYPES[stored.dtype]
    bits: npt.NDArray[Any] = np.frombuffer(data, dtype=np.uint32 if dtype.itemsize == 4 else np.uint16)
    exponent = _EXPONENTS[stored.dtype]
    if ((bits & exponent) == exponent).any():
        raise AdapterError(f"{stored.name} of {stored.file.parent} has values that are NaN or infinite")
    return torch.frombuffer(data, dtype=dtype).view(stored.shape)


def _update(digest: Any, *fields: bytes | bytearray) -> None:
    for each in fields:
        digest.update(struct.pack("<Q", len(each)))
        digest.update(each)
