"""Packages beside the core: what they register by entry points, and what to install where one is missing.

A group of entry points is called ``stemma.`` and what it holds: commands, config_readers, replicas, models,
pools, apis, formats. A package that isn't installed costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from stemma.errors import ConfigError


def names(group: str) -> list[str]:
    """Return under which names packages registered something in `group`, sorted."""
    return sorted({point.name for point in entry_points(group=group)})


def load(group: str, name: str | None = None) -> Any:
    """Return what is registered under `name`, or first of all; None: no installed package has that.

    Raises ConfigError if it can't be imported.
    """
    chosen = entry_points(group=group) if name is None else entry_points(group=group, name=name)
    for point in chosen:
        return _load(point)
    return None


def load_all(group: str, warn: Callable[[str], object]) -> dict[str, Any]:
    """Return all that can be imported, by name; `warn` is called with a line for each that can't."""
    found: dict[str, Any] = {}
    for point in entry_points(group=group):
        try:
            found.setdefault(point.name, _load(point))
        except ConfigError as error:
            warn(str(error))
    return found


def _load(point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:  # a package's import may fail in any way
        what = f"{point.value}, which an installed package registers as {point.group} {point.name!r}"
        raise ConfigError(f"{what}, can't be imported: {type(error).__name__}: {error}") from error


def to_install(package: str, extra: str = "") -> str:
    """Return how to install a missing package of this repository, such as `stemma-lab`, in words."""
    extra = f"[{extra}]" if extra else ""
    quote = "'" if extra else ""
    folder = package.replace("stemma-", "./packages/")
    return (
        f"{package}, which isn't installed: pip install {quote}{package}{extra}{quote}, or in Stemma's "
        f"repository pip install {quote}{folder}{extra}{quote}"
    )
