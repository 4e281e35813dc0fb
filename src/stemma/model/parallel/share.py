"""Which part of a model a rank holds: tensor parallel, and expert parallel for mixtures of experts.

Which of its tensors are divided, and how, a family says (families/cuts.py). Each row-parallel layer's results
are partial sums. Embedding, output head, norms, routers and the projections to a cached latent are whole on
every rank. Context parallel (dealing.py) divides the tokens: groups of ranks, each of which holds the whole
model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from stemma.errors import ConfigError, UnsupportedModel
from stemma.model.families.cuts import CutRun, Cuts, Runs
from stemma.model.families.registry import cuts_of
from stemma.model.weights.rounding import fitting_group

_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Share:
    """The part of one rank."""

    rank: int
    """Among those that divide the model."""
    size: int
    """Ranks that divide the model."""
    expert_size: int = 1
    """Groups of ranks that the experts are divided over; the ranks of a group split each of its experts."""
    context_rank: int = 0
    """Among the groups of `size` ranks that divide the tokens."""
    context_size: int = 1
    """Groups that divide the tokens."""

    @classmethod
    def of_process(cls, number: int, size: int, expert_size: int = 1, context_size: int = 1) -> Share:
        """Return the part of a process: those of a group that divides the model follow one another."""
        context_rank, rank = divmod(number, size)
        return cls(rank, size, expert_size, context_rank, context_size)

    @property
    def number(self) -> int:
        """Return the number of the process, from 0: what users know as its rank."""
        return self.context_rank * self.size + self.rank

    @property
    def num_processes(self) -> int:
        """Processes of the group: ranks that cut the model times those that cut the context."""
        return self.size * self.context_size

    @property
    def ranks_per_expert(self) -> int:
        """Ranks that split an expert."""
        return self.size // self.expert_size

    def experts(self, count: int) -> range:
        """Return the experts, of `count`, that this rank has a part of."""
        each = count // self.expert_size
        first = self.rank // self.ranks_per_expert * each
        return range(first, first + each)

    def part(self, length: int, *, of_expert: bool = False) -> range:
        """Return this rank's part of a dimension that is cut, of `length`."""
        size = self.ranks_per_expert if of_expert else self.size
        each = length // size
        first = self.rank % size * each
        return range(first, first + each)

    def parts(self, length: int, runs: Runs, *, of_expert: bool = False) -> tuple[range, ...]:
        """Return this rank's parts of a dimension that is cut run by run; without runs it is one."""
        found: list[range] = []
        start = 0
        for run in runs or (CutRun(length),):
            own = range(run.length) if run.is_shared else self.part(run.length, of_expert=of_expert)
            found.append(range(start + own.start, start + own.stop))
            start += run.length
        return tuple(found)

    def held(self, runs: Runs) -> int:
        """Return how many numbers of a dimension this rank holds."""
        return sum(len(part) for part in self.parts(0, runs))


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a stored tensor that a rank reads."""

    name: str
    """Under which the rank's smaller model knows it: its experts are counted from 0."""
    parts: Mapping[int, tuple[range, ...]] = field(default_factory=dict)
    """By dimension that is cut: what is read of it, joined. Empty: the tensor is whole."""
    is_zero: bool = False
    """Another rank adds it: zeros here."""

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this part of a tensor of shape `whole`."""
        return tuple(
            sum(len(part) for part in self.parts[axis]) if axis in self.parts else size
            for axis, size in enumerate(whole)
        )


def cut_of(name: str, shape: tuple[int, ...], share: Share, cuts: Cuts, num_experts: int) -> Cut | None:
    """Return what a rank reads of a tensor of the checkpoint; None: nothing, it is of another's expert."""
    expert = _EXPERT.search(name)
    if expert is not None:
        own = share.experts(num_experts)
        number = int(expert[1])
        if number not in own:
            return None
        name = f"{name[: expert.start(1)]}{number - own.start}{name[expert.end(1) :]}"
    path = name.removesuffix(".weight").removesuffix(".bias")
    is_stack, is_bias = cuts.is_stack(path) and len(shape) == 3, name.endswith(".bias")
    runs, of_expert = cuts.runs(path), is_stack or expert is not None
    if cuts.divides_inputs(path):
        if is_bias:
            return Cut(name, is_zero=share.rank > 0)
        runs, axis = (), len(shape) - 1
    else:
        axis = 1 if is_stack else cuts.axis(path)
    if runs is None or axis >= len(shape):
        return Cut(name)
    parts = {axis: share.parts(shape[axis], runs, of_expert=of_expert)}
    if is_stack:
        parts[0] = (share.experts(shape[0]),)
    return Cut(name, parts)


