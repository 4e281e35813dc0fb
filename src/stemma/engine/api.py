"""Requests and results of the engine: plain data, shared by `LLM`, server and tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from stemma.engine.pooling import Pooling, Vector
from stemma.engine.sampling.logprobs import TokenLogprob
from stemma.engine.sampling.params import BeamParams, SamplingParams
from stemma.engine.sampling.prompt_logprobs import PromptLogprobs
from stemma.errors import GenerationFailed, StemmaError
from stemma.memory.tiers.tier_stats import TransferStats
from stemma.model.lora.adapter import Adapter
from stemma.model.vision.prompt import PromptImages, vocabulary_ids
from stemma.prefix.explain import Parting
from stemma.prefix.keys import DEFAULT_NAMESPACE, Namespace
from stemma.types import NO_RETENTION, FinishReason, Retention, Tier, TokenArray


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt and how to continue it."""

    request_id: str
    prompt_token_ids: TokenArray
    params: SamplingParams = field(default_factory=SamplingParams)
    namespace: Namespace = DEFAULT_NAMESPACE
    retention: Retention = NO_RETENTION
    """Hints of how long the blocks that it commits should stay."""
    beam: BeamParams | None = None
    """Search instead of sampling. For `beam_search.run_beam_search`: engines refuse it."""
    pooling: Pooling | None = None
    """One vector of the prompt is wanted and no answer, whatever `params` say of its length. None: an answer
    is."""
    adapter: Adapter | None = None
    """Adapter to answer with; `namespace.adapter` becomes its key. None: the base model."""
    session: str = ""
    """What the client calls its conversation; the device's eviction policy and recordings learn it as a hash.
    No answer depends on it."""
    roles: tuple[str, ...] = ()
    """Who says each message of the prompt, where it has messages; recorded, without effect on the answer."""
    is_continuation: bool = False
    """Continues a request that was admitted and counted: a full queue or a drain doesn't refuse it, and its
    prompt is not counted again. Others are likely to continue it in turn: its blocks wait for them until the
    next step."""
    images: PromptImages | None = None
    """Those that ids of images in the prompt stand for; None: it has none."""
    is_preparation: bool = False
    """Nobody waits for it: its prompt is computed while nothing else runs or waits. No count knows of it."""
    shows_steps: bool = False
    """Where several steps are delivered together, its outputs have a delta for each."""

    def __post_init__(self) -> None:
        key = "" if self.adapter is None else self.adapter.key
        if self.namespace.adapter != key:
            object.__setattr__(self, "namespace", replace(self.namespace, adapter=key))

    @property
    def vocabulary_ids(self) -> TokenArray:
        """The prompt with the model's placeholder where ids of images stand: ids of the vocabulary alone."""
        if self.images is None:
            return self.prompt_token_ids
        return vocabulary_ids(self.prompt_token_ids, self.images)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What idle time did for a prompt that may come."""

    num_cached_tokens: int = 0
    """Leading tokens that were cached before."""
    num_tokens: int = 0
    """Leading tokens that are cached afterwards."""
    was_cut: bool = False
    """A request came, or the engine was stopped, before the end."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that were computed for it."""
        return self.num_tokens - self.num_cached_tokens


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How far a prompt has come that was queued."""

    num_prompt_tokens: int
    num_cached_tokens: int = 0
    """Leading tokens served from cache; 0 while it waits for a seat."""
    num_processed_tokens: int = 0
    """Leading tokens whose KV is there, cached ones included."""


@dataclass(frozen=True, slots=True)
class CacheReport:
    """The reuse of one request: tokens by tier, and why the rest was not reused.

    `num_cached_tokens` is the sum over tiers; the prompt's other tokens were computed.
    """

    num_prompt_tokens: int
    cached_by_tier: dict[Tier, int] = field(default_factory=dict)
    miss_reason: str | None = None
    """Machine-readable reason for the first token not served from cache (`prefix/explain.py`)."""
    miss_detail: str | None = None
    """The same in a sentence."""
    num_public_tokens: int = 0
    """Cached tokens that belong to a published prefix, which all namespaces share."""
    num_exact_history_tokens: int = 0
    """Prompt tokens of earlier answers that are as they were generated, where the text alone may be tokenized
    otherwise. Cached or not."""
    num_prepared_tokens: int = 0
    """Cached tokens that idle time computed for this prompt; 0 for those that find them again."""
    parting: Parting | None = None
    """How the nearest cached sequence of the same namespace goes on where the prompt parts from it."""
    num_tokens_of_others: int = 0
    """Leading tokens that another tenant or salt has cached, where that is more. Only for the operator."""
    num_cached_tokens: int = field(init=False)
    """Leading prompt tokens served from any tier."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_cached_tokens", sum(self.cached_by_tier.values()))


