"""From a file of receipts to the result for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from stemma.cli.progress import StepCounter, open_progress
from stemma_receipts.envelope import opened
from stemma_receipts.errors import ReceiptError
from stemma_receipts.keys import read_public_key
from stemma_receipts.reading import read_receipts
from stemma_receipts.statement import ToldReceipt, told_by
from stemma_receipts.verifier import Checked, CheckOutcome, Verifier


def check_files(
    path: Path,
    key: Path,
    model: Path,
    *,
    share: float,
    chance: Random,
    adapters: Mapping[str, Path],
    images: Sequence[Path],
    **settings: Any,
) -> list[Checked]:
    """Return the result for each receipt of a file that was chosen, `share` of them and one at least.

    Raises ReceiptError if there is none or a line can't be read; ConfigError, ModelError.
    """
    public = read_public_key(key)
    signed = list(read_receipts(path))
    if not signed:
        raise ReceiptError(f"there is no receipt in {path}")
    chosen = sorted(chance.sample(range(len(signed)), max(1, round(share * len(signed)))))
    found: dict[int, Checked] = {}
    told: dict[int, ToldReceipt] = {}
    for number in chosen:
        one = signed[number]
        try:
            payload = opened(one.envelope, public)
        except ReceiptError as error:
            found[number] = Checked(f"line {one.line}", CheckOutcome.DIFFERS, str(error))
            continue
        try:
            told[number] = told_by(payload, one.opening)
        except ReceiptError as error:
            found[number] = Checked(f"line {one.line}", CheckOutcome.UNCHECKED, str(error))
    if told:
        checked = _computed(list(told.values()), model, adapters, images, settings)
        found |= dict(zip(told, checked, strict=True))
    return [found[number] for number in chosen]


def _computed(
    receipts: Sequence[ToldReceipt],
    model: Path,
    adapters: Mapping[str, Path],
    images: Sequence[Path],
    settings: Mapping[str, Any],
) -> list[Checked]:
    verifier = Verifier(model, receipts[0].model, adapters=adapters, images=images, **settings)
    try:
        with open_progress("receipts") as progress:
            counter = StepCounter(progress, "receipts", len(receipts))
            return verifier.check(receipts, counter.advance)
    finally:
        verifier.close()
