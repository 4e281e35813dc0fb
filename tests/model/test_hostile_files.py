"""JSON of a checkpoint, and headers of safetensors, with wrong values anywhere: refused, or harmless."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from stemma.model.text.tokenizer import Tokenizer
from tests import checkpoints
from tests.model.hostile import refusals

Place: TypeAlias = tuple[Any, ...]
"""Keys and indexes from a document's top to a value."""
FILES = {
    "tokenizer.json": ("tokenizer",),
    "tokenizer_config.json": ("tokenizer",),
    "generation_config.json": ("load",),
    "model.safetensors.index.json": ("load", "fingerprint"),
    "model-1.safetensors": ("load", "fingerprint"),
}
"""Names, and what reads them."""
ODD: list[Any] = [None, True, False, 0, -1, 1, 3, 511, 10**9, 2**31, 2**63, 2**64, 10**40, 0.5, -1e308]
ODD += ["", "a", "F32", "BPE", "<|im_end|>", "\0", "ü" * 3, "../../etc/passwd", "x" * 100_000, "{{ 1 / 0 }}"]
ODD += ["{% for i in range(10**9) %}{% endfor %}", [], [1], ["a"], [[]], [0, 2**63], {}, {"a": 1}, {"": []}]
EXAMPLES = dict.fromkeys(FILES, 50) | {"tokenizer.json": 200}


def places(document: Any, at: Place = ()) -> list[Place]:
    """Return where values stand; of long lists and objects the first and last."""
    found = [at] if at else []
    parts = list(document.items() if isinstance(document, dict) else enumerate(document))
    for key, value in parts if len(parts) < 60 else parts[:20] + parts[-5:]:
        if isinstance(value, dict | list):
            found += places(value, (*at, key))
        else:
            found.append((*at, key))
    return found


def changed(document: Any, place: Place, way: str, value: Any) -> Any:
    """Return a copy with another value at a place."""
    if not place:
        return value
    document = deepcopy(document)
    holder = document
    for key in place[:-1]:
        holder = holder[key]
    if way == "remove":
        del holder[place[-1]]
    elif way == "rename" and isinstance(holder, dict):
        holder[str(value)[:200]] = holder.pop(place[-1])
    else:
        holder[place[-1]] = value
    return document


