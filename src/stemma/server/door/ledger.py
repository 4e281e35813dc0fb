"""The ledger: every budget of a server, and the one place where a request for text takes its part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stemma.budgets import TENANT_SHARE, Budget, BudgetState, Holding
from stemma.config.settings import Settings
from stemma.errors import InvalidRequest, OverBudget
from stemma.server.door.answer_memory import NOTHING_ELSE, AnswerSize, PromptTold, TokenSize
from stemma.server.door.keyfile import Tenant
from stemma.server.door.rates import RateLimits

if TYPE_CHECKING:  # proxies need budgets, and no torch
    from stemma.engine.api import GenerationRequest
    from stemma.engine.client import EngineClient


def shared(name: str, unit: str, limit: int) -> Budget:
    """Return a budget of which a tenant may hold its part."""
    return Budget(name, unit, limit, max(1, int(TENANT_SHARE * limit)))


class Admission:
    """The budgets of one server. For one event loop, but for what `Budget` guards."""

    def __init__(self, settings: Settings, engine: EngineClient) -> None:
        scheduler = settings.engine.scheduler
        self._max_model_len = engine.max_model_len
        self._max_output_tokens = settings.requests.max_output_tokens or engine.max_model_len
        num_sequences = scheduler.max_waiting + scheduler.seats
        self.bodies = shared("body_bytes", "bytes of request bodies", settings.server.body_memory)
        self.images = shared("image_bytes", "bytes of images", settings.engine.images.memory)
        self.answers = shared(
            "answer_bytes", "bytes of answers, beside their text", settings.server.answer_memory
        )
        self.token = TokenSize.of(engine.tokenizer)
        """The most that a token of an answer takes."""
        self._max_answer_bytes = settings.requests.max_answer_bytes
        self.tokenizing = shared(
            "tokenizing_queue", "prompts that wait to be tokenized", max(1, scheduler.max_waiting)
        )
        self.sequences = shared("sequences", "sequences that run or wait", num_sequences)
        self.output_tokens = shared(
            "output_tokens", "tokens reserved for answers", num_sequences * engine.max_model_len
        )
        self.rates = RateLimits()
        self._budgets = [
            self.bodies,
            self.answers,
            self.images,
            self.tokenizing,
            self.sequences,
            self.output_tokens,
            *engine.budgets,
        ]

    def add(self, *budgets: Budget) -> None:
        """List budgets that others keep, such as that of a port's connections."""
        self._budgets.extend(budgets)

    def states(self) -> list[BudgetState]:
        """Return every budget as it is now."""
        return [budget.state() for budget in self._budgets]

    def enter(self, tenant: Tenant | None) -> Reserved:
        """Count a request in, before its body is read: one of the tenant's. Raises RateLimited."""
        if tenant is not None:
            self.rates.widen(tenant, 0, 1, least_tokens=1)
        return Reserved(self, tenant)

    def size_of(self, request: GenerationRequest, told: PromptTold = NOTHING_ELSE) -> AnswerSize:
        """Return the most that the answer to `request` may take."""
        num_sequences, num_tokens = num_sequences_of(request), self.most_output(request)
        return AnswerSize.of(request, num_sequences, num_tokens, told, self.token)

    def hold(self, size: AnswerSize, owner: str, holding: Holding) -> None:
        """Take the bytes of an answer into `holding`, which is closed once they have left.

        Raises RateLimited or Overloaded, and InvalidRequest for an answer that is larger than any may be.
        """
        most = min(self._max_answer_bytes, self.answers.most(owner))
        if size.num_bytes > most:
            raise InvalidRequest(
                f"the answer may take {size.num_bytes} bytes, and {most} are allowed (--max-answer-bytes, "
                f"--answer-memory); {size.largest} asks for most of it: ask for less of it, for fewer "
                "choices, or set a lower max_tokens",
                param=size.largest,
            )
        holding.take(self.answers, size.beside_text, owner)

    def most_output(self, request: GenerationRequest) -> int:
        """Return the most tokens that `request` may generate, over all sequences."""
        room = self._max_model_len - len(request.prompt_token_ids)
        wanted = request.params.max_tokens
        each = min(room, self._max_output_tokens, room if wanted is None else wanted)
        return max(0, each) * num_sequences_of(request)


class Reserved:
    """What one request has taken: a place among its tenant's, then sequences, tokens, and its answer's bytes.

    `num_generated` is counted against the tenant's rate at the end.
    """

    def __init__(self, admission: Admission, tenant: Tenant | None) -> None:
        self._admission = admission
        self._tenant = tenant
        self._owner = "" if tenant is None else tenant.name
        self._num_counted = 1
        """Sequences that count as the tenant's requests."""
        self._num_sequences = 0
        self._num_tokens = 0
        self._holding: Holding | None = Holding()
        self.num_generated = 0

    def widen(self, num_sequences: int) -> None:
        """Take sequences until there are so many: known before prompts are tokenized, so refused before.

        Raises RateLimited or Overloaded: then the request counts as none of the tenant's. Raises
        InvalidRequest if a retry wouldn't help.
        """
        assert self._holding is not None
        try:
            if (more := num_sequences - self._num_sequences) > 0:
                self._holding.take(self._admission.sequences, more, self._owner)
                self._num_sequences = num_sequences
            if self._tenant is not None and num_sequences > self._num_counted:
                self._admission.rates.widen(self._tenant, self._num_counted, num_sequences)
                self._num_counted = num_sequences
        except OverBudget:
            if self._tenant is not None:
                self._admission.rates.forget(self._tenant, self._num_counted)
            raise

    def reserve(
        self, requests: Sequence[GenerationRequest], told: Sequence[PromptTold], answer: Holding
    ) -> None:
        """Take what `requests` will need, and into `answer` the bytes of theirs, which leave later.

        Raises RateLimited or Overloaded, and InvalidRequest if a retry wouldn't help.
        """
        assert self._holding is not None
        admission = self._admission
        sizes = [admission.size_of(*one) for one in zip(requests, told, strict=True)]
        self.widen(sum(map(num_sequences_of, requests)))
        admission.hold(AnswerSize.sum(sizes), self._owner, answer)
        num_tokens = sum(map(admission.most_output, requests))
        self._holding.take(admission.output_tokens, num_tokens, self._owner)
        if self._tenant is not None:
            num_prompt_tokens = sum(len(one.prompt_token_ids) for one in requests)
            admission.rates.charge(self._tenant, num_prompt_tokens, num_tokens)
        self._num_tokens = num_tokens

    def close(self) -> None:
        """Return what wasn't used; a second call does nothing."""
        if self._holding is None:
            return
        self._holding.close()
        self._holding = None
        if self._tenant is not None:
            rates = self._admission.rates
            rates.ended(self._tenant, self.num_generated, self._num_counted, self._num_tokens)


def num_sequences_of(request: GenerationRequest) -> int:
    """Return how many sequences a request computes: `n`, `best_of`, or the width of its beam."""
    return request.params.n if request.beam is None else request.beam.width
