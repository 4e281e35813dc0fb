"""What blocks kept packed bring and cost: `python -m benchmarks.packed_kv [MODEL ...] [--json FILE]`.

KV of real text (this repository's documentation) of each model (default: demo). Bytes packed over whole,
bytes a second and core of packing and unpacking, zstd beside (if `zstandard` is there: its time is that of
the exponents alone); then the time to the first token of a prompt that lies on disk (cold and in the page
cache) or on the host, packed and whole taking turns, medians. Run it on a quiet machine. With
`--kv int8,fp8,float32` instead: the entropy of such KV, which is kept as it is, by byte of a row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.tiers import drop_pages, serve
from stemma.engine.build import EngineParts, build_engine
from stemma.engine.llm import engine_settings
from stemma.memory.device.block_codec import BlockCodec, expand
from stemma.memory.device.layout import DTYPE_BYTES, KVLayout
from stemma.types import TokenArray

_ROUNDS = 7
_DRAIN_S = 120.0
_BLOCK = 64
_PROMPT = 2048
"""Tokens of a prompt whose entropy is measured: attention to long ones takes long."""
Blocks = list[npt.NDArray[np.uint8]]


def documentation(num_characters: int) -> str:
    """Return that much of this repository's documentation."""
    pages = sorted((Path(__file__).parents[1] / "docs").rglob("*.md"))
    return "\n\n".join(page.read_text() for page in pages)[:num_characters]


def opened(path: str, packs: bool, **tiers: Any) -> EngineParts:
    """Open a model with tiers below the device."""
    packing = "on" if packs else "off"
    return build_engine(engine_settings(path, load_when="always", tier_compression=packing, **tiers))


def blocks_of(parts: EngineParts) -> Blocks:
    """Return blocks that the one lower tier holds, whole."""
    assert parts.tiers is not None
    (store,) = parts.tiers.stores
    found = [np.empty(store.block_bytes, np.uint8) for _ in range(store.num_blocks or 0)]
    store.get_many([one.key for one in store.newest(len(found))], [block.data for block in found])
    return found


def best_s(work: Callable[[], object]) -> float:
    """Return the shortest time of some rounds."""
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def measure_codec(codec: BlockCodec, blocks: Blocks) -> dict[str, float]:
    """Bytes, and bytes a second of one core."""
    total = sum(block.nbytes for block in blocks)
    packed = [bytes(codec.pack(block.data) or block.data) for block in blocks]
    buffers = [np.zeros(block.nbytes, np.uint8) for block in blocks]

    def unpack_all() -> None:
        for buffer, value in zip(buffers, packed, strict=True):
            buffer[: len(value)] = np.frombuffer(value, np.uint8)
            assert len(value) == buffer.nbytes or expand(buffer.data, len(value))

    rows = {
        "bytes packed / whole": sum(map(len, packed)) / total,
        "pack, GB/s": total / best_s(lambda: [codec.pack(block.data) for block in blocks]) / 1e9,
        "unpack, GB/s of what comes out": total / best_s(unpack_all) / 1e9,
    }
    assert all(map(np.array_equal, buffers, blocks))
    with suppress(ImportError):
        rows |= measure_zstd(blocks)
    return rows


def measure_zstd(blocks: Blocks) -> dict[str, float]:
    """The exponents through a library."""
    import zstandard

    exponents = [(block.view("<u2") >> 7).astype(np.uint8).tobytes() for block in blocks]
    total = sum(block.nbytes for block in blocks)
    packer, unpacker = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    packed = [packer.compress(one) for one in exponents]
    pack_s = best_s(lambda: [packer.compress(one) for one in exponents])
    unpack_s = best_s(lambda: [unpacker.decompress(one) for one in packed])
    return {
        "zstd: bytes packed / whole": (sum(map(len, packed)) + total / 2) / total,
        "zstd: pack, GB/s": total / pack_s / 1e9,
        "zstd: unpack, GB/s": total / unpack_s / 1e9,
    }


