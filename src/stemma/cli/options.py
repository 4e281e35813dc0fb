"""Command-line flags for every setting, made from the settings models.

A setting added to `config/settings.py` gets its flag, its help text and its place in ``--help`` by itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic_core import PydanticUndefined
from typer.core import TyperCommand

from stemma.cli.synonyms import translate
from stemma.config.loading import SettingField, flag_of, setting_fields
from stemma.config.sizes import format_size, parse_size
from stemma.config.words import split_named_paths

_PLAIN_TYPES = (bool, int, float, str, Path)
_FIRST = (
    *("served_name", "max_model_len", "kv_cache_memory", "host_cache", "disk_cache", "disk_cache_size"),
    *("quantize", "host", "port", "api_key"),
)
"""Settings that most people use, and no others: what ``--help`` shows; ``--help all`` shows all."""
_ALL = "stemma.help_all"


class SettingsCommand(TyperCommand):
    """A command with a flag for each setting: other servers' flags are understood, and help is short."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments in which flags of vLLM, SGLang and llama.cpp may stand.

        Raises ConfigError for one that has no meaning here.
        """
        ctx.meta[_ALL] = not {("--help", "all"), ("-h", "all")}.isdisjoint(pairwise(args))
        known = frozenset(flag for one in self.get_params(ctx) for flag in (*one.opts, *one.secondary_opts))
        return super().parse_args(ctx, translate(args, known, lambda line: typer.echo(line, err=True)))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the usage, the options in groups, and what to type for more."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        self.format_options(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each group of options."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for group, record in self._records(ctx):
            groups.setdefault(group, []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records, col_max=26)
        if not ctx.meta[_ALL]:
            formatter.write_paragraph()
            formatter.write_text("All settings: --help all. What one means: stemma config explain SETTING.")

    def _records(self, ctx: Any) -> Iterator[tuple[str, tuple[str, str]]]:
        for parameter in self.get_params(ctx):
            setting = setting_fields().get(parameter.name or "")
            is_shown = ctx.meta[_ALL] or setting is None or setting.name in ("model", *_FIRST)
            record = parameter.get_help_record(ctx) if is_shown else None
            if record is not None:
                is_own = setting is None or not setting.table or not ctx.meta[_ALL]
                yield "Options" if setting is None or is_own else _panel(setting), record


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
    vars(wrapper)["command_class"] = SettingsCommand
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
        option = typer.Option(declaration, help=_help(setting), show_default=False)
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
    return f"{text} [default: {_shown(default, setting.info.metadata)}]".strip()


def _shown(default: object, metadata: list[Any]) -> str:
    """Return a default as it is written on the command line."""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    is_size = any(getattr(each, "func", None) is parse_size for each in metadata)
    return format_size(default) if is_size and isinstance(default, int) else str(default)


def _panel(setting: SettingField) -> str:
    return " ".join(setting.table).capitalize()
