"""Requests that combine features at random, and engines that serve them one step after the other.

Everything follows from a seed: which features a request has, when it arrives, when it is aborted.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np

from stemma.engine.api import GenerationRequest, RequestOutput
from stemma.engine.beam_search import BeamSearch
from stemma.engine.build import EngineParts
from stemma.engine.core.step_rows import StepRows
from stemma.engine.output.output import OutputProcessor
from stemma.engine.pooling import Pooling
from stemma.engine.sampling.grammar import GrammarSpec
from stemma.engine.sampling.logprobs import TokenLogprob
from stemma.engine.sampling.params import BeamParams, SamplingParams
from stemma.engine.sampling.prompt_logprobs import PromptLogprobs
from stemma.engine.sampling.thinking import ThinkingMarks, ThinkingTokens
from stemma.memory.cache.lease import Lease
from stemma.model.vision.prompt import PromptImages
from stemma.server.answers.logprobs import keep_best
from stemma.server.observe.collected import CollectedSequence
from stemma.types import FinishReason, Retention, RetentionHint, RetentionRange, TokenArray, as_tokens
from tests.vision_checkpoints import picture

ENDS = [2, *range(461, 512, 2)]
"""Token ids that end a text: enough of them that some answers end by themselves, none that grammars need."""
ADAPTERS = ("one", "two")
MAX_STEPS = 5_000
IMAGE_AT = 10
"""Tokens of a prompt before its picture."""
GRAMMARS = (
    GrammarSpec("regex", "a(b|c)?"),
    GrammarSpec("regex", "([0-9]{2}: abcdefgh, ){1,2}"),
    GrammarSpec("choice", '["yes", "no", "a longer answer"]'),
    GrammarSpec("json_schema", '{"type": "object", "properties": {"a": {"type": "boolean"}}}'),
)

Fields = dict[str, Any]
"""Fields of `Ask` (`adapter` ...) and, below ``params``, of `SamplingParams`."""


def _adapter(rng: random.Random, fields: Fields) -> None:
    fields["adapter"] = rng.choice(ADAPTERS)


def _prompt_logprobs(rng: random.Random, fields: Fields) -> None:
    fields["params"]["prompt_logprobs"] = rng.choice((0, 1, 3))


def _logprobs(rng: random.Random, fields: Fields) -> None:
    fields["params"]["logprobs"] = rng.choice((0, 2, 5))


def _grammar(rng: random.Random, fields: Fields) -> None:
    fields["params"] |= {"grammar": rng.choice(GRAMMARS), "max_tokens": 24}


def _min_tokens(rng: random.Random, fields: Fields) -> None:
    most = fields["params"]["max_tokens"]
    fields["params"]["min_tokens"] = rng.choice((rng.randint(1, most), most))


def _stop(rng: random.Random, fields: Fields) -> None:
    fields["params"] |= {
        "stop": (*rng.sample("aeinorst", 3), "the"),
        "include_stop_str_in_output": rng.random() < 0.5,
    }


def _stop_ids(rng: random.Random, fields: Fields) -> None:
    fields["params"]["stop_token_ids"] = tuple(rng.sample(range(3, 460), 40))


def _penalties(rng: random.Random, fields: Fields) -> None:
    names = rng.sample(("repetition_penalty", "frequency_penalty", "presence_penalty"), rng.randint(1, 3))
    fields["params"] |= {name: rng.choice((0.4, 1.3)) for name in names}


def _seed(rng: random.Random, fields: Fields) -> None:
    filters: Fields = rng.choice(({}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.05, "top_k": 60}))
    fields["params"] |= {"seed": rng.randrange(1000), "temperature": rng.choice((0.6, 1.0))} | filters


def _n(rng: random.Random, fields: Fields) -> None:
    fields["params"]["n"] = rng.randint(2, 3)


def _best_of(rng: random.Random, fields: Fields) -> None:
    fields["best_of"] = fields["params"].get("n", 1) + rng.randint(1, 2)


def _beams(rng: random.Random, fields: Fields) -> None:
    width = rng.randint(2, 3)
    fields["beam"] = BeamParams(width, rng.choice((1.0, 0.5)))
    fields["params"]["n"] = width


def _pooled(rng: random.Random, fields: Fields) -> None:
    kinds = (Pooling("last"), Pooling("mean"), Pooling("cls"), Pooling("logits", (7, 300)))
    fields["pooling"] = rng.choice(kinds)


def _priority(rng: random.Random, fields: Fields) -> None:
    fields["priority"] = rng.choice((0, 20, 100))


def _retention(rng: random.Random, fields: Fields) -> None:
    ranges = (RetentionRange(5, RetentionHint(90)), RetentionRange(20, RetentionHint(10, 0.001)))
    fields |= {"ttl_s": rng.choice((0.0001, 60.0)), "retention": ranges[: rng.randint(0, 2)]}


def _pinned(rng: random.Random, fields: Fields) -> None:
    fields["is_pinned"] = True


def _image(rng: random.Random, fields: Fields) -> None:
    fields["image"] = rng.randrange(3)


def _abort(rng: random.Random, fields: Fields) -> None:
    fields["abort_after"] = rng.randint(0, 6)


def _bias(rng: random.Random, fields: Fields) -> None:
    # Of a few favoured tokens a text repeats itself, which is what sources of drafts look for.
    ids = rng.sample(range(3, 460), 30)
    fields["params"]["logit_bias"] = tuple((token, 6.0 if i < 4 else -3.0) for i, token in enumerate(ids))


def _bad_words(rng: random.Random, fields: Fields) -> None:
    words = [(i,) for i in rng.sample(range(3, 460), 100)]
    fields["params"]["bad_words"] = (*words, (rng.randrange(3, 460), rng.randrange(3, 460)))


def _renewed(rng: random.Random, fields: Fields) -> None:
    fields["renews"] = True
    fields.setdefault("priority", rng.choice((0, 100)))


def _prewarmed(rng: random.Random, fields: Fields) -> None:
    fields["params"] = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}


def _thinking_budget(rng: random.Random, fields: Fields) -> None:
    # Every eighth token begins the end: an answer often stands within it at the budget.
    spelled = {token: b"x" if token % 8 else b"</" for token in range(512)} | {450: b"t", 449: b">"}
    spelled[rng.randrange(3, 448)] = b"<t>"
    forced = ((448, 450, 449), (450, 449), (450, 449), (449,))
    tokens = ThinkingTokens(ThinkingMarks(b"<t>", b"</t>", rng.random() < 0.8), forced, spelled)
    fields["params"] |= {"thinking": tokens, "max_thinking_tokens": rng.randint(0, 6)}


FEATURES: dict[str, Callable[[random.Random, Fields], None]] = {
    "adapter": _adapter,
    "prompt_logprobs": _prompt_logprobs,
    "logprobs": _logprobs,
    "grammar": _grammar,
    "min_tokens": _min_tokens,
    "stop": _stop,
    "stop_ids": _stop_ids,
    "penalties": _penalties,
    "seed": _seed,
    "n": _n,
    "best_of": _best_of,
    "beams": _beams,
    "pooled": _pooled,
    "priority": _priority,
    "retention": _retention,
    "pinned": _pinned,
    "abort": _abort,
    "bias": _bias,
    "bad_words": _bad_words,
    "thinking_budget": _thinking_budget,
    "image": _image,
    "renewed": _renewed,
    "prewarmed": _prewarmed,
}
"""By name, in the order in which they are put into a request."""
NEEDED = {"best_of": "seed"}
"""What has no meaning alone: of equal answers none is the best."""
ENDING = ("grammar", "min_tokens", "stop", "stop_ids")
"""What says where an answer ends. Two of these are alone in a request too: other rules would hide them."""
ONLY_WITH = {
    "beams": {"adapter", "logprobs", "stop_ids", "priority", "retention", "pinned", "image", "renewed"},
    "pooled": {"adapter", "priority", "retention", "pinned", "abort", "image", "renewed"},
    "prewarmed": {"adapter", "priority", "retention", "pinned", "abort", "image", "renewed"},
}
"""A beam search, the vector of a prompt and what only computes one have nothing of the rest: sampling plays
no part in them."""


def go_together(one: str, other: str) -> bool:
    """Return whether a request may have both features."""
    return all(
        narrow not in ONLY_WITH or rest in ONLY_WITH[narrow] for narrow, rest in ((one, other), (other, one))
    )


@dataclass(frozen=True)
class Ask:
    """A request, to be served as often as wanted."""

    number: int
    features: frozenset[str]
    prompt: tuple[int, ...]
    params: SamplingParams
    adapter: str | None = None
    best_of: int | None = None
    beam: BeamParams | None = None
    pooling: Pooling | None = None
    priority: int = 50
    ttl_s: float | None = None
    retention: tuple[RetentionRange, ...] = ()
    renews: bool = False
    is_pinned: bool = False
    image: int | None = None
    """Which picture stands in the prompt."""
    abort_after: int | None = None
    """Output tokens, of all sequences, that a client sees before it leaves."""


def draw_asks(seed: int, count: int, features: Sequence[str]) -> list[Ask]:
    """Return `count` requests over a few prefixes: each pair of `features` is in one as soon as may be."""
    rng = random.Random(seed)
    prefixes = [tuple(rng.randrange(3, 460) for _ in range(60)) for _ in range(3)]
    missing = {frozenset(pair) for pair in combinations(features, 2) if go_together(*pair)}
    alone = [("pooled",)] * 3 + [("grammar", "min_tokens"), *combinations(ENDING, 2)]
    if "prewarmed" in features:
        alone += [("prewarmed",)] * 2
    asks = []
    for number in range(count):
        if (left := count - number) <= len(alone):
            drawn = [frozenset(alone[-left])]
        else:
            drawn = [_draw_features(rng, features) for _ in range(30)]
        chosen = max(drawn, key=lambda one: len(missing.intersection(_pairs(one))))
        missing.difference_update(_pairs(chosen))
        prompt = rng.choice(prefixes)[: rng.randint(1, 60)]
        prompt += tuple(rng.randrange(3, 460) for _ in range(rng.randint(1, 6))) * rng.randint(1, 3)
        fields: Fields = {
            "params": {"max_tokens": rng.randint(3, 16), "temperature": 0.0, "ignore_eos": rng.random() < 0.3}
        }
        for name in FEATURES:
            if name in chosen:
                FEATURES[name](rng, fields)
        params = SamplingParams(**fields.pop("params"))
        asks.append(Ask(number, chosen, prompt, params, **fields))
    return asks


def _draw_features(rng: random.Random, features: Sequence[str]) -> frozenset[str]:
    chosen: set[str] = set()
    for name in rng.sample(features, rng.randint(1, 8)):
        wanted = {name, NEEDED.get(name, name)}
        if all(go_together(one, other) for one in wanted for other in chosen):
            chosen |= wanted
    return frozenset(chosen)


def _pairs(features: frozenset[str]) -> Iterator[frozenset[str]]:
    return map(frozenset, combinations(sorted(features), 2))


@dataclass
class Answer:
    """What a client sees of a request in the end."""

    sequences: list[CollectedSequence] = field(default_factory=list)
    best: list[CollectedSequence] = field(default_factory=list)
    """Of them, those that are kept where the best of some are wanted, once all are there."""
    prompt_logprobs: tuple[bytes, ...] | None = None
    pooled: bytes | None = None
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(one.token_ids) for one in self.sequences)

    def begins(self, whole: Answer) -> bool:
        """Return whether this, which a client left, is how `whole` begins."""
        if self.prompt_logprobs not in (None, whole.prompt_logprobs):
            return False
        if self.pooled not in (None, whole.pooled):
            return False
        return all(_begins(one, other) for one, other in zip(self.sequences, whole.sequences, strict=True))


def _begins(one: CollectedSequence, whole: CollectedSequence) -> bool:
    if one.finish_reason is not FinishReason.ABORT:
        return one == whole
    num = len(one.token_ids)
    # The last character may be cut short, and text that a stop string may hold is shown where it isn't.
    return (
        one.token_ids == whole.token_ids[:num]
        and one.logprobs == whole.logprobs[:num]
        and (len(one.text) > len(whole.text) or whole.text.startswith(one.text.rstrip("\ufffd")))
    )


def _with_image(ask: Ask, parts: EngineParts) -> tuple[TokenArray, PromptImages | None]:
    """Return the ids of a prompt, with its picture behind the first tokens."""
    tokens = as_tokens(ask.prompt)
    if ask.image is None:
        return tokens, None
    assert parts.images is not None
    read = parts.images.read_image(picture(ask.image, 90, 60), "the picture")
    place = min(IMAGE_AT, len(tokens) - 1)
    holders = np.full(read.expansion.num_tokens, parts.images.placeholder_id, dtype=np.int32)
    return parts.images.place(np.concatenate((tokens[:place], holders, tokens[place:])), [read])


class _Request:
    """A request under way in an engine."""

    def __init__(self, ask: Ask, parts: EngineParts, name: str) -> None:
        params = ask.params
        if ask.best_of is not None:
            params = replace(params, n=ask.best_of, logprobs=params.logprobs or 0)
        self.ask = ask
        tokens, images = _with_image(ask, parts)
        self.request = GenerationRequest(
            name,
            tokens,
            params,
            images=images,
            retention=Retention(RetentionHint(ask.priority, ask.ttl_s), ask.retention, renews=ask.renews),
            beam=ask.beam,
            pooling=ask.pooling,
            adapter=None if ask.adapter is None else parts.adapters.get(ask.adapter),
        )
        self.answer = Answer([CollectedSequence() for _ in range(params.n)])
        self.is_over = False

    def start(self) -> list[GenerationRequest]:
        """Return what to ask the engine first."""
        return [self.request]

    def take(self, output: RequestOutput) -> list[GenerationRequest]:
        """Take an output; return what to ask next."""
        answer = self.answer
        answer.error = answer.error or output.error
        if output.prompt_logprobs is not None:
            answer.prompt_logprobs = _bytes_of(output.prompt_logprobs)
        if output.pooled is not None:
            answer.pooled = output.pooled.tobytes()
        for delta in output.deltas:
            one = answer.sequences[delta.index]
            assert one.finish_reason is None, "a sequence ended twice"
            one.pieces = [one.text + delta.text]  # however it was cut
            one.token_ids += delta.token_ids
            one.logprobs += delta.logprobs or ()
            one.finish_reason, one.stop_reason = delta.finish_reason, delta.stop_reason
        self.is_over = output.finished
        if self.is_over and self.ask.best_of is not None:
            answer.best = list(keep_best(answer.sequences, self.ask.params.n))
        return []


class _Search(_Request):
    """A beam search under way."""

    def __init__(self, ask: Ask, parts: EngineParts, name: str) -> None:
        super().__init__(ask, parts, name)
        limits = parts.engine.limits
        self._search = BeamSearch(self.request, limits.eos_token_ids, limits.max_tokens)
        self._tokenizer = parts.tokenizer
        self._asked: list[str] = []
        self._found: dict[str, TokenLogprob] = {}

    def start(self) -> list[GenerationRequest]:
        asked = self._search.requests()
        self._asked, self._found = [one.request_id for one in asked], {}
        return asked

    def take(self, output: RequestOutput) -> list[GenerationRequest]:
        assert output.error is None, output.error
        assert output.deltas[0].logprobs is not None
        self._found[output.request_id] = output.deltas[0].logprobs[0]
        if len(self._found) < len(self._asked):
            return []
        self._search.advance([self._found[name] for name in self._asked])
        if not self._search.is_done:
            return self.start()
        self.is_over = True
        self.answer.sequences = [
            CollectedSequence(
                [one.text(self._tokenizer, self.request)],
                list(one.token_ids),
                list(one.logprobs),
                one.finish_reason,
                one.stop_reason,
            )
            for one in self._search.result()
        ]
        return []


def _bytes_of(found: PromptLogprobs) -> tuple[bytes, ...]:
    arrays = (found.token_ids, found.logprobs, found.ranks, found.top_ids, found.top_logprobs)
    return tuple(one.tobytes() for one in arrays)


class _WatchedRunner:
    """Notes which requests each step computes."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.steps: list[list[str]] = []

    @property
    def hidden(self) -> Any:
        return self._runner.hidden

    def forward(self, rows: StepRows) -> Any:
        self._note(rows)
        return self._runner.forward(rows)

    def prepare(self, rows: StepRows) -> Any:
        self._note(rows)
        return self._runner.prepare(rows)

    def run(self, step: Any, drawn: Any) -> Any:
        return self._runner.run(step, drawn)

    def image_stats(self) -> Any:
        return self._runner.image_stats()

    def _note(self, rows: StepRows) -> None:
        rows.check()
        self.steps.append([item.sequence.state.request.request_id for item in rows.items])


