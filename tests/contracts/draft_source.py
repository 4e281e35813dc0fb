"""What every draft source must do. Inherit `DraftSourceContract` and provide `make_source`."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt
import pytest

from stemma.engine.drafts.adaptive import PRIORS
from stemma.engine.drafts.source import DraftSource, num_accepted
from stemma.types import as_tokens

PERIOD = (5, 9, 2, 7, 7, 3, 11, 4)


class DraftSourceContract(ABC):
    @abstractmethod
    def make_source(self) -> DraftSource:
        """Return a source for a new sequence of the default namespace."""

    def decode(self, text: npt.NDArray[np.int32], num_prompt: int, max_tokens: int) -> tuple[int, int]:
        """Decode `text`, which the model is certain about; return steps taken and tokens proposed."""
        source = self.make_source()
        position, num_steps, num_proposed = num_prompt, 0, 0
        while position < len(text):
            before = text[:position].copy()
            proposal = source.propose(text[:position], min(max_tokens, len(text) - position - 1))
            assert np.array_equal(text[:position], before)
            draft = proposal.token_ids if proposal else ()
            assert len(draft) <= max_tokens
            assert all(type(token) is int for token in draft)
            if proposal is not None:
                assert proposal.token_ids
                assert proposal.evidence in PRIORS
            drawn = text[position : position + len(draft) + 1].tolist()
            if draft:
                source.observe(text[:position], draft, drawn)
            num_proposed += len(draft)
            position += num_accepted(draft, drawn) + 1
            num_steps += 1
        assert position == len(text)
        return num_steps, num_proposed

    @pytest.mark.parametrize("max_tokens", [1, 3, 16])
    def test_drafts_are_bounded_and_named(self, max_tokens: int) -> None:
        generator = np.random.default_rng(0)
        self.decode(as_tokens(generator.integers(0, 12, 300)), 5, max_tokens)

    def test_no_room_no_draft(self) -> None:
        assert self.make_source().propose(as_tokens(PERIOD * 3), 0) is None
