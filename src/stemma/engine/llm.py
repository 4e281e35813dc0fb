"""The offline API: `LLM(path).generate(prompts)`."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from pydantic import ValidationError

from stemma.config.loading import setting_fields
from stemma.config.settings import EngineSettings
from stemma.engine.api import CacheReport, EngineStats, GenerationRequest
from stemma.engine.beam_search import BeamSearch, Hypothesis
from stemma.engine.build import build_engine
from stemma.engine.core.validation import NO_IMAGES, CheckedRequest
from stemma.engine.depth_first import DepthFirst, token_key
from stemma.engine.offline import Completion, Generation, OfflineRun
from stemma.engine.output.output import OutputProcessor
from stemma.engine.pooling import Pooling, Vector
from stemma.engine.sampling.params import BeamParams, SamplingParams
from stemma.engine.scoring import pairs_of, scoring_of
from stemma.engine.step_thread import StepThread
from stemma.engine.supervisor import EngineSupervisor
from stemma.errors import ConfigError, InvalidRequest
from stemma.model.lora.adapter import Adapter
from stemma.model.vision.prompt import PromptImages
from stemma.prefix.keys import DEFAULT_NAMESPACE, Namespace
from stemma.types import TokenArray, as_tokens

Prompt: TypeAlias = str | Sequence[int]
"""Text, or token ids."""
Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""A conversation: ``[{"role": "user", "content": "..."}]``."""

LoraNames: TypeAlias = str | Sequence[str | None] | None
"""The name of an adapter for all prompts, or one for each; None: the model without an adapter."""


@dataclass(frozen=True, slots=True)
class Embedding:
    """The embedding of a prompt, and what was reused."""

    prompt_token_ids: TokenArray
    vector: Vector
    """[D], float32."""
    cache: CacheReport


@dataclass(frozen=True, slots=True)
class PairScore:
    """How well a document answers a query."""

    score: float
    """A probability if the model is a reranker, the cosine if it is an embedding model."""
    caches: tuple[CacheReport, ...]
    """Reports of reuse for the prompt of the pair, or for those of the query and of the document."""


