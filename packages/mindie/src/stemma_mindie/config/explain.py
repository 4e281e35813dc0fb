"""Every key of ``config.json`` as a row: type, range, default, and what it does here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from stemma.config.readers import NO_EFFECT, WORKS, KeyRow
from stemma_mindie.config.base import MindIESection
from stemma_mindie.config.document import MindIEConfig

_BOUNDS = (("ge", "at least"), ("le", "at most"), ("max_length", "up to"))


def key_rows() -> list[KeyRow]:
    """Return all keys in the order of the file."""
    return list(_rows(MindIEConfig))


def _rows(section: type[MindIESection]) -> Iterator[KeyRow]:
    inner: list[type[MindIESection]] = []
    for name, info in section.model_fields.items():
        nested = _section(info.annotation)
        if nested is not None:
            inner.append(nested)
            continue
        extra = info.json_schema_extra
        assert isinstance(extra, dict), f"{section.__name__}.{name} doesn't say what it does"
        works = "becomes" in extra
        detail = str(extra["becomes"] if works else extra["no_effect"])
        yield KeyRow(
            section.section,
            info.alias or name,
            "required" if info.default is PydanticUndefined else json.dumps(info.default),
            _limits(info),
            WORKS if works else NO_EFFECT,
            detail,
            " ".join((info.description or "").split()),
        )
    for nested in dict.fromkeys(inner):
        if section is not MindIEConfig or nested.section not in ("ModelDeployConfig", "ScheduleConfig"):
            yield from _rows(nested)


def _section(annotation: Any) -> type[MindIESection] | None:
    """Return the section that a field holds, maybe in a list, a table or as an option."""
    if isinstance(annotation, type) and issubclass(annotation, MindIESection):
        return annotation
    return next((found for inner in get_args(annotation) if (found := _section(inner))), None)


def _limits(info: FieldInfo) -> str:
    parts = []
    for item in info.metadata:
        for name, word in _BOUNDS:
            bound = getattr(item, name, None)
            if bound is not None:
                unit = (
                    ""
                    if name != "max_length"
                    else " files"
                    if isinstance(info.default, list)
                    else " characters"
                )
                parts.append(f"{word} {bound}{unit}")
    return ", ".join(parts)