DRAFT_SOURCES = ("mtp", "tree", "prompt_lookup", "la", "grammar")
"""Where drafts come from, as `speculation` names it; ``grammar``: tokens that a request's grammar forces."""


@dataclass(frozen=True, slots=True)
class DraftCount:
    """Draft tokens: verified, and of these those that held."""

    num_proposed: int = 0
    num_accepted: int = 0

    def plus(self, num_proposed: int, num_accepted: int) -> DraftCount:
        """Return the sum."""
        return DraftCount(self.num_proposed + num_proposed, self.num_accepted + num_accepted)


@dataclass(frozen=True, slots=True)
class SequenceDelta:
    """News of one of the `n` sequences of a request since the last output."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    """New text, whole characters only; joined over all deltas it is the full text."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it; None for EOS."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One message of the engine about a request. `finished` is True on the last one."""

    request_id: str
    deltas: tuple[SequenceDelta, ...]
    """One for each sequence that has news; one for each step of it if the request `shows_steps`."""
    cache: CacheReport
    """Known from the first output on."""
    finished: bool
    num_generated_tokens: int
    """Over all sequences so far."""
    queue_wait_s: float = 0.0
    """From arrival to the first step."""
    load_s: float = 0.0
    """The part of it from a seat in the batch until the blocks of lower tiers had been loaded."""
    drafts: Mapping[str, DraftCount] = field(default_factory=dict)
    """Draft tokens so far by source (`DRAFT_SOURCES`), of all sequences."""
    error: str | None = None
    """Set if the engine failed on this request (finish reason ERROR)."""
    error_type: type[StemmaError] = GenerationFailed
    """Type of `error`."""
    prompt_logprobs: PromptLogprobs | None = None
    """On every output of a request that wants them, unless it failed early."""
    pooled: Vector | None = None
    """On the last output of a request with `pooling`, unless it failed: hidden states [H] or logits [K]."""

    def raise_error(self) -> None:
        """Raise `error`, if it is set."""
        if self.error is not None:
            raise self.error_type(self.error)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is, and how fast: what routers go by."""

    num_seats: int
    """Sequences that may run at once."""
    num_running: int = 0
    num_waiting: int = 0
    kv_in_use: float = 0.0
    """Share of the device's blocks that running requests and pins hold."""
    prefill_s_per_token: float | None = None
    """None: not measured yet."""
    row_s: float | None = None
    """Seconds that one more answer adds to a step of decodes; None: not measured yet."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start and gauges now; what `/metrics` shows."""

    num_running: int
    num_waiting: int
    num_preemptions: int
    num_prompt_tokens: int
    """Prompt tokens of requests that started, cached or not; a preempted request counts once."""
    num_generated_tokens: int
    cached_tokens_by_tier: dict[Tier, int]
    num_blocks: int
    """Blocks of the device tier."""
    num_free_blocks: int
    num_cached_blocks: int
    """Device blocks in the index, pinned or not."""
    num_evicted_blocks: int
    misses_by_reason: dict[str, int]
    """Requests by `CacheReport.miss_reason`."""
    transfer: TransferStats | None = None
    """The tiers below the device; None if there are none."""
    num_draft_tokens: int = 0
    """Draft tokens verified."""
    num_accepted_draft_tokens: int = 0
    """Drafted tokens that held: each saved a step of its sequence."""
    drafts_by_source: dict[str, DraftCount] = field(default_factory=dict)
    """Both by the source of the draft, one of `DRAFT_SOURCES`."""
    num_policy_failures: int = 0
    """Times that an eviction policy of the device tier raised and LRU ranked instead."""
    num_regretted_blocks: int = 0
    """Evicted device blocks that were computed or loaded again within a minute."""
    num_blocks_ahead: int = 0
    """Blocks that idle time loaded to the device before the turn that may use them."""
    num_used_ahead: int = 0
    """Of these, blocks that a request used there."""
    num_wasted_ahead: int = 0
    """Of these, blocks that left the device unused."""
    num_checkpoints: int = 0
    """Recurrent states and windows of KV that are kept on the device for later prompts."""
    num_evicted_checkpoints: int = 0
    num_encoded_images: int = 0
    """Images that the vision encoder computed."""
    num_reused_images: int = 0
    """Images whose vectors were kept from before, where their KV wasn't."""
    image_cache_bytes: int = 0
    """Memory of the vectors that are kept."""
    prefill_s_per_token: float | None = None
    """As `EngineLoad` has it."""
