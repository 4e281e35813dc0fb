"""A policy of one's own: a class in a Python file, named ``FILE.py:CLASS``.

The file is the user's own code and runs with their rights, as any script that they start.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from stemma.errors import ConfigError
from stemma.prefix.eviction.policy import EvictionPolicy

MARK = ".py:"


def names_file(spec: str) -> bool:
    """Whether `spec` names a policy in a file."""
    return MARK in spec


def policy_from(spec: str) -> EvictionPolicy:
    """Return a new policy of the class that `spec` names. Raises ConfigError."""
    stem, _, name = spec.rpartition(MARK)
    path = Path(f"{stem}.py")
    if not path.is_file():
        raise ConfigError(f"eviction policy {spec!r}: there is no file {path}")
    found = importlib.util.spec_from_file_location(f"stemma_policy_{path.stem}", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{path} can't be run: {error!r}") from error
    policy = getattr(module, name, None)
    if not (isinstance(policy, type) and issubclass(policy, EvictionPolicy)):
        raise ConfigError(f"{path} has no class {name} that derives from EvictionPolicy")
    try:
        made: EvictionPolicy = policy()
    except TypeError as error:
        raise ConfigError(f"eviction policy {spec!r}: {error}") from error
    return made
