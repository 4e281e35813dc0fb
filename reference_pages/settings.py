"""The page of all settings, from their models."""

from __future__ import annotations

from itertools import groupby
from typing import Annotated, Any

from pydantic import TypeAdapter
from pydantic_core import PydanticUndefined

from reference_pages.markdown import prose
from reference_pages.schemas import bounds, kind
from stemma.config.loading import ENV_PREFIX, SettingField, flag_of, setting_fields
from stemma.config.sizes import format_size, parse_size

_HEAD = """# Settings

Every setting has one flat name. A flag beats a variable beats the file; an unknown name is an error that
names the nearest known one. `stemma serve --help` prints the same, `stemma config check FILE` tries a file,
`stemma config explain NAME` tells one setting. Sizes are bytes, or a number with a unit: `512MB`, `8GiB`.
"""


def page() -> str:
    """Return the page: a section for each table of the file, in it one for each setting."""
    parts = [_HEAD]
    for table, settings in groupby(setting_fields().values(), key=lambda one: one.table):
        name = ".".join(table)
        parts.append(f"\n## In the file's table `[{name}]`\n" if name else "\n## At the top of the file\n")
        parts += [_setting(one) for one in settings]
    return "".join(parts)


def _setting(one: SettingField) -> str:
    flag = flag_of(one.name)
    is_switch = _schema(one).get("type") == "boolean"
    shown = f"`{flag}`, `--no-{flag[2:]}`" if is_switch else f"`{flag}`"
    facts = [shown, f"`{ENV_PREFIX}{one.name.upper()}`", _kind(one), f"default {_default(one)}"]
    key = one.path[-1]
    if key != one.name:
        facts.insert(2, f"key `{key}`")
    return f"\n### `{one.name}`\n\n{' · '.join(facts)}\n\n{prose(one.info.description)}\n"


def _schema(one: SettingField) -> dict[str, Any]:
    annotation: Any = one.info.annotation
    if one.info.metadata:
        annotation = Annotated[(annotation, *one.info.metadata)]
    return TypeAdapter(annotation).json_schema()


def _kind(one: SettingField) -> str:
    schema = _schema(one)
    if schema.get("type") == "boolean":
        return "on or off"
    return ", ".join(["size", *bounds(schema)]) if _is_size(one) else kind(schema)


def _is_size(one: SettingField) -> bool:
    return parse_size.__name__ in repr([one.info.annotation, *one.info.metadata])


def _default(one: SettingField) -> str:
    value = one.info.default
    if value is None or value is PydanticUndefined or value in ("", (), {}):
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return f"`{','.join(value)}`"
    return f"`{format_size(value) if _is_size(one) and value else value}`"
