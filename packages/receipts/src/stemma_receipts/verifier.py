"""Computes what receipts tell of, again, and compares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from stemma.engine.api import GenerationRequest
from stemma.engine.build import EngineParts, assemble_engine
from stemma.engine.core.validation import CheckedRequest
from stemma.engine.llm import engine_settings
from stemma.engine.offline import Completion, Generation, OfflineRun
from stemma.engine.output.output import OutputProcessor
from stemma.engine.preflight import check_engine
from stemma.engine.supervisor import EngineSupervisor
from stemma.errors import ConfigError, InvalidRequest, StemmaError
from stemma.model.load.loading import load_model
from stemma.model.load.located import located_path
from stemma.model.lora.adapter import Adapter
from stemma.model.text.tokenizer import Tokenizer
from stemma.model.vision.prompt import PromptImages
from stemma.prefix.image_ids import FIRST_IMAGE_ID
from stemma.prefix.keys import Namespace
from stemma.types import TokenArray, as_tokens
from stemma_receipts.identity import Identity, identity_of, level_of
from stemma_receipts.known_answers import KnownAnswers
from stemma_receipts.sampling import params_of
from stemma_receipts.statement import ToldReceipt

_SETTINGS = {"dtype", "quantize", "quantize_group_size", "kv_cache_dtype", "max_model_len"}


class CheckOutcome(StrEnum):
    """What became of a check."""

    SAME = "same"
    DIFFERS = "differs"
    UNCHECKED = "can't be checked here"


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of checking one receipt."""

    id: str
    outcome: CheckOutcome
    why: str = ""
    num_tokens: int = 0
    """Tokens of its answers."""


