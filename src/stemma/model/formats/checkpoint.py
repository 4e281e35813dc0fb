"""Tensors of a checkpoint directory, read one at a time, and what a reader makes of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stemma.errors import ModelError
from stemma.model.files.directory import StoredTensor, open_safetensors, stored_tensors
from stemma.model.formats.summary import FormatCounts
from stemma.model.weights.fields import Codes
from stemma.model.weights.quantized import ActivationScheme, QuantizedWeight
from stemma.model.weights.stored import CodedFloats, DeferredWeight, StoredWeights

_PLAIN_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Activations:
    """Rounding of a product's inputs, with its numbers (`QuantizedWeight`)."""

    scheme: ActivationScheme
    scale: float | None = None
    zero_point: int = 0


UNQUANTIZED = Activations(ActivationScheme.NONE)
PER_TOKEN = Activations(ActivationScheme.DYNAMIC_TOKEN)


def static_activations(tensors: CheckpointTensors, scale: str, zero_point: str | None) -> Activations:
    """Return the static scheme with scale and zero point of the tensors of these names, one number each."""
    values = [tensors.read(scale).float().reshape(-1)]
    if zero_point is not None and zero_point in tensors:
        values.append(tensors.read(zero_point).float().reshape(-1))
    if any(value.numel() != 1 or not bool(torch.isfinite(value).all()) for value in values):
        file = tensors.stored[scale].file
        raise ModelError(f"{file}: {scale} and its zero point must be one finite number each")
    zero = round(float(values[1])) if len(values) == 2 else 0
    return Activations(ActivationScheme.STATIC_TENSOR, float(values[0]), zero)


