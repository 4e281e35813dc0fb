"""The ledger: every budget of a server, and the one place where a request for text takes its part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stemma.budgets import TENANT_SHARE, Budget, BudgetState, Holding
from stemma.config.settings import Settings
from stemma.server.admission.rates import RateLimits
from stemma.server.tenants.keyfile import Tenant

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
        self.images = shared("image_bytes", "bytes of decoded images", settings.engine.images.memory)
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

    def reserve(self, tenant: Tenant | None, requests: Sequence[GenerationRequest]) -> Reserved:
        """Take what `requests` will need, until `Reserved.close`.

        Raises RateLimited or Overloaded, and InvalidRequest if a retry wouldn't help; then nothing is taken.
        """
        num_sequences = sum(map(num_sequences_of, requests))
        num_tokens = sum(self._most_output(one) for one in requests)
        owner = "" if tenant is None else tenant.name
        holding = Holding()
        try:
            holding.take(self.sequences, num_sequences, owner)
            holding.take(self.output_tokens, num_tokens, owner)
            if tenant is not None:
                num_prompt_tokens = sum(len(one.prompt_token_ids) for one in requests)
                self.rates.admit(tenant, num_prompt_tokens, num_sequences, num_tokens)
        except BaseException:
            holding.close()
            raise
        return Reserved(self.rates, tenant, num_sequences, num_tokens, holding)

    def reserve_call(self, tenant: Tenant | None) -> Reserved:
        """Take what a request needs that generates nothing, such as tokenizing: one of the tenant's requests.

        Raises RateLimited.
        """
        if tenant is not None:
            self.rates.admit(tenant, 0)
        return Reserved(self.rates, tenant, 1, 0, Holding())

    def _most_output(self, request: GenerationRequest) -> int:
        room = self._max_model_len - len(request.prompt_token_ids)
        wanted = request.params.max_tokens
        each = min(room, self._max_output_tokens, room if wanted is None else wanted)
        return max(0, each) * num_sequences_of(request)


class Reserved:
    """The shares of one request for text. `num_generated` is counted against the tenant's rate at the end."""

    def __init__(
        self,
        rates: RateLimits,
        tenant: Tenant | None,
        num_sequences: int,
        num_tokens: int,
        holding: Holding,
    ) -> None:
        self._rates = rates
        self._tenant = tenant
        self._num_sequences = num_sequences
        self._num_tokens = num_tokens
        self._holding: Holding | None = holding
        self.num_generated = 0

    def close(self) -> None:
        """Return what wasn't used; a second call does nothing."""
        if self._holding is None:
            return
        self._holding.close()
        self._holding = None
        if self._tenant is not None:
            self._rates.ended(self._tenant, self.num_generated, self._num_sequences, self._num_tokens)


def num_sequences_of(request: GenerationRequest) -> int:
    """Return how many sequences a request computes: `n`, `best_of`, or the width of its beam."""
    return request.params.n if request.beam is None else request.beam.width
