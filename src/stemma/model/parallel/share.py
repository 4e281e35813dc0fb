"""Which part of a model a rank holds: tensor parallel, and expert parallel for mixtures of experts.

Context parallel (dealing.py) divides the tokens: groups of ranks, each of which holds the whole model.

Column-parallel layers (query, key, value, gate, up, and what expands a latent) hold some of their outputs,
row-parallel ones (attention's output, down) the inputs that belong to them, as in Megatron-LM
(arXiv:1909.08053, section 3). Each row-parallel layer's results are then partial sums. Embedding, output
head, norms, routers and the projections to a cached latent are whole on every rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from stemma.errors import ConfigError, UnsupportedModel
from stemma.model.families.registry import CUT
from stemma.model.weights.rounding import fitting_group

COLUMNS = frozenset({"q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj"})
ROWS = frozenset({"o_proj", "down_proj"})
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
        """All ranks."""
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


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a stored tensor that a rank reads."""

    name: str
    """Under which the rank's smaller model knows it: its experts are counted from 0."""
    axis: int | None = None
    """The dimension that is cut; None: the tensor is whole."""
    part: range = range(0)
    is_zero: bool = False
    """Another rank adds it: zeros here."""


def cut_of(name: str, shape: tuple[int, ...], share: Share, num_experts: int) -> Cut | None:
    """Return what a rank reads of a tensor of the checkpoint; None: nothing, it is of another's expert."""
    expert = _EXPERT.search(name)
    if expert is not None:
        own = share.experts(num_experts)
        number = int(expert[1])
        if number not in own:
            return None
        name = f"{name[: expert.start(1)]}{number - own.start}{name[expert.end(1) :]}"
    layer, _, kind = name.rpartition(".")
    leaf = layer.rpartition(".")[2]
    if leaf in ROWS and kind == "bias":
        return Cut(name, is_zero=share.rank > 0)
    axis = 0 if leaf in COLUMNS else 1 if leaf in ROWS and kind == "weight" else None
    if axis is None or axis >= len(shape):
        return Cut(name)
    return Cut(name, axis, share.part(shape[axis], of_expert=expert is not None))


def num_experts_of(config: Any) -> int:
    """Return the routed experts of a layer; 0: the model is no mixture of experts."""
    for field in ("num_local_experts", "num_experts", "n_routed_experts"):
        count = getattr(config, field, None)
        if count:
            return int(count)
    return 0


def check_share(architecture: str, config: Any, share: Share) -> None:
    """Raise UnsupportedModel or ConfigError unless the model can be cut for this number of ranks."""
    if architecture not in CUT:
        raise UnsupportedModel(
            f"{architecture} isn't served on several ranks; leave tensor_parallel_size and "
            "context_parallel_size 1. Those that are: "
            f"{', '.join(sorted(CUT))}"
        )
    size = share.size
    _check(architecture, "attention heads", config.num_attention_heads, size)
    if not getattr(config, "kv_lora_rank", None):
        _check(architecture, "KV heads", config.num_key_value_heads, size)
    _check(architecture, "intermediate_size", config.intermediate_size, size)
    num_experts = num_experts_of(config)
    if not num_experts:
        if share.expert_size > 1:
            raise ConfigError(
                f"expert_parallel_size is {share.expert_size}, but {architecture} has no experts; leave it 1"
            )
        return
    _check(architecture, "experts", num_experts, share.expert_size, "expert_parallel_size")
    inner = config.moe_intermediate_size
    _check(architecture, "moe_intermediate_size", inner, share.ranks_per_expert)
    if shared := getattr(config, "n_shared_experts", None):
        _check(architecture, "inner size of the shared experts", shared * inner, size)


def check_groups(architecture: str, config: Any, share: Share, group_size: int) -> None:
    """Raise ConfigError unless each rank's inputs hold the same groups of shared scales as one process's.

    Inputs of row-parallel layers are cut. A group that would lie on two ranks would be rounded differently.
    """
    heads = config.num_attention_heads
    head_dim = getattr(config, "v_head_dim", None) or getattr(config, "head_dim", None)
    cut = [("attention's output", heads * (head_dim or config.hidden_size // heads), share.size)]
    cut.append(("intermediate_size", config.intermediate_size, share.size))
    if num_experts_of(config):
        inner = config.moe_intermediate_size
        cut.append(("moe_intermediate_size", inner, share.ranks_per_expert))
        if shared := getattr(config, "n_shared_experts", None):
            cut.append(("inner size of the shared experts", shared * inner, share.size))
    for what, length, size in cut:
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
