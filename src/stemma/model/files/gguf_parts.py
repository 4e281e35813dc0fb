"""Models in several GGUF files, as llama.cpp's `llama-gguf-split` cuts them: ``NAME-00001-of-00003.gguf``.

The first file's metadata are the model's; each file's tensors lie in it. Any of the files names the model.
"""

from __future__ import annotations

import re
from pathlib import Path

from stemma.errors import ModelError

_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})(\.gguf)", re.IGNORECASE | re.ASCII)
_MAX_SHOWN = 3


def part_names(name: str) -> list[str]:
    """Return the names of all files of the model that a file of this name belongs to, in order.

    That is `name` alone unless it is one of several parts.
    """
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    stem, own, count, suffix = match.groups()
    if not 1 <= int(own) <= int(count):
        return [name]
    return [f"{stem}-{part:05}-of-{count}{suffix}" for part in range(1, int(count) + 1)]


def part_files(path: Path) -> list[Path]:
    """Return all files of the model that `path` belongs to. Raises ModelError if some aren't there."""
    files = [path.with_name(name) for name in part_names(path.name)]
    if lacking := [file.name for file in files if file != path and not file.is_file()]:
        more = ", ..." if len(lacking) > _MAX_SHOWN else ""
        raise ModelError(
            f"{path} is one of {len(files)} parts of a model; lacking beside it: "
            f"{', '.join(lacking[:_MAX_SHOWN])}{more}; is the download complete?"
        )
    return files


def whole_stem(path: Path) -> str:
    """Return the name of the model in a GGUF file, or in several: without ending and number of the part."""
    match = _PART.fullmatch(path.name)
    return path.stem if match is None else match[1]
