"""What is signed of one answer: an in-toto Statement about the model, the prompt, how was drawn, and what.

Prompt, answers, images and rules of drawing are there as commitments: SHA-256 over a salt and the value. The
opening, with the values and the salt, stands in the statement, or beside the envelope (``hashed``): whoever
gets that may check the receipt, and nobody else learns a text. What was cached isn't in it: no answer depends
on it.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from stemma.engine.api import GenerationRequest
from stemma.server.observe.collected import CollectedSequence
from stemma_receipts import sampling
from stemma_receipts.errors import ReceiptError
from stemma_receipts.identity import Identity

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:stemma:receipt:v1"
_SALT_BYTES = 32
_OPENED = ("prompt", "answers", "rules", "images")


@dataclass(frozen=True, slots=True)
class Opening:
    """What the commitments of a receipt stand for."""

    salt: str
    """In hexadecimal."""
    prompt: list[int]
    """Ids, those of images included."""
    answers: list[list[int]]
    """Ids of each sequence, in their order."""
    rules: dict[str, Any]
    images: list[str]
    """Digests of the images, in their order."""

    @classmethod
    def read(cls, given: Any) -> Opening:
        """Return the opening in a JSON value. Raises ReceiptError."""
        if not isinstance(given, dict) or set(given) != {"salt", *_OPENED}:
            raise ReceiptError(f"an opening has the members salt, {', '.join(_OPENED)}")
        is_right = (
            isinstance(given["salt"], str)
            and are_ids(given["prompt"])
            and isinstance(given["answers"], list)
            and all(map(are_ids, given["answers"]))
            and isinstance(given["rules"], dict)
            and isinstance(given["images"], list)
        )
        if not is_right:
            raise ReceiptError("the opening's members have other types than they should")
        return cls(**given)

    def values(self) -> dict[str, Any]:
        """Return it for JSON; nothing is copied."""
        return {name: getattr(self, name) for name in ("salt", *_OPENED)}

    def commitments(self) -> dict[str, str]:
        """Return the commitments to its members, in hexadecimal."""
        return {name: self._commitment(name) for name in _OPENED}

    def _commitment(self, name: str) -> str:
        value = orjson.dumps(getattr(self, name), option=orjson.OPT_SORT_KEYS)
        return hashlib.sha256(f"{self.salt}\0{name}\0".encode() + value).hexdigest()


def are_ids(given: Any) -> bool:
    """Whether a value is a list of token ids."""
    return isinstance(given, list) and all(type(one) is int and 0 <= one < 1 << 31 for one in given)


def opening_of(request: GenerationRequest, sequences: Sequence[CollectedSequence]) -> Opening:
    """Return the opening of a request that was answered."""
    images = () if request.images is None else request.images.images
    return Opening(
        secrets.token_hex(_SALT_BYTES),
        request.prompt_token_ids.tolist(),
        [one.token_ids for one in sequences],
        sampling.rules(request.params),
        [one.digest.hex() for one in images],
    )


def statement_of(
    identity: Identity,
    request: GenerationRequest,
    sequences: Sequence[CollectedSequence],
    opening: Opening,
    *,
    is_open: bool,
) -> bytes:
    """Return the statement about a request that was answered, as JSON."""
    commitments = opening.commitments()
    predicate: dict[str, Any] = {
        "id": request.request_id,
        "model": asdict(identity),
        "adapter": request.namespace.adapter or None,
        "sampling": sampling.numbers(request.params),
        "prompt_tokens": len(request.prompt_token_ids),
        "answers": [{"tokens": len(one.token_ids), "finish_reason": one.finish_reason} for one in sequences],
        "commitments": commitments,
    }
    if is_open:
        predicate["opening"] = opening.values()
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": request.request_id, "digest": {"sha256": commitments["answers"]}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": predicate,
    }
    return orjson.dumps(statement, option=orjson.OPT_SORT_KEYS)


@dataclass(frozen=True, slots=True)
class ToldReceipt:
    """What a receipt tells, once it was opened."""

    id: str
    model: Identity
    adapter: str | None
    sampling: Mapping[str, Any]
    finish_reasons: tuple[str | None, ...]
    opening: Opening


def told_by(payload: bytes, beside: Any) -> ToldReceipt:
    """Return what a signed statement tells; `beside`: the opening that stands beside the envelope, if any.

    Raises ReceiptError, also for an opening of another receipt.
    """
    try:
        statement = orjson.loads(payload)
        if statement["_type"] != STATEMENT_TYPE or statement["predicateType"] != PREDICATE_TYPE:
            raise ReceiptError("the statement is no receipt of this version")
        predicate = statement["predicate"]
        given = predicate.get("opening", beside)
        if given is None:
            raise ReceiptError("prompt and answer are hashed: who holds the opening can check it")
        opening, answers = Opening.read(given), predicate["answers"]
        if opening.commitments() != predicate["commitments"]:
            raise ReceiptError("the opening isn't of this receipt: its hashes are others")
        if len(answers) != len(opening.answers):
            raise ReceiptError("the receipt is broken: it has other answers than it says")
        return ToldReceipt(
            str(predicate["id"]),
            Identity(**predicate["model"]),
            predicate["adapter"],
            predicate["sampling"],
            tuple(one["finish_reason"] for one in answers),
            opening,
        )
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise ReceiptError(f"the statement can't be read: {type(error).__name__}: {error}") from error