class Verifier:
    """Checks receipts with one model. Not thread-safe; `close` ends it."""

    def __init__(
        self,
        model: Path,
        first: Identity,
        *,
        adapters: Mapping[str, Path] | None = None,
        images: Sequence[Path] = (),
        **settings: Any,
    ) -> None:
        """Load `model` as `first` says that it was computed; `settings`: others of the engine.

        Raises ConfigError, ModelError.
        """
        self._known, self._supervisor, self._number = KnownAnswers(), EngineSupervisor(), 0
        if not set(first.settings) <= _SETTINGS:
            raise ConfigError("the receipt names settings that this version doesn't know")
        asked = {name: value for name, value in first.settings.items() if value is not None}
        asked |= {"isa": level_of(first.computation), "device": "cpu", "lora": dict(adapters or {})}
        checked = check_engine(engine_settings(located_path(model), **asked, **settings), None)
        loaded = load_model(checked.model)
        tokenizer = Tokenizer(checked.model.path)
        self._parts: EngineParts = assemble_engine(
            checked, loaded, tokenizer, self._supervisor, drafter=self._known
        )
        engine, space = self._parts.engine, self._parts.key_space
        self.identity = identity_of(checked, first.name, tokenizer, space, engine.limits.max_tokens)
        self._adapters = {one.key: one for one in map(self._parts.adapters.get, adapters or {})}
        self._pictures = [self._read(path) for path in images]

    def close(self) -> None:
        """Free what the engine holds."""
        self._parts.engine.close()
        self._supervisor.close()

    def check(
        self, receipts: Sequence[ToldReceipt], tell: Callable[[], object] = lambda: None
    ) -> list[Checked]:
        """Return the result for each receipt, in their order; `tell` is called as each is done."""
        found: dict[int, Checked] = {}
        asked: dict[str, tuple[int, ToldReceipt]] = {}
        requests: list[CheckedRequest] = []
        for number, told in enumerate(receipts):
            try:
                requests.append(self._request(told))
            except _Unlike as error:
                found[number] = Checked(told.id, CheckOutcome.UNCHECKED, str(error))
                tell()
            else:
                asked[requests[-1].request_id] = number, told
        for request_id, generation in self._answered(iter(requests)):
            number, told = asked[request_id]
            found[number] = _compared(told, generation)
            tell()
        return [found[number] for number in range(len(receipts))]

    def _answered(self, requests: Iterator[CheckedRequest]) -> Iterator[tuple[str, Generation]]:
        processor = OutputProcessor(self._parts.tokenizer)
        run = OfflineRun(self._parts.engine, processor, self._supervisor, requests)
        try:
            while run.has_work:
                yield from run.step()
        finally:
            run.close()

    def _request(self, told: ToldReceipt) -> CheckedRequest:
        """Return what computes a receipt's answers again. Raises _Unlike."""
        self._compare(told.model)
        adapter = self._adapter(told.adapter)
        try:
            params = params_of(told.sampling, told.opening.rules, self._parts.tokenizer.spelling)
            tokens, images = self._prompt(told)
            longest = 1 + max(map(len, told.opening.answers), default=0)
            # A wrong answer needn't be written to its end.
            most = longest if params.max_tokens is None else min(params.max_tokens, longest)
            params = replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))
            self._number += 1
            salt = f"receipt {self._number}"
            self._known.know(salt, len(tokens), self._drafts(told))
            request = GenerationRequest(
                salt, tokens, params, Namespace(salt=salt), adapter=adapter, images=images
            )
            return self._parts.engine.checked(request)
        except StemmaError as error:
            raise _Unlike(str(error)) from error

    def _drafts(self, told: ToldReceipt) -> list[list[int]]:
        """Return a receipt's answers, each up to an id that no model draws."""
        size = self._parts.model.vocab_size
        return [list(takewhile(lambda one: one < size, answer)) for answer in told.opening.answers]

    def _compare(self, theirs: Identity) -> None:
        """Raise _Unlike if another model, or another path, would compute."""
        ours = self.identity
        for what in ("weights", "tokenizer", "template"):
            mine, other = getattr(ours, what), getattr(theirs, what)
            if mine != other:
                raise _Unlike(f"another {what}: {str(other)[:16]} signed, {str(mine)[:16]} here")
        if ours.computation != theirs.computation:
            raise _Unlike(f"another numeric path: {theirs.computation!r} signed, {ours.computation!r} here")
        if ours.settings != theirs.settings:
            raise _Unlike(f"other settings: {theirs.settings} signed, {ours.settings} here")

    def _adapter(self, key: str | None) -> Adapter | None:
        if key is None:
            return None
        if key not in self._adapters:
            raise _Unlike(f"the adapter {str(key)[:16]} isn't here: give it by --lora")
        return self._adapters[key]

    def _prompt(self, told: ToldReceipt) -> tuple[TokenArray, PromptImages | None]:
        """Return a receipt's prompt, with its images. Raises _Unlike, InvalidRequest."""
        tokens = as_tokens(told.opening.prompt)
        if not told.opening.images:
            return tokens, None
        reader, by_digest = self._parts.images, {one.digest.hex(): one for one in self._pictures}
        lacking = [one for one in told.opening.images if one not in by_digest]
        if reader is None or lacking:
            raise _Unlike(f"{len(lacking)} images of the prompt aren't here: give them by --image")
        plain = np.where(tokens >= FIRST_IMAGE_ID, np.int32(reader.placeholder_id), tokens)
        pictures = [by_digest[one] for one in told.opening.images]
        placed, images = reader.place(as_tokens(plain), pictures)
        if not np.array_equal(placed, tokens):
            raise InvalidRequest("the images don't stand in the prompt as the receipt says")
        return placed, images

    def _read(self, path: Path) -> Any:
        if self._parts.images is None:
            raise ConfigError("the model reads no images: leave out --image")
        try:
            return self._parts.images.read_bytes(path.read_bytes(), path.name)
        except OSError as error:
            raise ConfigError(f"can't read the image {path}: {error.strerror}") from error


class _Unlike(StemmaError):
    """Why a receipt can't be checked with this model."""


def _compared(told: ToldReceipt, generation: Generation) -> Checked:
    """Return the result for a receipt whose answers were computed again."""
    answers = told.opening.answers
    num_tokens = sum(map(len, answers))
    for index, (answer, reason) in enumerate(zip(answers, told.finish_reasons, strict=True)):
        if index >= len(generation.completions):
            return Checked(told.id, CheckOutcome.DIFFERS, f"answer {index + 1} was never asked for")
        why = _difference(answer, reason, generation.completions[index])
        if why is not None:
            return Checked(told.id, CheckOutcome.DIFFERS, why, num_tokens)
    if len(generation.completions) > len(answers):
        return Checked(told.id, CheckOutcome.DIFFERS, f"answer {len(answers) + 1} is missing", num_tokens)
    return Checked(told.id, CheckOutcome.SAME, "", num_tokens)


def _difference(answer: Sequence[int], reason: str | None, found: Completion) -> str | None:
    """Return where an answer differs from the one computed; None: nowhere."""
    for number, (signed, drawn) in enumerate(zip(answer, found.token_ids, strict=False), 1):
        if signed != drawn:
            return f"at token {number}: {signed} signed, {drawn} computed"
    if len(answer) != len(found.token_ids):
        return f"at token {min(len(answer), len(found.token_ids)) + 1}: one of both ends there"
    if reason != found.finish_reason:
        return f"at its end: {reason} signed, {found.finish_reason} computed"
    return None
