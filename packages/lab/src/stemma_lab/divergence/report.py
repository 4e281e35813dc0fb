"""The costliest divergences of a window: where prompts part from cached ones, at what, and what it costs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from stemma.insight.divergence_window import (
    CHANGED_LIST,
    CHANGES,
    NO_TOKEN,
    REASONS,
    REORDERED,
    UNKNOWN,
    Records,
    Snapshot,
    WholePrompt,
)
from stemma.prefix.explain import MissReason
from stemma.terminal_text import format_duration
from stemma_lab.divergence.shapes import SHAPES, TEXT, VAGUE, Decode, TokenStarts, parting_value
from stemma_lab.divergence.whatif import (
    CacheShape,
    cached_tokens,
    in_one_order,
    moved_to_the_end,
    with_one_list,
)

MAX_SHOWN = 10
MAX_REPLAYED = 3
"""Divergences whose saving is computed."""
_MAX_PLACES = 8
"""Places of a divergence that are cut, those seen most often."""
_EDGES = (0, 64, 256, 1024, 4096, 16384)
_CERTAIN_AT_START = ("uuid", "timestamp", "date")
"""Shapes that count where nothing of a prompt was cached, so that no cached side is known."""
_PARTED = (MissReason.DIVERGED, MissReason.EXTENDS)


@dataclass(frozen=True, slots=True)
class Replayed:
    """A replay of the last prompts with and without the value where it stands."""

    num_prompts: int
    num_changed: int
    """Prompts that had the value."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_cached_tokens_moved: int
    """With the value at the end of the prompts, or the tools in one order, or the list of the first prompt.

    Tokens of a list that is shorter or longer than theirs count as if prompts had kept their length.
    """

    @property
    def saved_share(self) -> float:
        """Tokens that this saves, as a share of those that had to be computed."""
        missed = self.num_prompt_tokens - self.num_cached_tokens
        return max(0, self.num_cached_tokens_moved - self.num_cached_tokens) / missed if missed else 0.0


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids around one of its places."""

    before: tuple[int, ...]
    cached: tuple[int, ...]
    yours: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Divergence:
    """Prompts that part from cached ones at values of one shape, in one part of the prompt."""

    shape: str
    first_token: int
    """First token of the part of the prompt."""
    end_token: int | None
    """None: to its end."""
    num_requests: int
    num_missed_tokens: int
    """From the places on, of all its requests."""
    example: Example
    replayed: Replayed | None = None
    """None: it is none of the costliest, or people's own words stand there."""


@dataclass(frozen=True, slots=True)
class DivergenceReport:
    """Everything that was computed in a window, by why."""

    seconds: float
    """From the first to the last request of the window."""
    num_requests: int
    num_prompt_tokens: int
    num_missed_tokens: int
    missed_tokens_by_reason: dict[str, int]
    divergences: list[Divergence]
    """The costliest first."""

    def saved_tokens(self, divergence: Divergence) -> int | None:
        """Return what moving the value, one order of tools, or one list would have saved in the window.

        The share that the replay of the last prompts found, applied to the tokens computed in the window.
        """
        if divergence.replayed is None:
            return None
        return round(divergence.replayed.saved_share * self.num_missed_tokens)


@dataclass(slots=True)
class _Group:
    missed: int = 0
    count: int = 0
    places: Counter[int] = field(default_factory=Counter)
    example: Example = Example((), (), ())


def find_divergences(
    snapshot: Snapshot, decode: Decode, cache: CacheShape, *, since: float = float("-inf")
) -> DivergenceReport:
    """Return the costliest divergences of requests that came after `since`. Slow: not for an event loop."""
    records = snapshot.records[snapshot.records["at"] >= since]
    texts = TokenStarts(decode)
    groups: defaultdict[tuple[str, int], _Group] = defaultdict(_Group)
    for record in records:
        _classify(record, texts, groups)
    costliest = sorted(groups.items(), key=lambda item: item[1].missed, reverse=True)[:MAX_SHOWN]
    prompts = [prompt for prompt in snapshot.prompts if prompt.at >= since]
    before = cached_tokens(prompts, cache) if costliest else []
    num_replayed, found = 0, []
    for (shape, edge), group in costliest:
        replayed = None
        if (shape in SHAPES or shape in (REORDERED, CHANGED_LIST)) and num_replayed < MAX_REPLAYED:
            num_replayed += 1
            replayed = _replay(prompts, before, shape, group, texts, cache)
        later = _EDGES.index(edge) + 1
        end = _EDGES[later] if later < len(_EDGES) else None
        found.append(Divergence(shape, edge, end, group.count, group.missed, group.example, replayed))
    missed = np.maximum(records["prompt"] - records["cached"], 0)
    by_reason: Counter[str] = Counter()
    for reason, count in zip(records["reason"].tolist(), missed.tolist(), strict=True):
        by_reason["none" if reason == UNKNOWN else REASONS[reason].value] += count
    return DivergenceReport(
        float(records["at"].max() - records["at"].min()) if len(records) else 0.0,
        len(records),
        int(records["prompt"].sum()),
        int(missed.sum()),
        dict(by_reason.most_common()),
        found,
    )


