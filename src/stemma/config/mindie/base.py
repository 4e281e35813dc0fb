"""What all sections of ``config.json`` have in common, and how a key says what it does here."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

NO_RANKS = "ranks are asked for with `--tensor-parallel-size`"
NO_CONTEXT_RANKS = "asked for with `--context-parallel-size`"
NO_LINK = "no link between machines of one model"
NO_NPU = "of an Ascend device"
OWN_SCHEDULER = "the scheduler decides by itself"


class MindIESection(BaseModel):
    """Base of every section: strict types; keys that we don't know are kept for `translate` to report."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="allow",
        alias_generator=to_camel,
        use_attribute_docstrings=True,
    )
    section: ClassVar[str] = ""
    """Its name in the file."""


def key(default: Any, becomes: str, *, alias: str | None = None, **limits: Any) -> Any:
    """Return a field that works: it becomes the setting(s) called `becomes`. `limits` are pydantic's."""
    return Field(default, alias=alias, json_schema_extra={"becomes": becomes}, **limits)


def no_effect(default: Any, why: str, *, alias: str | None = None, **limits: Any) -> Any:
    """Return a field that is checked and then has no effect; it is listed at the start."""
    return Field(default, alias=alias, json_schema_extra={"no_effect": why}, **limits)
