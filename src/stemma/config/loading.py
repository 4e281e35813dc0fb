"""Settings from a file, the environment and command-line flags; a flag beats a variable beats the file.

The file is TOML, YAML with the same tables, or another server's that a package reads (`readers.py`).

A setting has one flat name everywhere: ``block_size`` is ``block_size`` in the file's ``[cache]`` table,
``STEMMA_BLOCK_SIZE`` in the environment and ``--block-size`` on the command line. The names come from the
models in `settings.py`; nothing here has to change when a setting is added.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from stemma.config.base import SettingsModel
from stemma.config.readers import reader_of
from stemma.config.settings import Settings
from stemma.errors import ConfigError

ENV_PREFIX = "STEMMA_"
_OTHER_VARIABLES = frozenset({"STEMMA_NATIVE", "STEMMA_WHEEL_LEVELS"})
"""Variables that no setting stands for: of `native/library.py`, and of the build of a wheel."""
_KEYS = ("api_key", "admin_key")
"""Secrets: never shown, and never silently empty."""
YAML_SUFFIXES = (".yaml", ".yml")
_MAX_YAML_BYTES = 2**20
_NO_MODEL = (
    "no model given. Name one: `demo` (a small model to try), a checkpoint's directory, a .gguf file, or a "
    "name on the Hugging Face hub (stemma serve Qwen/Qwen2.5-0.5B-Instruct)"
)
_MAX_SHOWN = 200
"""Characters of a wrong value in a message."""
_HIDDEN_TABLE = "engine"
"""Groups settings in the code; the file has its tables at the top level."""
_RENAMED: dict[tuple[str, ...], str] = {
    ("engine", "model", "path"): "model",
    ("engine", "cache", "pool", "name"): "pool",
    ("engine", "speculation", "mode"): "speculation",
    ("engine", "lora", "adapters"): "lora",
}
"""Settings named like their table: they choose what the other settings of the table apply to."""


@dataclass(frozen=True, slots=True)
class SettingField:
    """One leaf of the settings tree."""

    path: tuple[str, ...]
    """Where it is in `Settings`, e.g. ``("engine", "cache", "block_size")``."""
    name: str
    """Its flat name."""
    info: FieldInfo

    @property
    def table(self) -> tuple[str, ...]:
        """The table of the file that holds it, e.g. ``("cache",)``."""
        return tuple(part for part in self.path[:-1] if part != _HIDDEN_TABLE)


@dataclass(frozen=True, slots=True)
class _Given:
    value: Any
    origin: str
    """Where the value came from, for error messages."""


@cache
def setting_fields() -> Mapping[str, SettingField]:
    """Return every setting by its flat name, in the order of `settings.py`."""
    fields: dict[str, SettingField] = {}
    for setting in _leaves(Settings, ()):
        assert setting.name not in fields, f"two settings are called {setting.name}"
        fields[setting.name] = setting
    return MappingProxyType(fields)


def _leaves(model: type[SettingsModel], path: tuple[str, ...]) -> Iterable[SettingField]:
    for name, info in model.model_fields.items():
        here = (*path, name)
        inner = _settings_model(info.annotation)
        if inner is not None:
            yield from _leaves(inner, here)
        else:
            yield SettingField(here, _RENAMED.get(here, model.flag_prefix + name), info)


def _settings_model(annotation: Any) -> type[SettingsModel] | None:
    """Return the component that a field holds, if it is one; it may be optional."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, SettingsModel):
            return candidate
    return None


def load_settings(
    *,
    file: Path | None = None,
    tables: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
    note: Callable[[str], None] | None = None,
) -> Settings:
    """Return the settings; `flags` holds flat names, None meaning "not given".

    `tables` is what a file would hold, read from elsewhere (`cluster.py`).
    `note` is told what an operator should know of a file that is accepted, one line each.
    Raises ConfigError naming the unknown key and the nearest known one, or the value that doesn't fit
    and where it came from.
    """
    given: dict[tuple[str, ...], _Given] = {}
    if file is not None and file.suffix == ".json":
        given.update(_from_foreign(file, environ or {}, note))
    elif file is not None:
        given.update(_from_file(file))
    if tables is not None:
        given.update(_from_tables(tables, "settings"))
    given.update(_from_environ(environ or {}))
    given.update(_from_flags(flags or {}))
    tree: dict[str, Any] = {}
    for path, item in given.items():
        table = tree
        for part in path[:-1]:
            table = table.setdefault(part, {})
        table[path[-1]] = item.value
    try:
        return Settings.model_validate({"engine": {}, **tree})
    except ValidationError as error:
        raise ConfigError(_explain(error, given)) from error