class Service:
    """An engine, run step by step by whoever asks."""

    def __init__(self, parts: EngineParts) -> None:
        self.engine = parts.engine
        self._parts = parts
        self._processor = OutputProcessor(parts.tokenizer)
        self._runner = _WatchedRunner(parts.engine.runner)
        parts.engine.runner = self._runner  # type: ignore[assignment]
        self._num_served = 0
        self.most_waiting = 0
        """Blocks that waited for room in the transfer buffer, at most."""
        self.beside: Counter[frozenset[str]] = Counter()
        """Pairs of features of two requests -> steps that computed both."""

    def serve(self, asks: Sequence[Ask], gaps: Sequence[int]) -> list[Answer]:
        """Serve all, each so many steps after the one before; return the answers in their order."""
        started = [self._begin(ask) for ask in asks]
        requests = {one.request.request_id: one for one in started}
        with self._pins(started):
            self._runner.steps.clear()
            left = list(zip(started, gaps, strict=True))
            wait = left[0][1]
            for _ in range(MAX_STEPS):
                while left and wait <= 0:
                    for request in left.pop(0)[0].start():
                        self.engine.add(self.engine.checked(request))
                    wait = left[0][1] if left else 0
                wait -= 1
                if not left and not self.engine.has_work:
                    break
                self._step(requests)
            else:
                raise AssertionError("the engine doesn't come to an end")
        self.engine.check()
        assert all(one.is_over for one in started)
        self._count_pairs(requests)
        return [one.answer for one in started]

    def _begin(self, ask: Ask) -> _Request:
        self._num_served += 1
        return (_Request if ask.beam is None else _Search)(ask, self._parts, f"r{self._num_served}")

    def _step(self, requests: dict[str, _Request]) -> None:
        outputs, stopped = self._processor.process(self.engine.step())
        if (tiers := self.engine.cache.below.stats()) is not None:
            self.most_waiting = max(self.most_waiting, tiers.num_waiting_writes)
        for one in stopped:
            self.engine.stop_sequence(one.request_id, one.index)
        for output in outputs:
            request = requests[output.request_id.split("-")[0]]
            for following in request.take(output):
                self.engine.add(self.engine.checked(following))
        for name, request in requests.items():
            limit = request.ask.abort_after
            if limit is not None and not request.is_over and request.answer.num_tokens >= limit:
                for output in self._processor.process(self.engine.abort(name))[0]:
                    request.take(output)

    @contextmanager
    def _pins(self, started: Sequence[_Request]) -> Iterator[None]:
        """Pin the prompts that are to be pinned, once they are computed."""
        cache, leases = self.engine.cache, list[Lease]()
        for one in started:
            if one.ask.is_pinned:
                request = one.request
                name, one_token = f"{request.request_id}-pin", SamplingParams(max_tokens=1)
                warm = replace(request, request_id=name, params=one_token, beam=None)
                self.engine.add(self.engine.checked(warm))
                while self.engine.has_work:
                    self._processor.process(self.engine.step())
                leases.append(cache.hold(request.namespace, request.prompt_token_ids))
        yield
        for lease in leases:
            cache.free(lease, lease.num_tokens)

    def _count_pairs(self, requests: dict[str, _Request]) -> None:
        for names in self._runner.steps:
            computed = {name.split("-")[0] for name in names}
            for one, other in combinations(computed, 2):
                features = requests[one].ask.features, requests[other].ask.features
                self.beside.update({frozenset((a, b)) for a in features[0] for b in features[1]})

    def close(self) -> None:
        self.engine.close()