def _classify(record: Records, texts: TokenStarts, groups: defaultdict[tuple[str, int], _Group]) -> None:
    """Add a request to the group of the value at which it parts, if it does."""
    reason = None if record["reason"] == UNKNOWN else REASONS[record["reason"]]
    before, yours, theirs = (_ids(record, name) for name in ("before", "yours", "theirs"))
    has_parted = reason in _PARTED and bool(theirs)
    if not (has_parted or (reason is MissReason.COLD and yours)):
        return
    place = int(record["place"])
    value = _value(texts, before, yours)
    shape, start = TEXT, place
    if value is not None:
        shape, start = value[0], place - len(before) + value[1]
    if shape in VAGUE and has_parted:
        other = _value(texts, before, theirs)
        shape = shape if other is not None and other[0] == shape else TEXT
    if not has_parted and shape not in _CERTAIN_AT_START:
        return
    if changed := CHANGES[record["changed"]]:
        shape = changed
    edge = max(edge for edge in _EDGES if edge <= start)
    group = groups[shape, edge]
    group.missed += max(0, int(record["prompt"]) - int(record["cached"]))
    group.count += 1
    group.places[start] += 1
    group.example = Example(before, theirs, yours)


def _ids(record: Records, name: str) -> tuple[int, ...]:
    ids = record[name]
    return tuple(ids[ids != NO_TOKEN].tolist())


def _value(texts: TokenStarts, before: Sequence[int], after: Sequence[int]) -> tuple[str, int] | None:
    """Return the shape of the value where `after` begins, and the number of the token in which it begins."""
    ids = [*before, *after]
    text = texts.decode(ids)
    ends = texts.ends(ids, text)
    at = ends[len(before) - 1] if before else 0
    value = parting_value(text, at)
    if value is None:
        return None
    return value.shape, next(n for n, end in enumerate(ends) if end > value.start)


def _replay(
    prompts: Sequence[WholePrompt],
    before: Sequence[int],
    shape: str,
    group: _Group,
    texts: TokenStarts,
    cache: CacheShape,
) -> Replayed:
    places = [place for place, _ in group.places.most_common(_MAX_PLACES)]
    if shape == REORDERED:
        moved, num_changed = in_one_order(prompts, places)
    elif shape == CHANGED_LIST:
        moved, num_changed = with_one_list(prompts, places)
    else:
        moved, num_changed = moved_to_the_end(prompts, shape, places, texts)
    num_tokens = sum(len(prompt.tokens) for prompt in prompts)
    num_computed = sum(len(prompt.tokens) for prompt in moved) - sum(cached_tokens(moved, cache))
    return Replayed(len(prompts), num_changed, num_tokens, sum(before), num_tokens - num_computed)


def sentence(report: DivergenceReport, divergence: Divergence, prefill_s_per_token: float | None) -> str:
    """Return what a divergence costs and what to do about it, in one sentence."""
    share = divergence.num_missed_tokens / max(1, report.num_missed_tokens)
    place = f"in the first {divergence.end_token} tokens"
    if divergence.first_token:
        place = f"behind token {divergence.first_token:,}"
    if divergence.shape == TEXT:
        return f"{share:.0%} of the computed tokens follow people's own words {place}."
    what, advice, instead = f"{_ARTICLES.get(divergence.shape, 'a')} {divergence.shape}", *_MOVE
    if divergence.shape == REORDERED:
        what, advice, instead = "the same tools in another order", *_ORDER
    elif divergence.shape == CHANGED_LIST:
        what, advice, instead = "a changed list of tools", *_LIST
    text = f"{share:.0%} of the computed tokens part at {what} {place}"
    saved = report.saved_tokens(divergence)
    if saved is None:
        return f"{text}."
    if not saved:
        return f"{text}; {instead} would save nothing."
    seconds = ""
    if prefill_s_per_token is not None:
        seconds = f", {format_duration(saved * prefill_s_per_token)} of prefill"
    return f"{text}: {advice}; that would have saved {saved:,} tokens{seconds}."


_MOVE = ("move it to the end", "moving it to the end")
_ORDER = ("give all of them one order", "one order for all")
_LIST = ("keep it as it was, or put those that change last", "the list as it was")
_ARTICLES = {"address": "an", "email": "an", "identifier": "an"}