def _from_file(file: Path) -> dict[tuple[str, ...], _Given]:
    if file.suffix in YAML_SUFFIXES:
        return _from_tables(read_yaml(file), str(file))
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"can't read {file}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error
    return _from_tables(content, str(file))


def read_yaml(file: Path) -> dict[str, Any]:
    """Return a YAML file's mapping. Raises ConfigError."""
    try:
        if file.stat().st_size > _MAX_YAML_BYTES:
            raise ConfigError(f"{file} is larger than {_MAX_YAML_BYTES} bytes")
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"can't read {file}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid YAML: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{file} must be a mapping of names")
    return content


def tables_of(settings: Settings) -> dict[str, Any]:
    """Return what a file with these settings holds, as plain values; defaults are left out."""
    given = settings.model_dump(mode="json", exclude_defaults=True)
    tables: dict[str, Any] = {}
    for setting in setting_fields().values():
        value: Any = given
        for part in setting.path:
            value = value.get(part) if isinstance(value, dict) else None
        if value is None:
            continue
        table = tables
        for part in setting.table:
            table = table.setdefault(part, {})
        table[setting.path[-1]] = value
    return tables


def _from_tables(content: Mapping[str, Any], origin: str) -> dict[tuple[str, ...], _Given]:
    by_place = {(*setting.table, setting.path[-1]): setting for setting in setting_fields().values()}
    tables = {place[:depth] for place in by_place for depth in range(1, len(place))}
    given: dict[tuple[str, ...], _Given] = {}
    for place, value in _entries(content, (), tables):
        if place not in by_place:
            known = [".".join(each) for each in by_place]
            raise ConfigError(f"{origin}: " + _unknown(".".join(place), known))
        given[by_place[place].path] = _Given(value, f"{origin}: {'.'.join(place)}")
    return given


def _from_foreign(
    file: Path, environ: Mapping[str, str], note: Callable[[str], None] | None
) -> dict[tuple[str, ...], _Given]:
    foreign = reader_of(file).read(file, environ)
    if note is not None:
        for line in foreign.notes:
            note(f"{file.name}: {line}")
    fields = setting_fields()
    return {fields[name].path: _Given(*item) for name, item in foreign.values.items()}


def _entries(
    table: Mapping[str, Any], place: tuple[str, ...], tables: set[tuple[str, ...]]
) -> Iterable[tuple[tuple[str, ...], Any]]:
    for key, value in table.items():
        here = (*place, key)
        if here in tables and isinstance(value, dict):
            yield from _entries(value, here, tables)
        elif isinstance(value, dict) and not place:
            yield from ((((*here, inner)), value[inner]) for inner in value)
        else:
            yield here, value


def _from_environ(environ: Mapping[str, str]) -> dict[tuple[str, ...], _Given]:
    fields = setting_fields()
    given: dict[tuple[str, ...], _Given] = {}
    for variable, value in environ.items():
        if variable in _OTHER_VARIABLES:
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if not variable.startswith(ENV_PREFIX) or not (value or name in _KEYS):
            continue  # empty means not given; but not for a key, or a typo would open the server
        if name not in fields:
            raise ConfigError(_unknown(variable, [ENV_PREFIX + known.upper() for known in fields]))
        given[fields[name].path] = _Given(value, variable)
    return given


def _from_flags(flags: Mapping[str, Any]) -> dict[tuple[str, ...], _Given]:
    fields = setting_fields()
    given: dict[tuple[str, ...], _Given] = {}
    for name, value in flags.items():
        if name not in fields:
            raise ConfigError(_unknown(name, fields))
        if value is not None:
            given[fields[name].path] = _Given(value, flag_of(name))
    return given


def flag_of(name: str) -> str:
    """Return the flag of a flat name; the model is an argument."""
    return "MODEL" if name == "model" else "--" + name.replace("_", "-")


def _unknown(key: str, known: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(key, list(known), n=1, cutoff=0.0)
    return f"unknown setting {key!r}; the nearest known one is {nearest[0]!r}"


def _explain(error: ValidationError, given: Mapping[tuple[str, ...], _Given]) -> str:
    lines = []
    for entry in error.errors(include_url=False, include_context=False):
        location = tuple(str(part) for part in entry["loc"])
        if location[:2] == ("engine", "model") and entry["type"] == "missing":
            return _NO_MODEL
        source = next((item for path, item in given.items() if location[: len(path)] == path), None)
        shown = "" if location[-1] in _KEYS else f" = {repr(source.value)[:_MAX_SHOWN]}" if source else ""
        where = f"{source.origin}{shown}" if source else ".".join(location)
        lines.append(f"{where}: {entry['msg']}")
    return "; ".join(dict.fromkeys(lines))