def entropy(layout: KVLayout, blocks: Blocks) -> dict[str, float]:
    """Return bits over bits stored: of a row's bytes, each by itself, and of some of them."""
    shape = (len(blocks), layout.num_layers * layout.num_parts, layout.block_size, layout.row_bytes)
    rows = np.stack(blocks).reshape(shape).transpose(1, 3, 0, 2).reshape(shape[1] * shape[3], -1)
    counts = np.zeros((len(rows), 256), np.int64)
    for row, count in zip(rows, counts, strict=True):
        count += np.bincount(row, minlength=256)
    shares = counts / rows.shape[1]
    bits = -(shares * np.log2(np.where(shares, shares, 1.0))).sum(axis=1) / 8
    bits = bits.reshape(shape[1], shape[3])
    found = {"tokens of it": float(rows.shape[1]), "entropy by byte of a row / whole": float(bits.mean())}
    numbers = layout.scale_offset
    if layout.stored != "plain":
        return found | {
            "of the codes": float(bits[:, :numbers].mean()),
            "of the scales": float(bits[:, numbers:].mean()),
        }
    width = DTYPE_BYTES[layout.dtype]
    return found | {f"of byte {n}": float(bits[:, n::width].mean()) for n in range(width)}


def measure_hits(path: str, tokens: TokenArray, folder: Path) -> dict[str, float]:
    """Return packed over whole of the time to the first token, by where the prompt lies."""
    rows = {}
    for place in ("disk, cold", "disk, page cache", "host"):
        engines = {
            packs: opened(path, packs, **tiers_of(place, folder / f"{place} {packs}"))
            for packs in (True, False)
        }
        times: dict[bool, list[float]] = {packs: [] for packs in engines}
        for number in range(_ROUNDS + 1):
            for packs, parts in engines.items():
                assert parts.tiers is not None
                parts.engine.cache.evict_all()
                parts.tiers.drain(_DRAIN_S)
                if number == 1:
                    time.sleep(1.0)  # the host packs beside all else
                if place == "disk, cold":
                    drop_pages(list(folder.rglob("slab-*")))
                first_s, _ = serve(parts, tokens, 1)
                if number:
                    times[packs].append(first_s)
        for parts in engines.values():
            parts.engine.close()
        packed_s, whole_s = statistics.median(times[True]), statistics.median(times[False])
        rows[f"{place}: first token, packed ms"] = 1e3 * packed_s
        rows[f"{place}: first token, packed / whole"] = packed_s / whole_s
    return rows


def tiers_of(place: str, folder: Path) -> dict[str, Any]:
    """Return the settings of one lower tier."""
    if place == "host":
        return {"host_cache": "1GB"}
    return {"disk_cache": folder, "disk_cache_size": "4GB"}


def measure(path: str, text: str, folder: Path) -> dict[str, float]:
    """Measure one model."""
    parts = opened(path, True, **tiers_of("disk", folder / "first"))
    tokens = np.array(parts.tokenizer.encode(text), np.int32)
    serve(parts, tokens, 1)
    assert parts.tiers is not None
    parts.tiers.drain(_DRAIN_S)
    codec = parts.device.codec
    rows = {"tokens": float(len(tokens))}
    rows |= measure_codec(codec, blocks_of(parts)) if codec is not None else {}
    parts.engine.close()
    return rows | measure_hits(path, tokens, folder)


def measure_entropy(path: str, text: str, folder: Path, kind: str) -> dict[str, float]:
    """Measure KV of one kind."""
    dtypes = {"dtype": "float32"} if kind == "float32" else {"kv_cache_dtype": kind}
    parts = opened(path, False, free_windows=False, **dtypes, **tiers_of("disk", folder))
    tokens = np.array(parts.tokenizer.encode(text), np.int32)
    for begin in range(0, len(tokens) - _PROMPT + 1, _PROMPT):
        serve(parts, tokens[begin : begin + _PROMPT], 1)
    assert parts.tiers is not None
    parts.tiers.drain(_DRAIN_S)
    layout = parts.model.kept.layout(_BLOCK, "auto" if kind == "float32" else kind)  # type: ignore[arg-type]
    rows = entropy(layout, blocks_of(parts))
    parts.engine.close()
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["demo"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kv", help="entropy of KV of these kinds, instead of all else: int8,fp8,float32")
    parser.add_argument("--characters", type=int, default=24_000)
    asked = parser.parse_args()
    text, found = documentation(asked.characters), {}
    for path in asked.models:
        for kind in asked.kv.split(",") if asked.kv else [""]:
            with tempfile.TemporaryDirectory() as folder:
                if kind:
                    rows = measure_entropy(path, text, Path(folder), kind)
                else:
                    rows = measure(path, text, Path(folder))
            found[f"{Path(path).name} {kind}"] = rows
            for name, value in rows.items():
                print(f"{Path(path).name:>24} {kind:8} {name:44} {value:10.3f}", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