class LLM:
    """A model and its prefix cache in this process. Not thread-safe, but any thread may call it.

    The model is loaded and runs on a thread of this object's own.

    Keyword arguments are the flat names of the engine's settings (`config/settings.py`), e.g.
    ``LLM("Qwen2.5-0.5B", kv_cache_memory="2GB", lora={"sql": "adapters/sql"})``.
    """

    def __init__(self, path: str | Path, **settings: Any) -> None:
        checked = engine_settings(path, **settings)
        self._supervisor = EngineSupervisor()
        self._thread = StepThread()
        parts = self._thread.call(lambda: build_engine(checked, supervisor=self._supervisor))
        self.engine = parts.engine
        """Its steps run on the thread of this object: read its state, but run requests with `generate`."""
        self.tokenizer = parts.tokenizer
        self.abilities = parts.model.abilities
        """What the model gives beside text, or instead."""
        self._rerank_tokens = checked.model.rerank_tokens
        self._images = parts.images
        self.adapters = parts.adapters
        """Adapters (LoRA) by name; they may be loaded and unloaded at any time."""
        self.default_sampling = SamplingParams(**parts.model.default_sampling)  # type: ignore[arg-type]
        """Sampling that the checkpoint's `generation_config.json` recommends."""
        self._processor = OutputProcessor(parts.tokenizer)
        self._num_requests = 0
        self._has_batch = False
        self._is_closed = False

    def close(self) -> None:
        """Write what the lower tiers have queued, close them, end the thread and other ranks.

        Optional without tiers. A second call does nothing.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._thread.call(self.engine.close)
        self._thread.close()
        self._supervisor.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        images: Sequence[Sequence[Any]] | None = None,
        namespace: Namespace = DEFAULT_NAMESPACE,
        lora: LoraNames = None,
    ) -> list[Generation]:
        """Continue each prompt; return the results in their order. One SamplingParams serves all.

        They run depth first over the tree of their beginnings, so that what several share is computed once
        with little memory for KV. Prompts and results are all held in memory: see `generate_batch`.

        `images` holds those of each prompt, which is then a text with a placeholder of the model for each:
        images of Pillow's, bytes of files, or ``data:`` URLs.

        `lora` names the adapter, or one for each prompt; None is the model without one. Raises InvalidRequest
        or PromptTooLong if a prompt can't be served, UnknownModel for a name of no adapter, and StemmaError
        if a step failed.
        """
        if images is None:
            return self._run(self._encode(prompts), params, namespace, lora)
        if self._images is None:
            raise InvalidRequest(NO_IMAGES, param="images")
        texts: list[Any] = [prompts] if _is_one_prompt(prompts) else list(prompts)
        seen = [self._images.text(text, some) for text, some in zip(texts, images, strict=True)]
        return self._run([one[0] for one in seen], params, namespace, lora, [one[1] for one in seen])

    def generate_batch(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | None = None,
        *,
        namespace: Namespace = DEFAULT_NAMESPACE,
        lora: str | None = None,
    ) -> Generator[tuple[int, Generation], None, None]:
        """Continue any number of prompts; yield each one's place and result as it ends.

        All prompts are read first, into a temporary file, and run depth first over the tree of their
        beginnings. Memory holds what runs at one time. Nothing else may run until the iterator has ended or
        is closed, which aborts what still runs. Errors as `generate`, those of a prompt before any runs.
        """
        if self._has_batch:
            raise InvalidRequest("finish or close the batch that is running first")
        params = params or self.default_sampling
        adapter = self._adapter(lora)
        prefix = f"{self._new_id()}-"

        def request(number: int, tokens: TokenArray) -> CheckedRequest:
            one = GenerationRequest(f"{prefix}{number}", tokens, params, namespace, adapter=adapter)
            return self.engine.checked(one)

        self._has_batch = True
        try:
            with closing(DepthFirst()) as ordered:
                for number, prompt in enumerate(prompts):
                    [tokens] = self._encode([prompt])
                    ordered.add(number, request(number, tokens).prompt_token_ids)
                requests = (request(*one) for one in ordered)
                for request_id, result in self._ended(requests):
                    yield int(request_id.removeprefix(prefix)), result
        finally:
            self._has_batch = False

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        namespace: Namespace = DEFAULT_NAMESPACE,
        lora: LoraNames = None,
    ) -> list[Generation]:
        """Answer each conversation, rendered by the checkpoint's chat template.

        The content of a message may be a list of parts: ``{"type": "text", "text": ...}``, and for models
        that read images ``{"type": "image", "image": ...}``, an image as `generate` takes it.
        """
        is_one = not messages or isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if is_one else messages
        if self._images is None:
            token_ids = [self.tokenizer.apply_chat_template(c) for c in conversations]
            return self._run(token_ids, params, namespace, lora)
        seen = [self._images.chat(one) for one in conversations]
        return self._run([one[0] for one in seen], params, namespace, lora, [one[1] for one in seen])

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        beam_width: int,
        max_tokens: int,
        *,
        length_penalty: float = 1.0,
        ignore_eos: bool = False,
        namespace: Namespace = DEFAULT_NAMESPACE,
        lora: str | None = None,
    ) -> list[Generation]:
        """Return the `beam_width` likeliest answers to each prompt that the search finds, best first.

        Log-probabilities are those of the raw distribution. Errors as `generate`.
        """
        beam = BeamParams(beam_width, length_penalty)
        params = SamplingParams(n=beam_width, max_tokens=max_tokens, ignore_eos=ignore_eos)
        requests = [
            GenerationRequest(
                self._new_id(), prompt, params, namespace, beam=beam, adapter=self._adapter(lora)
            )
            for prompt in self._encode(prompts)
        ]
        limits = self.engine.limits
        searches = [BeamSearch(r, limits.eos_token_ids, limits.max_tokens) for r in requests]
        reports: dict[str, CacheReport] = {}
        while open_searches := [(r, s) for r, s in zip(requests, searches, strict=True) if not s.is_done]:
            rounds = [(request, search, search.requests()) for request, search in open_searches]
            answers = iter(self._run_requests([one for _, _, asked in rounds for one in asked]))
            for request, search, asked in rounds:
                found = [next(answers) for _ in asked]
                reports.setdefault(request.request_id, found[0].cache)
                search.advance([one.completions[0].logprobs[0] for one in found])
        return [
            Generation(
                request.vocabulary_ids,
                [self._completion(i, one, request) for i, one in enumerate(search.result())],
                reports[request.request_id],
            )
            for request, search in zip(requests, searches, strict=True)
        ]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        namespace: Namespace = DEFAULT_NAMESPACE,
        lora: str | None = None,
    ) -> list[Embedding]:
        """Return the embedding of each prompt, in their order.

        `dimensions`: cut to so many numbers; None: whole. `normalize` None: to length 1 if the checkpoint
        says so. `prompt_name`: what the checkpoint puts before a text, by name; token ids are taken as they
        are.

        Raises InvalidRequest if the model makes no embeddings, or not such; further errors as `generate`.
        """
        embedding = self.abilities.embedding_format()
        embedding.check_dimensions(dimensions)
        before = embedding.prompt(prompt_name)
        batch: list[Any] = [prompts] if _is_one_prompt(prompts) else list(prompts)
        texts = [before + prompt if isinstance(prompt, str) else prompt for prompt in batch]
        found = self._pool(self._encode(texts), Pooling(embedding.kind), namespace, lora)
        return [
            Embedding(one.prompt_token_ids, embedding.finish(vector, dimensions, normalize), one.cache)
            for one, vector in found
        ]

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        namespace: Namespace = DEFAULT_NAMESPACE,
        lora: str | None = None,
    ) -> list[PairScore]:
        """Score pairs: each query with the document of the same place, or one query with all documents.

        `instruction` says what to look for; None: what the model was trained with. Raises InvalidRequest if
        the model can't rerank, or the numbers of texts differ; further errors as `generate`.
        """
        scoring = scoring_of(self.abilities, self.tokenizer, self._rerank_tokens)
        read = [scoring.texts(query, text, instruction) for query, text in pairs_of(queries, documents)]
        unique = list(dict.fromkeys(text for texts in read for text in texts))
        special = scoring.adds_special_tokens
        tokens = [self.tokenizer.encode(text, add_special_tokens=special) for text in unique]
        found = dict(zip(unique, self._pool(tokens, scoring.pooling, namespace, lora), strict=True))
        return [
            PairScore(
                scoring.score([found[text][1] for text in texts]),
                tuple(found[text][0].cache for text in texts),
            )
            for texts in read
        ]

    def stats(self) -> EngineStats:
        """Return the engine's counters and gauges."""
        return self.engine.stats()

    def _run(
        self,
        prompts: list[TokenArray],
        params: SamplingParams | Sequence[SamplingParams] | None,
        namespace: Namespace,
        lora: LoraNames,
        images: Sequence[PromptImages | None] | None = None,
    ) -> list[Generation]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or self.default_sampling] * len(prompts)
        if lora is None or isinstance(lora, str):
            lora = [lora] * len(prompts)
        seen = [None] * len(prompts) if images is None else images
        return self._run_requests(
            [
                GenerationRequest(
                    self._new_id(), prompt, one, namespace, adapter=self._adapter(name), images=of_prompt
                )
                for prompt, one, name, of_prompt in zip(prompts, params, lora, seen, strict=True)
            ]
        )

    def _pool(
        self, prompts: list[TokenArray], pooling: Pooling, namespace: Namespace, lora: str | None
    ) -> list[tuple[Generation, Vector]]:
        """Return the vector of each prompt."""
        params, adapter = SamplingParams(max_tokens=1, temperature=0.0), self._adapter(lora)
        found = self._run_requests(
            [
                GenerationRequest(self._new_id(), prompt, params, namespace, pooling=pooling, adapter=adapter)
                for prompt in prompts
            ]
        )
        return [(one, one.pooled) for one in found if one.pooled is not None]

    def _adapter(self, name: str | None) -> Adapter | None:
        return None if name is None else self.adapters.get(name)

    def _encode(self, prompts: Prompt | Sequence[Prompt]) -> list[TokenArray]:
        batch: list[Any] = [prompts] if _is_one_prompt(prompts) else list(prompts)
        return [self.tokenizer.encode(p) if isinstance(p, str) else as_tokens(p) for p in batch]

    def _new_id(self) -> str:
        self._num_requests += 1
        return f"offline-{self._num_requests}"

    def _completion(self, index: int, found: Hypothesis, request: GenerationRequest) -> Completion:
        assert request.beam is not None
        return Completion(
            index,
            found.text(self.tokenizer, request),
            list(found.token_ids),
            list(found.logprobs),
            found.finish_reason,
            found.stop_reason,
            found.score(request.beam.length_penalty),
        )

    def _run_requests(self, batch: Sequence[GenerationRequest]) -> list[Generation]:
        """Serve all to their end, depth first; return the results in their order."""
        if self._has_batch:
            raise InvalidRequest("finish or close the batch that is running first")
        checked = self._thread.call(lambda: [self.engine.checked(one) for one in batch])
        checked.sort(key=_depth_first)
        results = dict(self._ended(iter(checked)))
        return [results[one.request_id] for one in batch]

    def _ended(self, requests: Iterator[CheckedRequest]) -> Iterator[tuple[str, Generation]]:
        """Yield each request's id and result as it ends; abort those that haven't ended if closed before."""
        call, engine = self._thread.call, self.engine
        run = call(lambda: OfflineRun(engine, self._processor, self._supervisor, requests))
        try:
            while ended := call(lambda: self._until_ended(run)):
                yield from ended
        finally:
            call(run.close)

    def _until_ended(self, run: OfflineRun) -> list[tuple[str, Generation]]:
        """Run steps until requests end; return them, and none once all have. For the step thread."""
        ended: list[tuple[str, Generation]] = []
        while not ended and (run.has_work or self.engine.has_work) and not self._thread.is_interrupted:
            ended = run.step()
        return ended


def engine_settings(path: str | Path, **fields: Any) -> EngineSettings:
    """Sort flat keyword arguments into settings. Raises ConfigError for an unknown or bad one."""
    places = {name: f.path[1:] for name, f in setting_fields().items() if f.path[0] == "engine"}
    parts: dict[str, Any] = {"model": {"path": Path(path)}}
    del places["model"]
    for name, value in fields.items():
        if name not in places:
            raise ConfigError(f"unknown setting {name!r}; known: {', '.join(sorted(places))}")
        *tables, field_name = places[name]
        table = parts
        for part in tables:
            table = table.setdefault(part, {})
        table[field_name] = value
    try:
        return EngineSettings.model_validate(parts)
    except ValidationError as error:
        raise ConfigError(str(error)) from error


def _is_one_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Return whether this is text or a list of ids, not a list of prompts."""
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | np.integer))


def _depth_first(request: CheckedRequest) -> tuple[str, bytes]:
    """Return what sorts requests depth first over the trees of their beginnings, one for each adapter."""
    return "" if request.adapter is None else request.adapter.key, token_key(request.prompt_token_ids)
