"""The structures that Python and the C++ kernels exchange. The headers declare them, Python reads those.

Each class here is a ctypes mirror of the structure of its name. `LAYOUTS` has the compiler prove that both
sides place every field alike: it becomes layouts.h of every build, and part of the library's name.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

_NUMBERS = {
    "int": ctypes.c_int32,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
}
_STRUCTURE = re.compile(r"^struct (\w+) \{(.*?)^\};", re.DOTALL | re.MULTILINE)
_FIELDS = re.compile(r"^    (?:const )?(\w+)(\*?) ([\w*, ]+);", re.MULTILINE)


class Mirror(ctypes.Structure):
    """A structure of the kernels; its fields are those that its header declares."""


class BatchArgs(Mirror):
    """A step's sequences (plan.h)."""


class KVFormat(Mirror):
    """How rows of KV are stored (kv_format.h)."""


class WriteArgs(Mirror):
    """Rows of KV to write (kv_format.h)."""


class AttendArgs(Mirror):
    """Queries and the KV that they attend to (kv_rows.h)."""


class MergeArgs(Mirror):
    """Partial results of attention to merge (attention_merge.h)."""


class NormArgs(Mirror):
    """Rows to add and normalize (layers.h)."""


class RotateArgs(Mirror):
    """Queries and keys to normalize and rotate, and where KV goes (layers.h)."""


class GateArgs(Mirror):
    """Gates to apply (layers.h)."""


class Codes(Mirror):
    """How a packed weight is quantized (strips.h)."""


class Strips(Mirror):
    """A packed weight [n, k] and its bias (strips.h)."""


class CodeFields(Mirror):
    """Where blocks hold bits of codes (blocks.h)."""


class SpreadArgs(Mirror):
    """Fields of packed codes to take apart (blocks.h)."""


class PackCodesArgs(Mirror):
    """A quantized weight to pack (quantized.h)."""


class GatedWeights(Mirror):
    """The three weights of a gated MLP (mixture.h)."""


class PackArgs(Mirror):
    """A plain weight to pack (strips.h)."""


class CompressArgs(Mirror):
    """Weights to pack without loss into less memory (compressing.h)."""


class MultiplyArgs(Mirror):
    """One product (products.h)."""


class MixtureArgs(Mirror):
    """Rows for routed experts (mixture.h)."""


class LatentWeights(Mirror):
    """Weights that attention to latents has beside a layer's others (latent.h)."""


class LatentArgs(Mirror):
    """Shapes and places of latents (latent.h)."""


class Router(Mirror):
    """How a layer chooses experts (mixture.h)."""


class StateRows(Mirror):
    """Sequences of a step and their recurrent states (scan.h)."""


class RecurrentWeights(Mirror):
    """Weights of a recurrent layer beside its products (recurrent.h)."""


class LayerWeights(Mirror):
    """A decoder layer's weights (decoder_step.h)."""


class LowRankArgs(Mirror):
    """The weights that an adapter adds to one product (low_rank.h)."""


class AdapterLayerArgs(Mirror):
    """An adapter's products in one layer (low_rank.h)."""


class AdapterRowsArgs(Mirror):
    """The rows of a step that an adapter serves (low_rank.h)."""


class PageArgs(Mirror):
    """Places of the KV of layers with windows (decoder_step.h)."""


class StepArgs(Mirror):
    """A whole step (decoder_step.h)."""


class ScanArgs(Mirror):
    """Rows of linear attention (scan.h)."""


class SelectiveArgs(Mirror):
    """Rows of a selective scan (scan.h)."""


class ConvolveArgs(Mirror):
    """Rows of a short convolution (scan.h)."""


class SelectionArgs(Mirror):
    """Queries that choose tokens (selection.h)."""


def _read_fields() -> None:
    """Give every mirror its fields; one that holds another comes after it."""
    headers = "".join(path.read_text("utf-8") for path in sorted(Path(__file__).parent.glob("*.h")))
    declared = dict(_STRUCTURE.findall(headers))
    types: dict[str, Any] = {**_NUMBERS}
    for mirror in Mirror.__subclasses__():
        mirror._fields_ = [
            (name.strip("* "), ctypes.c_void_p if star or "*" in name else types[base])
            for base, star, names in _FIELDS.findall(declared[mirror.__name__])
            for name in names.split(",")
        ]
        types[mirror.__name__] = mirror


_read_fields()


def _layout_of(mirror: type[Mirror]) -> str:
    name = mirror.__name__
    fields = (
        f"offsetof({name}, {field[0]}) == {getattr(mirror, field[0]).offset}" for field in mirror._fields_
    )
    same = " && ".join([f"sizeof({name}) == {ctypes.sizeof(mirror)}", *fields])
    return f'static_assert({same}, "structures.py reads {name} otherwise");\n'


LAYOUTS = "".join(map(_layout_of, Mirror.__subclasses__()))
"""C++ that compiles only where sizes and offsets of all structures are those of the mirrors."""
