"""Headers of GGUF files that lie: each is refused with an error that names the file, or loads.

Fields, types, counts, dimensions, offsets and names of small real files are changed one to three at a time.
Nothing may take long or much memory: a limit is set on the address space meanwhile.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from stemma.errors import StemmaError
from stemma.model.files import gguf_header
from tests import gguf_files
from tests.gguf_bytes import ARRAY, FORMATS, STRING, Array, Entry, Parts, Value, join, split
from tests.model.hostile import refusals

FAMILIES = ("llama", "qwen3-moe", "gemma2")
CHANGED = ("qwen3-next", "qwen3.5", "granite", "lfm2", "gpt-oss")
"""Families whose tensors are put in another order, joined or changed."""
WHOLE = st.sampled_from(
    [0, 1, 2, 3, 7, 64, 255, 4097, 65_536, 10**6, 10**9, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**64 - 1]
)
RANGES = {"B": (0, 255), "b": (-128, 127), "H": (0, 2**16 - 1), "h": (-(2**15), 2**15 - 1)}
RANGES |= {"I": (0, 2**32 - 1), "i": (-(2**31), 2**31 - 1), "Q": (0, 2**64 - 1), "q": (-(2**63), 2**63 - 1)}
FLOATS = (0.0, -1.0, 1e-30, 1.0, 1e30, math.inf, -math.inf, math.nan)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Parts]:
    folder = tmp_path_factory.mktemp("hostile")
    built = {family: gguf_files.build(family, folder / family) for family in (*FAMILIES, *CHANGED)}
    return {family: split(file.path.read_bytes()) for family, file in built.items()}


def check(path: Path, content: bytes) -> list[StemmaError]:
    """Write and use a file; what is refused is said in a few words that name the file."""
    path.write_bytes(content)
    refused = refusals(path)
    for error in refused:
        is_of_weights = str(error).startswith(("weight ", "Gemma2ForCausalLM computes"))
        assert is_of_weights or str(path) in str(error), error
    return refused


@st.composite
def scalars(draw: st.DrawFn) -> Value:
    kind = draw(st.sampled_from([*FORMATS, STRING]))
    if kind == STRING:
        text = st.sampled_from([b"", b"a", b"\xff\xfe", b"llama", b"none", b"linear", b"x" * 100_000])
        return Value(kind, draw(text))
    code = FORMATS[kind]
    if code in "fd":
        return Value(kind, draw(st.sampled_from(FLOATS)))
    if code == "?":
        return Value(kind, draw(st.booleans()))
    low, high = RANGES[code]
    return Value(kind, min(max(draw(WHOLE | WHOLE.map(lambda number: -number)), low), high))


@st.composite
def values(draw: st.DrawFn, before: Value) -> Value:
    """Another value of a field, of its type or of another one."""
    way = draw(st.sampled_from(["scalar", "number", "elements", "count", "length", "nested"]))
    if way == "number" and before.kind in FORMATS and FORMATS[before.kind] in RANGES:
        low, high = RANGES[FORMATS[before.kind]]
        return replace(before, value=min(max(draw(WHOLE), low), high))
    if way == "length" and before.kind == STRING:
        return replace(before, length=draw(WHOLE))
    if isinstance(before.value, Array):
        array = before.value
        if way == "count":
            return replace(before, value=replace(array, count=draw(WHOLE)))
        if way == "elements" and array.values:
            at, width = draw(st.integers(0, len(array.values) - 1)), draw(st.integers(0, 3))
            filled = draw(st.sampled_from([(), array.values[:1], array.values[-1:] * 3]))
            changed = (*array.values[:at], *filled, *array.values[at + width :])
            return replace(before, value=replace(array, values=changed))
        if way == "nested":
            return Value(ARRAY, Array(ARRAY, (before,) * draw(st.integers(0, 3))))
    scalar = draw(scalars())
    return draw(st.sampled_from([scalar, Value(ARRAY, Array(scalar.kind, (scalar.value,) * 3))]))


@st.composite
def entries(draw: st.DrawFn, before: Entry, others: tuple[Entry, ...]) -> Entry:
    """Another tensor than a header has."""
    way = draw(st.sampled_from(["dimensions", "kind", "offset", "name", "as another", "count"]))
    if way == "dimensions":
        sizes = st.sampled_from([*before.dimensions, 0, 1, 3, 32, 2**31, 2**32, 2**63, 2**64 - 1])
        return replace(before, dimensions=tuple(draw(st.lists(sizes, max_size=5))))
    if way == "kind":
        return replace(before, kind=draw(st.integers(0, 45) | st.just(2**32 - 1)))
    if way == "offset":
        own = st.sampled_from([each.offset for each in others])
        return replace(before, offset=draw(own | WHOLE))
    if way == "count":
        return replace(before, num_dimensions=draw(st.sampled_from([0, 1, 4, 5, 10**9, 2**32 - 1])))
    other = draw(st.sampled_from(others))
    if way == "as another":
        return replace(other, name=before.name)
    odd = [
        *(each.name for each in others),
        b"",
        b"\xff",
        b"blk.1",
        b"blk.999999999.attn_q.weight",
        "blk.٣.attn_q.weight".encode(),
    ]
    odd += [b"blk." + b"9" * 5000 + b".attn_q.weight", b"output.weight", b"rope_freqs.weight", b"x" * 60_000]
    return replace(before, name=draw(st.sampled_from(odd)))


@st.composite
def lies(draw: st.DrawFn, true: Parts) -> Parts:
    """A file's parts with one to three of them changed."""
    parts = true
    for _ in range(draw(st.integers(1, 3))):
        way = draw(st.sampled_from(["field"] * 4 + ["entry"] * 4 + ["lists", "count", "data"]))
        at = draw(st.integers(0, len(parts.fields) - 1))
        which = draw(st.integers(0, len(parts.entries) - 1))
        told = way
        if way == "field":
            name, before = parts.fields[at]
            value = draw(values(before))
            told = f"{name.decode()} = {repr(value)[:100]}"
            parts = replace(parts, fields=(*parts.fields[:at], (name, value), *parts.fields[at + 1 :]))
        elif way == "entry":
            entry = draw(entries(parts.entries[which], true.entries))
            told = f"{parts.entries[which]} -> {repr(entry)[:200]}"
            parts = replace(parts, entries=(*parts.entries[:which], entry, *parts.entries[which + 1 :]))
        elif way == "lists":
            parts = draw(
                st.sampled_from(
                    [
                        replace(parts, fields=parts.fields[:at] + parts.fields[at + 1 :]),
                        replace(parts, fields=(*parts.fields, parts.fields[at])),
                        replace(parts, entries=parts.entries[:which] + parts.entries[which + 1 :]),
                        replace(parts, entries=(*parts.entries, parts.entries[which])),
                    ]
                )
            )
            if not parts.fields or not parts.entries:
                return parts
        elif way == "count":
            counts = draw(WHOLE | st.just(len(parts.fields) + 1))
            parts = draw(
                st.sampled_from([replace(parts, num_fields=counts), replace(parts, num_entries=counts)])
            )
        else:
            parts = replace(parts, data=parts.data[: draw(st.integers(0, len(parts.data)))])
        parts = replace(parts, changes=(*parts.changes, told))
    return parts


