"""Base of the request models of all APIs, and the tables of what is spoken, skipped or refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

_DATED = re.compile(r"_(\d{8}|\d{4}_\d{2}_\d{2})$")
"""The version in the name of a kind: ``web_search_20250305``, ``web_search_preview_2025_03_11``."""


def undated(kind: str) -> str:
    """Return the name of a kind without the date of its version."""
    return _DATED.sub("", kind)


@dataclass(frozen=True, slots=True)
class Kinds:
    """What is done with objects that name their kind in ``type``: tools, blocks, items. Dates don't count.

    Spoken: it becomes part of the prompt. Skipped: left out, counted, logged once. Refused: 400 by name.
    """

    noun: str
    spoken: frozenset[str]
    skipped: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()
    default: str = ""
    """The kind of an object that names none."""
    others: Literal["skipped", "refused"] = "refused"
    """What is done with kinds that are in no set."""
    or_with: str = ""
    """An object of such a kind is spoken all the same if it has a string of this name."""

    def kind(self, given: Mapping[str, Any]) -> str:
        """Return the kind of an object, without a date."""
        named = given.get("type")
        return self.default if named is None else undated(str(named))

    def speaks(self, given: Any) -> bool:
        """Whether an object is part of the prompt."""
        return isinstance(given, dict) and self.treatment(given) == "spoken"

    def treatment(self, given: Mapping[str, Any]) -> Literal["spoken", "skipped", "refused"]:
        """Return what is done with an object."""
        named = given.get("type")
        if type(named) is str and named in self.spoken:  # nearly all
            return "spoken"
        kind = self.kind(given)
        if kind in self.spoken:
            return "spoken"
        if kind in self.skipped:
            return "skipped"
        if kind in self.refused:
            return "refused"
        return "spoken" if self.or_with and isinstance(given.get(self.or_with), str) else self.others


class RequestModel(BaseModel):
    """Strict types (no ``"12"`` for 12), unknown fields ignored as OpenAI and vLLM do, and logged once."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that would change the answer and aren't implemented, with the values that change nothing."""
    nested: ClassVar[Mapping[str, type[RequestModel]]] = {}
    """Fields that hold an object with such tables of its own."""
    harmless: ClassVar[frozenset[str]] = frozenset()
    """Fields that never change the answer: ignored without a word."""
    hints: ClassVar[frozenset[str]] = frozenset()
    """Wishes that this server doesn't act on and that can't make an answer wrong: accepted, counted where
    they are given, logged once (`ignored_hints.py`)."""
    kinds: ClassVar[Mapping[str, Kinds]] = {}
    """Tables of the objects in lists, by the lists' place: ``messages.content`` are those of all messages."""

    @classmethod
    @cache
    def known_names(cls) -> frozenset[str]:
        """Return the names of all fields that aren't news to us."""
        fields = (field.alias or name for name, field in cls.model_fields.items())
        return frozenset(fields) | frozenset(cls.refused) | cls.harmless | cls.hints


def objects_at(body: Mapping[str, Any], place: str) -> list[dict[str, Any]]:
    """Return the objects in the lists at `place` of a body: those of all lists in lists."""
    found: list[Any] = [body]
    for name in place.split("."):
        found = [
            one
            for each in found
            if type(each) is dict and type(inner := each.get(name)) is list
            for one in inner
        ]
    return [one for one in found if type(one) is dict]


def path_of(one: object, body: Mapping[str, Any], place: str) -> str:
    """Return where `one`, an object at `place`, is: e.g. ``messages[0].content[1]``."""
    name, _, rest = place.partition(".")
    inner = body.get(name)
    for number, each in enumerate(inner if isinstance(inner, list) else ()):
        if each is one and not rest:
            return f"{name}[{number}]"
        if rest and isinstance(each, dict) and (found := path_of(one, each, rest)):
            return f"{name}[{number}].{found}"
    return ""