def num_experts_of(config: Any) -> int:
    """Return the routed experts of a layer; 0: the model is no mixture of experts."""
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        count = getattr(config, name, None)
        if count:
            return int(count)
    return 0


def check_share(architecture: str, config: Any, share: Share) -> Cuts:
    """Return the cuts of a model; raise UnsupportedModel or ConfigError if there are none for these ranks."""
    cuts = cuts_of(architecture, config, share.size)
    if cuts.has_states and share.context_size > 1:
        raise UnsupportedModel(
            f"{architecture} isn't served with context_parallel_size: a recurrent layer's state follows from "
            "all tokens before it, which context parallel divides; take tensor_parallel_size"
        )
    size = share.size
    attends = getattr(config, "num_attention_heads", None) is not None
    if attends:
        _check(architecture, "attention heads", config.num_attention_heads, size)
    if attends and not getattr(config, "kv_lora_rank", None):
        _check(architecture, "KV heads", config.num_key_value_heads, size)
    num_experts = num_experts_of(config)
    if num_experts:
        _check(architecture, "experts", num_experts, share.expert_size, "expert_parallel_size")
    elif share.expert_size > 1:
        raise ConfigError(
            f"expert_parallel_size is {share.expert_size}, but {architecture} has no experts; leave it 1"
        )
    for what, length, ranks in _inner_sizes(config, share):
        _check(architecture, what, length, ranks)
    for what, count in cuts.divided.items():
        _check(architecture, what, count, size)
    return cuts


def _inner_sizes(config: Any, share: Share) -> Iterator[tuple[str, int, int]]:
    """Yield the inner sizes of feed-forward layers: what each is, its length, and ranks that divide it."""
    num_experts, inner = num_experts_of(config), getattr(config, "moe_intermediate_size", None)
    dense = getattr(config, "intermediate_size", None)
    if num_experts and inner:
        yield "moe_intermediate_size", inner, share.ranks_per_expert
    if dense:
        of_experts = num_experts > 0 and not inner
        yield "intermediate_size", dense, share.ranks_per_expert if of_experts else share.size
    for name in ("shared_expert_intermediate_size", "shared_intermediate_size"):
        if shared := getattr(config, name, None):
            yield name, shared, share.size
    if num_experts and inner and (count := getattr(config, "n_shared_experts", None)):
        of_each = getattr(config, "moe_shared_expert_intermediate_size", inner)
        yield "inner size of the shared experts", count * of_each, share.size


def check_groups(architecture: str, config: Any, share: Share, cuts: Cuts, group_size: int) -> None:
    """Raise ConfigError unless each rank's inputs hold the same groups of shared scales as one process's.

    Inputs of row-parallel layers are cut. A group that would lie on two ranks would be rounded differently.
    """
    inputs, heads = dict(cuts.inputs), getattr(config, "num_attention_heads", None)
    if heads is not None:
        head_dim = getattr(config, "v_head_dim", None) or getattr(config, "head_dim", None)
        inputs["attention's output"] = heads * (head_dim or config.hidden_size // heads)
    cut = [(what, length, share.size) for what, length in inputs.items()]
    for what, length, size in (*cut, *_inner_sizes(config, share)):
        whole, part = fitting_group(length, group_size), fitting_group(length // size, group_size)
        if whole != part:
            raise ConfigError(
                f"tensor_parallel_size {share.size} cuts {architecture}'s {what} ({length}) within groups of "
                f"{whole} inputs that share a scale; set a quantize_group_size that divides "
                f"{length // size}, or leave quantize none"
            )


def _check(
    architecture: str, what: str, count: int, size: int, setting: str = "tensor_parallel_size"
) -> None:
    if count % size:
        raise ConfigError(
            f"{setting} {size} doesn't divide {architecture}'s {what} ({count}); choose a divisor of {count}"
        )
