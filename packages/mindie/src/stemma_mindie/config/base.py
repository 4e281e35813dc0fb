"""The base of all sections of ``config.json``, and how a key says what it does here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

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


def _as_it_is(value: Any) -> Any:
    return value


def key(
    default: Any,
    becomes: str,
    *,
    means: Callable[[Any], Any] = _as_it_is,
    alias: str | None = None,
    **limits: Any,
) -> Any:
    """Return a field that becomes the setting called `becomes`, by itself. `limits` are pydantic's.

    `means`: from its value to the setting's; None leaves the setting alone.
    """
    extra: Any = {"becomes": becomes, "means": means}
    return Field(default, alias=alias, json_schema_extra=extra, **limits)


def joint_key(default: Any, becomes: str, *, alias: str | None = None, **limits: Any) -> Any:
    """Return a field from which, with others, `translate` makes the setting(s) called `becomes`."""
    return Field(default, alias=alias, json_schema_extra={"becomes": becomes}, **limits)


def settings_in(section: MindIESection) -> Iterator[tuple[str, Any, str]]:
    """Yield (name, value, key) of the settings that the keys of a section become by themselves."""
    for field, info in type(section).model_fields.items():
        extra: Any = info.json_schema_extra
        if extra is None or "means" not in extra:
            continue
        value = extra["means"](getattr(section, field))
        if value is not None:
            yield extra["becomes"], value, f"{section.section}.{info.alias}"


def no_effect(default: Any, why: str, *, alias: str | None = None, **limits: Any) -> Any:
    """Return a field that is checked and then has no effect; it is listed at the start."""
    return Field(default, alias=alias, json_schema_extra={"no_effect": why}, **limits)
