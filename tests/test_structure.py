"""What keeps the house small: names with one meaning, functions that fit on a screen."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "packages").glob("*/src/**/*.py")])
KERNELS = (
    *("triton_kernels.py", "triton_attention.py", "listed_kernels.py", "listed_attention.py"),
    *("product_kernels.py", "layer_kernels.py", "low_rank_kernels.py", "recurrent_kernels.py"),
    "sampler_kernels.py",
)
MAX_LINES = 60
MAX_CORE_LINES = 86_600
"""The core's Python; the goal is 70,000. It may only fall."""


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            yield path, node


def test_a_public_class_name_has_one_meaning() -> None:
    """But for one that mirrors a structure of the kernels, and records of two formats."""
    found = defaultdict(set)
    for path, node in nodes():
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            found[node.name].add(str(path.relative_to(ROOT)))
    assert {name for name, paths in found.items() if len(paths) > 1} <= {"Router", "Record"}


def test_functions_are_short() -> None:
    """Commands are as long as their options."""
    found = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path, node in nodes()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and path.name not in KERNELS
        and not {"cli", "commands"} & set(path.parts)
        and (node.end_lineno or 0) - node.lineno + 1 > MAX_LINES
    ]
    assert found == []


def test_the_core_does_not_grow() -> None:
    core = [path for path in SOURCES if (ROOT / "src") in path.parents]
    assert sum(len(path.read_text().splitlines()) for path in core) <= MAX_CORE_LINES


NAMES_CUDA = {
    "memory/device/accelerator.py",  # the seam
    "memory/device/pinned.py",  # its runtime locks exactly the bytes that are asked for
    "config/settings.py",  # --no-cuda-graphs
    "model/load/module_loading.py",  # takes the decoder of model/cuda
    "model/load/device_loading.py",  # the fused one
    "cli/synonyms.py",  # other servers' --disable-cuda-graph
    "cli/doctor/machine.py",  # the version that torch was built for
    "cli/doctor/command.py",
}
"""What names CUDA beside `model/cuda/`; all else asks the seam."""


def test_only_a_few_places_name_one_kind_of_device() -> None:
    """In code: names, attributes, modules and short strings; what people read may name it."""
    found = set()
    for path, node in nodes():
        words = [getattr(node, field, None) for field in ("id", "attr", "arg", "module", "name", "value")]
        if any(isinstance(one, str) and len(one) < 30 and "cuda" in one for one in words):
            found.add(str(path.relative_to(ROOT)))
    within = {name.removeprefix("src/stemma/") for name in found if name.startswith("src/")}
    assert {name for name in within if not name.startswith("model/cuda/")} == NAMES_CUDA
