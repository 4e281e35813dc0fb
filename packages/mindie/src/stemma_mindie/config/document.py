"""The whole ``config.json``: read, checked, every fault named by line and column."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from stemma.errors import ConfigError
from stemma_mindie.config.backend import BackendConfig, ModelDeployConfig
from stemma_mindie.config.base import MindIESection, no_effect
from stemma_mindie.config.json_text import JsonDocument, JsonPath, read_json
from stemma_mindie.config.schedule import LogConfig, ScheduleConfig
from stemma_mindie.config.server import ServerConfig

MAX_FILE_BYTES = 10 * 2**20
_TYPO = 0.8
"""Unknown keys this similar to a known one are taken for typing errors and refused; others are listed."""


_MAX_SHOWN = 200
"""Characters of a wrong value in a message."""


class MindIEConfig(MindIESection):
    """Top of the file. `ModelDeployConfig` and `ScheduleConfig` may stand here or in `BackendConfig`."""

    version: str = no_effect("1.0.0", "not checked", alias="Version")
    server: ServerConfig = Field(default=ServerConfig(), alias="ServerConfig")
    backend: BackendConfig = Field(default=BackendConfig(), alias="BackendConfig")
    log: LogConfig = Field(default=LogConfig(), alias="LogConfig")
    model_deploy_config: ModelDeployConfig | None = Field(default=None, alias="ModelDeployConfig")
    schedule_config: ScheduleConfig | None = Field(default=None, alias="ScheduleConfig")

    @property
    def deploy(self) -> ModelDeployConfig:
        """The one that is given; `read_mindie_config` makes sure of it."""
        found = self.backend.model_deploy_config or self.model_deploy_config
        assert found is not None
        return found

    @property
    def schedule(self) -> ScheduleConfig:
        """The one that is given, or the defaults."""
        return self.backend.schedule_config or self.schedule_config or ScheduleConfig()


@dataclass(frozen=True, slots=True)
class MindIEFile:
    """A file that passed every check."""

    path: Path
    config: MindIEConfig
    document: JsonDocument
    without_effect: tuple[str, ...]
    """Keys of the file that are checked and then have no effect."""
    unknown: tuple[str, ...]
    """Keys of the file that nothing here knows, with their places."""

    @property
    def base(self) -> Path:
        """Where relative paths of certificates start: the installation, above ``conf/``."""
        folder = self.path.absolute().parent
        return folder.parent if folder.name == "conf" else folder

    def model_path(self, key: str) -> tuple[str | int, ...]:
        """Return where a key of the one ModelConfig stands."""
        top: tuple[str, ...] = () if self.config.model_deploy_config is not None else ("BackendConfig",)
        return (*top, "ModelDeployConfig", "ModelConfig", 0, key)

    def says(self, dotted: str) -> str:
        """Return the place of a key for messages: ``config.json: ServerConfig.port``."""
        return f"{self.path.name}: {dotted}"


def read_mindie_config(path: Path) -> MindIEFile:
    """Read and check a file. Raises ConfigError that names every fault with line and column."""
    document = _read(path)
    try:
        config = MindIEConfig.model_validate(document.value)
    except ValidationError as error:
        raise ConfigError(f"{path}:\n  " + "\n  ".join(_explain(error, document))) from error
    both = [
        MindIEConfig.model_fields[name].alias
        for name in ("model_deploy_config", "schedule_config")
        if getattr(config, name) is not None and getattr(config.backend, name) is not None
    ]
    if both:
        raise ConfigError(f"{path}: {both[0]} is given both in BackendConfig and at the top; leave one")
    if config.backend.model_deploy_config is None and config.model_deploy_config is None:
        raise ConfigError(
            f"{path}: no ModelDeployConfig; BackendConfig.ModelDeployConfig names the model to serve"
        )
    typos: list[str] = []
    unknown: list[str] = []
    for place, name, known in _unknown(config, ()):
        where = f"{'.'.join(map(str, (*place, name)))} ({document.where((*place, name))})"
        near = difflib.get_close_matches(name, known, n=1, cutoff=_TYPO)
        if near:
            typos.append(f"unknown key {where}; the nearest known one is {near[0]!r}")
        else:
            unknown.append(where)
    if typos:
        raise ConfigError(f"{path}: " + "; ".join(typos))
    return MindIEFile(path, config, document, tuple(_without_effect(config, ())), tuple(unknown))


def _read(path: Path) -> JsonDocument:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror or error}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        return read_json(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: byte {error.start}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _explain(error: ValidationError, document: JsonDocument) -> Iterator[str]:
    for entry in error.errors(include_url=False, include_context=False):
        path: JsonPath = tuple(part for part in entry["loc"] if part not in ("bool", "int"))
        given = entry["input"]
        shown = f" = {repr(given)[:_MAX_SHOWN]}" if isinstance(given, (str, int, float, bool)) else ""
        yield f"{document.where(path)}: {'.'.join(map(str, path)) or 'the file'}{shown}: {entry['msg']}"


def sections_of(section: MindIESection, place: JsonPath) -> Iterator[tuple[JsonPath, MindIESection]]:
    """Yield `section` and those inside it with their places in the file, as far as the file has them."""
    yield place, section
    for name, info in type(section).model_fields.items():
        if name not in section.model_fields_set:
            continue
        value: Any = getattr(section, name)
        here = (*place, info.alias or name)
        if isinstance(value, MindIESection):
            yield from sections_of(value, here)
        elif isinstance(value, dict):
            for key, inner in value.items():
                if isinstance(inner, MindIESection):
                    yield from sections_of(inner, (*here, key))
        elif isinstance(value, list):
            for number, inner in enumerate(value):
                if isinstance(inner, MindIESection):
                    yield from sections_of(inner, (*here, number))


def _unknown(config: MindIEConfig, place: JsonPath) -> Iterator[tuple[JsonPath, str, list[str]]]:
    for here, section in sections_of(config, place):
        known = [info.alias or name for name, info in type(section).model_fields.items()]
        for name in section.model_extra or {}:
            yield here, name, known


def _without_effect(config: MindIEConfig, place: JsonPath) -> Iterator[str]:
    for _, section in sections_of(config, place):
        for name, info in type(section).model_fields.items():
            extra = info.json_schema_extra
            if name in section.model_fields_set and isinstance(extra, dict) and "no_effect" in extra:
                yield info.alias or name
