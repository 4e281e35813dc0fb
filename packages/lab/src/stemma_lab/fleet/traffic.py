"""The requests of a simulated fleet, as chains of runs: made up from a model of tenants, or of a trace.

A run is a piece of prompts between two places where they part or end: a tenant's instructions, a question, an
answer. It has a number, a number of blocks, and the run before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stemma_lab.fleet.caches import Piece
from stemma_lab.replicas import Cluster, time_scale
from stemma_lab.savings import PrefillModel
from stemma_lab.traces.columns import Trace
from stemma_router.cluster.block_columns import Words, mixed

Int64 = npt.NDArray[np.int64]
_BITS = 24
"""Of a block's name before it is mixed: its place in its run."""


@dataclass(frozen=True)
class Traffic:
    """Requests in order of arrival, and what earlier ones left in the caches."""

    name: str
    block_size: int
    """Tokens of a block."""
    run_blocks: Int64
    """Shape [num_runs]."""
    run_before: Int64
    """The run that each goes on from, [num_runs]; -1: it begins prompts."""
    arrivals_s: npt.NDArray[np.float64]
    """Shape [num_requests], as are the next four."""
    prompt_runs: Int64
    """The last run of each prompt."""
    answer_runs: Int64
    """The run that its answer leaves; -1: none."""
    input_tokens: Int64
    output_tokens: Int64
    earlier: Int64
    """Last runs of conversations from before, oldest first: what warm caches hold."""
    num_tenants: int = 1

    @property
    def num_requests(self) -> int:
        """Requests to be sent."""
        return len(self.arrivals_s)

    def chain(self, last: int) -> list[int]:
        """Return the runs of a prompt that ends with `last`, in order."""
        chain = []
        while last >= 0:
            chain.append(last)
            last = int(self.run_before[last])
        return chain[::-1]

    def sizes(self, chain: list[int]) -> list[int]:
        """Return the blocks of each run."""
        return [int(self.run_blocks[run]) for run in chain]


def names_of(pieces: list[Piece]) -> Words:
    """Return the names of blocks, as routers have them, [n]."""
    if not pieces:
        return np.zeros(0, dtype=np.uint64)
    return mixed(
        np.concatenate([(run << _BITS) + np.arange(first, end) for run, first, end in pieces]).astype(
            np.uint64
        )
    )


def hash_of(run: int) -> int:
    """Return a number for rendezvous hashing, never 0."""
    return int(names_of([(run, 0, 1)])[0]) | 1


@dataclass(frozen=True, slots=True)
class TenantModel:
    """Tenants whose users hold conversations. Lengths are lognormal (sigma 1), in tokens; means are given.

    Requests of tenants follow Zipf's law. Each tenant's prompts begin with instructions of its own; each turn
    adds a question (or a tool's result) and the answer before it. Parts are rounded up to whole blocks.
    """

    num_tenants: int = 10_000
    tenant_exponent: float = 0.8
    instruction_tokens: float = 2000.0
    question_tokens: float = 800.0
    answer_tokens: float = 250.0
    mean_turns: float = 6.0
    """Geometric."""
    pause_s: float = 10.0
    """Mean time between a request and the next of its conversation; exponential."""
    earlier_turns: int = 6
    """Turns of each conversation from before."""
    returning: float = 0.3
    """Share of conversations that go on from one from before, if there are any."""
    block_size: int = 64

    def traffic(self, num_sessions: int, duration_s: float, num_earlier_blocks: int, seed: int) -> Traffic:
        """Return conversations that begin within `duration_s`, evenly; later turns are left out."""
        return _Maker(self, seed).made(num_sessions, duration_s, num_earlier_blocks)

    def traffic_at(
        self,
        busy: float,
        num_servers: int,
        duration_s: float,
        num_earlier_blocks: int,
        seed: int,
        prefill: PrefillModel,
    ) -> Traffic:
        """Return traffic that keeps servers busy for this share, if none computes a block twice."""
        sample = self.traffic(2000, duration_s, 0, seed + 1)
        each_s = _needed_s(sample, prefill) / 2000
        return self.traffic(
            max(1, round(busy * num_servers * duration_s / each_s)), duration_s, num_earlier_blocks, seed
        )