def with_entry(parts: Parts, entry: str, **changes: Any) -> Parts:
    """Return it with a tensor that its header describes otherwise."""
    return replace(
        parts,
        entries=tuple(replace(e, **changes) if e.name == entry.encode() else e for e in parts.entries),
    )


def count(number: int) -> Value:
    return Value(4, number)


@pytest.mark.parametrize("number", [10**9, 2**31 - 1])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("key", ["block_count", "expert_count", "expert_used_count", "context_length"])
def test_absurd_counts(family: str, key: str, number: int, files: dict[str, Parts], tmp_path: Path) -> None:
    architecture = gguf_files.ARCHITECTURES[family]
    content = join(files[family].with_field(f"{architecture}.{key}", count(number)))
    refused = check(tmp_path / "model.gguf", content)
    assert bool(refused) == (key in ("block_count", "expert_count") or ("used" in key and "moe" in family))


LIES = {
    "tokenizer.ggml.tokens is 3, must be an array": lambda p: p.with_field("tokenizer.ggml.tokens", count(3)),
    "an array of type 9": lambda p: p.with_field("a", Value(ARRAY, Array(ARRAY, ()))),
    "eos_token_id is -1": lambda p: p.with_field("tokenizer.ggml.eos_token_id", Value(5, -1)),
    "elements of an array": lambda p: p.with_field("a", Value(ARRAY, Array(0, (), 2**62))),
    "bytes of a name": lambda p: p.with_field("a", Value(STRING, b"", 2**64 - 1)),
    "must have 2 dimensions": lambda p: with_entry(p, "token_embd.weight", dimensions=(32_768,)),
    "overlap": lambda p: with_entry(p, "blk.1.attn_q.weight", offset=p.entries[0].offset),
    "is there twice": lambda p: replace(p, fields=(*p.fields, p.fields[-1])),
    "tensor blk.1.attn_v.weight is there twice": lambda p: replace(p, entries=(*p.entries, p.entries[-1])),
    "counts 2 layers, its tensors make 3": lambda p: with_entry(
        p, "blk.1.attn_norm.weight", name=b"blk.999999999.attn_norm.weight"
    ),
    "counts 1000000000000 tensors": lambda p: replace(p, num_entries=10**12),
    "counts 1000000000000 metadata": lambda p: replace(p, num_fields=10**12),
    "says that it is one of 'zzz": lambda p: p.with_field("split.count", Value(STRING, b"z" * 10_000)),
    "the architecture 'zzz": lambda p: p.with_field("general.architecture", Value(STRING, b"z" * 10_000)),
}


@pytest.mark.parametrize("told", LIES)
def test_each_lie_is_named(told: str, files: dict[str, Parts], tmp_path: Path) -> None:
    refused = check(tmp_path / "model.gguf", join(LIES[told](files["llama"])))
    assert any(told in str(error) for error in refused), refused


def test_arrays_have_a_limit_together(
    files: dict[str, Parts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_header, "MAX_ELEMENTS", 600)
    refused = check(tmp_path / "model.gguf", join(files["llama"]))
    assert all("elements of arrays, more than 600" in str(error) for error in refused)
    assert len(refused) == 3


def test_metadata_have_a_limit(
    files: dict[str, Parts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_header, "MAX_METADATA_BYTES", 1000)
    refused = check(tmp_path / "model.gguf", join(files["llama"]))
    assert all("metadata take more than 1000 bytes" in str(error) for error in refused)
    assert len(refused) == 3


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("family", [*FAMILIES, *CHANGED])
def test_what_lies_is_refused_by_name_or_loads(
    family: str, files: dict[str, Parts], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("lies") / "model.gguf"

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(parts=lies(files[family]))
    def run(parts: Parts) -> None:
        note(str(parts.changes))
        check(path, join(parts))

    run()


def test_the_file_itself_loads(files: dict[str, Parts], tmp_path: Path) -> None:
    for family, parts in files.items():
        assert check(tmp_path / f"{family}.gguf", join(parts)) == []
