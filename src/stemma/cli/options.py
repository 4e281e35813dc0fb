"""Command-line flags for every setting, made from the settings models.

A setting added to `config/settings.py` gets its flag, its help text and its place in ``--help`` by itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic_core import PydanticUndefined

from stemma.config.loading import SettingField, flag_of, setting_fields
from stemma.config.sizes import format_size
from stemma.config.words import split_named_paths

_PLAIN_TYPES = (bool, int, float, str, Path)


def with_settings_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` one option per setting; it gets them by flat name in its ``**flags``, None if absent.

    ``model`` becomes an optional argument, since the file may name it.
    """
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    made = [_parameter(setting) for setting in setting_fields().values()]
    made.sort(key=lambda parameter: parameter.name != "model")
    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in [*made[:1], *own, *made[1:]]
    ]

    def wrapper(**values: Any) -> None:
        command(**{name: None if value == [] else value for name, value in values.items()})

    wrapper.__doc__ = command.__doc__
    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def _parameter(setting: SettingField) -> inspect.Parameter:
    kind = _cli_type(setting.info.annotation, setting.info.metadata)
    if setting.name == "model":
        annotation: Any = Annotated[Path | None, typer.Argument(help=setting.info.description)]
    else:
        flag = flag_of(setting.name)
        declaration = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
        option = typer.Option(
            declaration, help=_help(setting), show_default=False, rich_help_panel=_panel(setting)
        )
        annotation = Annotated[kind | None, option]
    return inspect.Parameter(
        setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _cli_type(annotation: Any, metadata: list[Any]) -> Any:
    """Return the type the command line parses; what it can't parse stays text for pydantic."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extra = get_args(annotation)
        return _cli_type(inner, extra)
    if origin in (Union, UnionType):
        [inner] = [each for each in get_args(annotation) if each is not NoneType]
        return _cli_type(inner, metadata)
    if origin is Literal:
        return annotation
    if any(getattr(each, "func", None) is split_named_paths for each in metadata):
        return list[str]  # the flag may be repeated
    if annotation in _PLAIN_TYPES and not any(hasattr(each, "func") for each in metadata):
        return annotation
    return str


def _help(setting: SettingField) -> str:
    text = " ".join((setting.info.description or "").split())
    default = setting.info.default
    if default is None or default is PydanticUndefined or default in ((), {}):
        return text
    is_size = setting.name.endswith(("_memory", "_bytes"))
    shown = format_size(default) if is_size and isinstance(default, int) else default
    if isinstance(default, bool):
        shown = "on" if default else "off"
    return f"{text} [dim]\\[default: {shown}][/]".strip()


def _panel(setting: SettingField) -> str:
    return " ".join(setting.table).capitalize()