class CheckpointTensors:
    """The tensors of all weight files in a directory. Raises ModelError if a file is damaged."""

    def __init__(self, path: Path, prefix: str = "") -> None:
        """Take those whose names begin with `prefix`."""
        self.path = path
        self.stored: dict[str, StoredTensor] = {
            tensor.name: tensor for tensor in stored_tensors(path) if tensor.name.startswith(prefix)
        }
        self._files: dict[Path, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.stored

    def read(self, name: str, dtypes: Sequence[torch.dtype] = ()) -> torch.Tensor:
        """Return a tensor; raise ModelError if it is missing or of none of `dtypes`."""
        file, stored_name = self._file_of(name)
        tensor: torch.Tensor = file.get_tensor(stored_name)
        if dtypes and tensor.dtype not in dtypes:
            allowed = " or ".join(str(dtype) for dtype in dtypes)
            raise ModelError(f"{self.path}: {name} is {tensor.dtype}, must be {allowed}")
        return tensor

    def shape(self, name: str, num_dims: int) -> tuple[int, ...]:
        """Return a tensor's shape, of which nothing is read; raise ModelError if it has other dims."""
        shape = self._stored(name).shape
        if len(shape) != num_dims or 0 in shape:
            raise ModelError(f"{self.path}: {name} is {list(shape)}, must have {num_dims} dims")
        return shape

    def read_part(self, name: str, number: int) -> torch.Tensor:
        """Return one of what a tensor stacks; the rest isn't read. Raises ModelError as `read`."""
        file, stored_name = self._file_of(name)
        part: torch.Tensor = file.get_slice(stored_name)[number]
        return part

    def read_floats(self, name: str) -> torch.Tensor:
        """Return a tensor of floats as float32; raise ModelError if one is NaN or infinite."""
        values = self.read(name, _FLOATS).float()
        self.check_finite(name, values)
        return values

    def _stored(self, name: str) -> StoredTensor:
        if name not in self.stored:
            raise ModelError(f"{self.path} has no {name}, which its quantized weight needs; is it complete?")
        return self.stored[name]

    def _file_of(self, name: str) -> tuple[Any, str]:
        """Return the opened file of a tensor, and its name there."""
        stored = self._stored(name)
        if stored.file not in self._files:
            self._files[stored.file] = open_safetensors(stored.file)
        return self._files[stored.file], stored.stored_name

    def check_finite(self, name: str, values: torch.Tensor) -> None:
        """Raise ModelError, naming the file, if a number of the tensor `name` is NaN or infinite."""
        # A sum reads at memory speed; the slow look is for sums that overflow.
        if not torch.isfinite(values.sum()) and not torch.isfinite(values).all():
            raise ModelError(
                f"{self.stored[name].file}: {name} has values that are NaN or infinite; download or convert "
                "the file again"
            )

    def read_shape(self, name: str, shape: Sequence[int], dtypes: Sequence[torch.dtype]) -> torch.Tensor:
        """Return a tensor of exactly this shape."""
        tensor = self.read(name, dtypes)
        if tuple(tensor.shape) != tuple(shape):
            raise ModelError(f"{self.path}: {name} is {list(tensor.shape)}, must be {list(shape)}")
        return tensor

    def stems(self, suffix: str) -> Iterator[str]:
        """Yield the names of modules that have a tensor of this last name, in order of names."""
        for name in self.stored:
            if name.endswith(suffix):
                yield name.removesuffix(suffix)


class ReadWeights:
    """Collects the weights of a checkpoint under transformers' names; what was taken is not copied again."""

    def __init__(self, tensors: CheckpointTensors, dtype: torch.dtype) -> None:
        self.tensors = tensors
        self.weights: dict[str, torch.Tensor | DeferredWeight | CodedFloats] = {}
        self.dtype = dtype
        self._taken: set[str] = set()
        self._kept: Counter[str] = Counter()
        self._widened: Counter[str] = Counter()

    def take(self, *names: str) -> None:
        """Mark tensors as used, or as not needed."""
        self._taken.update(names)

    def add(self, name: str, make: Callable[[], QuantizedWeight], label: str) -> None:
        """Add the quantized weight that `make` returns; `label` names its format for people.

        It is made once now, so that what doesn't fit is refused here, and again whenever it is looked up.
        """
        self.add_checked(name, make().shape, make, label)

    def add_checked(
        self, name: str, shape: torch.Size, make: Callable[[], QuantizedWeight], label: str
    ) -> None:
        """Add a quantized weight that isn't made before it is looked up: then what doesn't fit is refused."""
        self.weights[name] = DeferredWeight(shape, make)
        self._kept[label] += 1

    def add_plain(self, name: str, weight: torch.Tensor, label: str) -> None:
        """Add a weight that was dequantized."""
        self.weights[name] = weight.to(self.dtype)
        self._widened[label] += 1

    def add_floats(self, name: str, weight: CodedFloats, label: str) -> None:
        """Add a weight in FP8; kept as codes unless another than E4M3's, or several in one, are its."""
        if weight.codes.dtype == torch.float8_e4m3fn and weight.codes.dim() == 2:
            self.weights[name] = weight
            self._widened[label] += 1
        else:
            self.add_plain(name, weight.plain(), label)

    def finish(self) -> tuple[StoredWeights, FormatCounts]:
        """Add all tensors that nothing has taken, as they are; return all weights.

        Raises ModelError if one is a weight of integers or FP8, which mean nothing without scales.
        """
        for name, tensor in self.tensors.stored.items():
            if name in self._taken or name in self.weights:
                continue
            if name.endswith("weight") and tensor.dtype not in _PLAIN_DTYPES:
                raise ModelError(
                    f"{self.tensors.path}: {name} is {tensor.dtype}, but nothing says how it is quantized; "
                    "take "
                    "the checkpoint's files from where it comes from"
                )
            self.weights[name] = self.tensors.read(name)
        return StoredWeights(self.weights), FormatCounts(dict(self._kept), dict(self._widened))


def make_weight(
    where: str,
    codes: Codes,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    bits: int,
    activations: Activations = UNQUANTIZED,
) -> QuantizedWeight:
    """Make a weight of codes [outputs, inputs] and scales of a tensor, of outputs, or of their groups.

    `where` names it in messages. Codes of fewer bits than 4 are held in 4, others in 8. Raises ModelError if
    shapes don't fit together.
    """
    if len(codes.shape) != 2 or 0 in codes.shape:
        raise ModelError(f"{where} has codes {list(codes.shape)}, must be [outputs, inputs]")
    outputs, inputs = codes.shape
    scales = _per_group(where, scales.float(), outputs, inputs)
    if zero_points is not None:
        zero_points = _per_group(where, zero_points, outputs, inputs)
        if zero_points.shape != scales.shape:
            raise ModelError(
                f"{where} has zero points {list(zero_points.shape)} for scales {list(scales.shape)}"
            )
        if not bool(zero_points.any()):
            zero_points = None
    if zero_points is not None:
        low, high = (-8, 7) if bits <= 4 else (-128, 127)
        if int(zero_points.min()) < low or int(zero_points.max()) > high:
            raise ModelError(f"{where} has zero points outside {low}..{high}")
        zero_points = zero_points.to(torch.int8).contiguous()
    try:
        return QuantizedWeight(
            codes=codes.to(torch.int8).contiguous() if isinstance(codes, torch.Tensor) else codes,
            scales=scales.contiguous(),
            zero_points=zero_points,
            bits=4 if bits <= 4 else 8,
            group_size=inputs // scales.shape[1],
            activations=activations.scheme,
            activation_scale=activations.scale,
            activation_zero_point=activations.zero_point,
        )
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from error


def _per_group(where: str, values: torch.Tensor, outputs: int, inputs: int) -> torch.Tensor:
    """Return values [outputs, groups] of one number, one an output, or all of them."""
    if values.numel() == 1:
        return values.reshape(1, 1).expand(outputs, 1)
    if values.dim() == 1:
        values = values[:, None]
    if values.dim() != 2 or values.shape[0] != outputs or inputs % max(1, values.shape[1]):
        raise ModelError(f"{where} [{outputs}, {inputs}] has scales or zero points {list(values.shape)}")
    return values