@st.composite
def lies(draw: st.DrawFn, true: Any) -> tuple[Any, list[str]]:
    """A document with one to three of its values changed, and the changes in words."""
    document, told = true, []
    for _ in range(draw(st.integers(1, 3))):
        if not isinstance(document, dict | list):
            break
        found = places(document)
        place = draw(st.sampled_from(found)) if found else ()
        way = draw(st.sampled_from(["set", "set", "set", "remove", "rename"]))
        value = draw(st.sampled_from(ODD))
        told.append(f"{way} {place} {repr(value)[:60]}")
        document = changed(document, place, way, value)
    return document, told


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint in two files of weights with an index."""
    path = checkpoints.build("llama", tmp_path_factory.mktemp("files") / "whole")
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: weights[name] for name in held}, path / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, held in parts.items() for name in held}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert refusals(path) == []
    return path


@pytest.mark.parametrize(
    ("name", "place", "value", "told"),
    [
        ("model.safetensors.index.json", ("weight_map", "lm_head.weight"), [], "no usable weight_map"),
        ("model.safetensors.index.json", ("weight_map", "lm_head.weight"), "x" * 256, "no usable weight_map"),
        ("model.safetensors.index.json", ("weight_map", "lm_head.weight"), "../a", "no usable weight_map"),
        ("model.safetensors.index.json", ("weight_map", "lm_head.weight"), "..", "lacks 1 of"),
        ("model.safetensors.index.json", ("weight_map", "lm_head.weight"), "\0", "lacks 1 of"),
        ("model.safetensors.index.json", ("weight_map", "lm_head.weight"), "c.safetensors", "lacks 1 of"),
        ("model.safetensors.index.json", ("weight_map",), ["model-1.safetensors"], "no usable weight_map"),
        ("model.safetensors.index.json", ("weight_map",), {}, "no usable weight_map"),
        ("generation_config.json", ("eos_token_id",), "x" * 10_000, "eos_token_id 'xxx"),
        ("tokenizer.json", ("model", "vocab", "t"), 2**31, "ids of more than 31 bits"),
        ("tokenizer.json", ("model", "continuing_subword_prefix"), "ü" * 3, "no usable tokenizer"),  # panics
        ("model-1.safetensors", ("lm_head.weight", "dtype"), "x" * 10_000, "unknown dtype xxx"),
        ("model-1.safetensors", ("lm_head.weight", "shape"), [2**40, 2**40], "contradicts its shape"),
        ("model-1.safetensors", ("lm_head.weight", "data_offsets"), [0, float("inf")], "malformed header"),
        ("model-1.safetensors", ("x" * 2000,), {}, "name has 2000 characters"),
    ],
)
def test_each_wrong_value_is_named(
    name: str, place: Place, value: Any, told: str, checkpoint: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    true, join = read(copy / name)
    (copy / name).write_bytes(join(changed(true, place, "set", value)))
    refused = refusals(copy)
    assert any(told in str(error) for error in refused), refused


def test_a_special_token_that_is_no_token(checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    true, join = read(copy / "tokenizer_config.json")
    (copy / "tokenizer_config.json").write_bytes(join(true | {"eos_token": ""}))
    assert all(type(token_id) is int for token_id in Tokenizer(copy).special_token_ids)


TEMPLATE = [b"{{ messages[0]['content'] }}", b"{% for m in messages %}", b"{% endfor %}", b"{{ 1 / 0 }}"]
TEMPLATE += [b"{% if ", b"{{ x.__class__.__mro__ }}", b"{% include 'a' %}", b"\0", b"{#", b"\xff"]
TEMPLATE += [b"(" * 2000, b"{{ [" * 200, b"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"]
TEMPLATE += [b"{% generation %}", b"{{ raise_exception('" + b"x" * 100_000 + b"') }}", b"x" * 100_000]
"""Parts of a template; those that compute without end are in test_template_bounds.py."""


def test_a_template_file_that_lies_is_refused_or_harmless(checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)

    @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.sampled_from(TEMPLATE), max_size=4).map(b"".join))
    def run(template: bytes) -> None:
        (copy / "chat_template.jinja").write_bytes(template)
        for error in refusals(copy, ("tokenizer",)):
            assert names_what(error, copy, "chat_template.jinja"), error

    run()


def read(file: Path) -> tuple[Any, Callable[[Any], bytes]]:
    """Return the JSON of a file, and what makes the file's bytes of another one."""
    content = file.read_bytes()
    if file.suffix == ".json":
        return json.loads(content), lambda document: json.dumps(document).encode()
    (length,) = struct.unpack("<Q", content[:8])

    def join(document: Any) -> bytes:
        header = json.dumps(document).encode()
        return struct.pack("<Q", len(header)) + header + content[8 + length :]

    return json.loads(content[8 : 8 + length]), join


def names_what(error: Exception, path: Path, name: str) -> bool:
    """Whether an error says what it is about: the file, the checkpoint or, in use, the tokenizer's part."""
    said = (str(path), name, "the chat template", "the tokenizer has ids")
    return any(one in str(error) for one in said)


def test_a_header_that_only_the_library_refuses(checkpoint: Path, tmp_path: Path) -> None:
    name = "model-1.safetensors"
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    true, join = read(copy / name)
    (copy / name).write_bytes(join({**true, "__metadata__": True}))
    (error,) = refusals(copy, ("load",))
    assert name in str(error)
    assert "download it again" in str(error)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", FILES)
def test_wrong_values_are_refused_or_harmless(name: str, checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    true, join = read(copy / name)

    @settings(max_examples=EXAMPLES[name], deadline=None, suppress_health_check=list(HealthCheck))
    @given(lie=lies(true))
    def run(lie: tuple[Any, list[str]]) -> None:
        note(str(lie[1]))
        (copy / name).write_bytes(join(lie[0]))
        for error in refusals(copy, FILES[name]):
            assert names_what(error, copy, name), error

    run()