class _Maker:
    """Makes up runs."""

    def __init__(self, model: TenantModel, seed: int) -> None:
        self._model = model
        self._random = np.random.default_rng(seed)
        weights = 1.0 / np.arange(1, model.num_tenants + 1) ** model.tenant_exponent
        self._weights = weights / weights.sum()
        self._sizes: list[Int64] = [self._blocks(model.instruction_tokens, model.num_tenants)]
        """Runs 0..num_tenants-1 are the tenants' instructions."""
        self._before: list[Int64] = [np.full(model.num_tenants, -1, dtype=np.int64)]
        self._num_runs = model.num_tenants

    def made(self, num_sessions: int, duration_s: float, num_earlier_blocks: int) -> Traffic:
        model, random = self._model, self._random
        earlier = self._earlier(num_earlier_blocks)
        turns = random.geometric(1.0 / model.mean_turns, num_sessions)
        stems = self._tenants(num_sessions)
        if len(earlier):
            returns = random.random(num_sessions) < model.returning
            stems[returns] = random.choice(earlier, np.count_nonzero(returns))
        session = np.repeat(np.arange(num_sessions), turns)
        begins = np.concatenate(([0], np.cumsum(turns)[:-1])).astype(np.int64)
        pauses = random.exponential(model.pause_s, len(session))
        pauses[begins] = 0.0
        passed = np.cumsum(pauses)
        arrivals = random.uniform(0.0, duration_s, num_sessions)[session] + passed - passed[begins][session]
        questions = self._lengths(model.question_tokens, len(session))
        answers = self._lengths(model.answer_tokens, len(session))
        runs = np.stack((self._to_blocks(questions), self._to_blocks(answers)), axis=1)
        first = self._num_runs
        before = first + np.arange(2 * len(session)).reshape(-1, 2) - 1  # a question behind the last answer
        before[begins, 0] = stems
        self._add(runs.ravel(), before.ravel())
        order = np.argsort(arrivals, kind="stable")
        order = order[arrivals[order] < duration_s]
        blocks, run_before = np.concatenate(self._sizes), np.concatenate(self._before)
        prompts = first + 2 * order
        return Traffic(
            f"{model.num_tenants:,} tenants",
            model.block_size,
            blocks,
            run_before,
            arrivals[order],
            prompts,
            prompts + 1,
            _depths(blocks, run_before, model.num_tenants)[prompts] * model.block_size,
            answers[order],
            earlier,
            model.num_tenants,
        )

    def _earlier(self, num_blocks: int) -> Int64:
        """Return conversations from before that have about so many blocks: each is one run."""
        model = self._model
        mean = model.earlier_turns * (model.question_tokens + model.answer_tokens) / model.block_size
        count = round(num_blocks / mean)
        first = self._num_runs
        turns = self._lengths(model.question_tokens + model.answer_tokens, count * model.earlier_turns)
        tokens = turns.reshape(count, model.earlier_turns).sum(axis=1)
        self._add(self._to_blocks(tokens), self._tenants(count))
        return first + np.arange(count, dtype=np.int64)

    def _add(self, sizes: Int64, before: Int64) -> None:
        self._sizes.append(sizes)
        self._before.append(before)
        self._num_runs += len(sizes)

    def _tenants(self, count: int) -> Int64:
        return self._random.choice(self._model.num_tenants, count, p=self._weights).astype(np.int64)

    def _blocks(self, mean: float, count: int) -> Int64:
        return self._to_blocks(self._lengths(mean, count))

    def _lengths(self, mean: float, count: int) -> Int64:
        drawn = self._random.lognormal(np.log(mean) - 0.5, 1.0, count)
        return np.maximum(1, np.round(drawn)).astype(np.int64)

    def _to_blocks(self, tokens: Int64) -> Int64:
        return -(-tokens // self._model.block_size)


def _depths(blocks: Int64, before: Int64, num_roots: int) -> Int64:
    """Return the blocks from a prompt's beginning to each run's end. A run comes after the one before it."""
    depths = blocks.copy()
    for run in range(num_roots, len(blocks)):
        depths[run] += depths[before[run]]
    return depths


def _needed_s(traffic: Traffic, prefill: PrefillModel) -> float:
    """Return the time to compute what nobody has computed before: each question, behind all before it."""
    ends = traffic.input_tokens
    return float(
        prefill.seconds(ends - traffic.run_blocks[traffic.prompt_runs] * traffic.block_size, ends).sum()
    )


def traffic_of(trace: Trace, busy: float, num_servers: int, prefill: PrefillModel) -> Traffic:
    """Return a trace's requests; its time is scaled so that servers compute for the share `busy`."""
    scale = time_scale(trace, Cluster(num_servers, None, prefill=prefill, busy=busy))
    run_of, run_blocks, run_before = _runs_of(trace)
    ends, lengths = trace.offsets[1:] - 1, np.diff(trace.offsets)
    num_prompt = trace.num_prompt_blocks
    last_prompt = trace.offsets[:-1] + np.maximum(num_prompt, 1) - 1
    prompts = np.where(num_prompt > 0, run_of[trace.block_ids[last_prompt]], -1)
    answers = np.where(lengths > num_prompt, run_of[trace.block_ids[ends]], -1)
    return Traffic(
        str(trace.version),
        trace.block_size,
        run_blocks,
        run_before,
        trace.timestamps_s * scale,
        prompts,
        answers,
        trace.input_tokens,
        trace.output_tokens,
        np.zeros(0, dtype=np.int64),
    )


def _runs_of(trace: Trace) -> tuple[Int64, Int64, Int64]:
    """Return the run of each block, and each run's blocks and the run before it."""
    ids, num_blocks = trace.block_ids.astype(np.int64), trace.num_unique_blocks
    before = np.empty_like(ids)
    before[1:] = ids[:-1]
    before[trace.offsets[:-1][np.diff(trace.offsets) > 0]] = -1
    parent = np.empty(num_blocks, dtype=np.int64)
    parent[ids] = before
    children = np.bincount(parent[parent >= 0], minlength=num_blocks)
    is_last = children != 1
    """Whether prompts part behind a block, or end there."""
    is_last[ids[trace.offsets[1:][np.diff(trace.offsets) > 0] - 1]] = True
    has_prompt = trace.num_prompt_blocks > 0
    is_last[ids[(trace.offsets[:-1] + trace.num_prompt_blocks - 1)[has_prompt]]] = True
    is_first = (parent < 0) | is_last[np.maximum(parent, 0)]
    run_of = np.full(num_blocks, -1, dtype=np.int64)
    run_of[is_first] = np.arange(np.count_nonzero(is_first))
    for block in np.flatnonzero(~is_first).tolist():  # ids are in order of first sight: parents come before
        run_of[block] = run_of[parent[block]]
    firsts = np.flatnonzero(is_first)
    parents = parent[firsts]
    return run_of, np.bincount(run_of), np.where(parents >= 0, run_of[np.maximum(parents, 0)], -1)
