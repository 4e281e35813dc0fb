"""Which tensors of a family are divided over the ranks of tensor parallel, and into which runs.

Column-parallel layers (query, key, value, gate, up, and what expands a latent) hold some of their outputs,
row-parallel ones (attention's output, down) the inputs that belong to them, as in Megatron-LM
(arXiv:1909.08053, section 3). Heads of recurrent layers are divided as heads of attention are: with the rows
of their joined inputs, the channels of their convolution and their scales. What heads share is whole on every
rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class CutRun:
    """A run of a dimension that is divided by itself."""

    length: int
    is_shared: bool = False
    """Whole on every rank."""


Runs = tuple[CutRun, ...]
"""A whole dimension; empty: it is one run of whatever length."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """How the tensors of one model are divided. Tensors that aren't named are whole on every rank.

    Names are the last one or two parts of a tensor's path, without ``weight`` and ``bias``: ``q_proj``,
    ``mamba.in_proj``.
    """

    columns: Mapping[str, Runs] = field(default_factory=dict)
    """Tensors whose outputs are divided."""
    rows: frozenset[str] = frozenset()
    """Layers whose inputs are divided: their results are partial sums."""
    stacks: frozenset[str] = frozenset()
    """Of the above those that hold all experts of a layer, [experts, outputs, inputs]."""
    fields: Mapping[str, Mapping[str, Runs]] = field(default_factory=dict)
    """Numbers that transformers' modules keep of dimensions that are divided, by the module's name."""
    axes: Mapping[str, int] = field(default_factory=dict)
    """Which dimension of a divided tensor or buffer that is, where it isn't the first."""
    buffers: Mapping[str, Runs] = field(default_factory=dict)
    """What transformers' modules compute as they are made, of numbers that are divided."""
    norms: frozenset[str] = frozenset()
    """Norms whose groups lie on several ranks, gated or not."""
    divided: Mapping[str, int] = field(default_factory=dict)
    """Numbers that the ranks must divide, in words."""
    inputs: Mapping[str, int] = field(default_factory=dict)
    """Inputs of row-parallel layers, in words, beside those of attention and of feed-forward layers."""
    has_states: bool = False
    """Whether recurrent layers keep states, which need all tokens before them."""

    def runs(self, path: str) -> Runs | None:
        """Return the runs of a tensor whose outputs are divided; None: they aren't."""
        return next((self.columns[name] for name in _names(path) if name in self.columns), None)

    def axis(self, path: str) -> int:
        """Return which dimension of a tensor is divided."""
        return next((self.axes[name] for name in _names(path) if name in self.axes), 0)

    def buffer_runs(self, path: str) -> Runs | None:
        """Return the runs of a module's buffer that is divided; None: it isn't."""
        return next((self.buffers[name] for name in _names(path) if name in self.buffers), None)

    def divides_inputs(self, path: str) -> bool:
        """Whether a layer's inputs are divided."""
        return any(name in self.rows for name in _names(path))

    def is_stack(self, path: str) -> bool:
        """Whether a tensor holds all experts of a layer."""
        return any(name in self.stacks for name in _names(path))

    def has_ranked_norm(self, path: str) -> bool:
        """Whether a module is a norm whose groups lie on several ranks."""
        return any(name in self.norms for name in _names(path))


def _names(path: str) -> tuple[str, str]:
    parts = path.rsplit(".", 2)
    return ".".join(parts[-2:]), parts[-1]


_COLUMNS: dict[str, Runs] = dict.fromkeys(
    ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj"), ()
)
_ROWS = frozenset({"o_proj", "down_proj"})
_PLAIN = Cuts(_COLUMNS, _ROWS)


def plain_cuts(_config: Any, _num_ranks: int) -> Cuts:
    """Return the cuts of the Llama pattern and of latent attention."""
    return _PLAIN


def delta_rule_cuts(config: Any, _num_ranks: int) -> Cuts:
    """Return the cuts of Qwen3-Next and Qwen3.5: value heads go with the key head that they share.

    ``in_proj_qkvz`` and ``in_proj_ba`` lie key head by key head, the others kind by kind.
    """
    heads, key_heads = config.linear_num_value_heads, config.linear_num_key_heads
    keys = CutRun(key_heads * config.linear_key_head_dim)
    values = CutRun(heads * config.linear_value_head_dim)
    kinds, each = (keys, keys, values), (CutRun(heads),)
    mixer = "linear_attn"
    apart = {"in_proj_qkvz": (), "in_proj_ba": (), "in_proj_qkv": kinds, "in_proj_z": (values,)}
    apart |= {"in_proj_b": each, "in_proj_a": each, "conv1d": kinds, "A_log": each, "dt_bias": each}
    inner = CutRun(getattr(config, "moe_intermediate_size", 0))
    numbers = {"num_v_heads": each, "num_k_heads": (CutRun(key_heads),), "key_dim": (keys,)}
    return Cuts(
        columns=_COLUMNS
        | {f"{mixer}.{name}": runs for name, runs in apart.items()}
        | {"experts.gate_up_proj": (inner, inner)},
        rows=_ROWS | {f"{mixer}.out_proj", "experts.down_proj"},
        stacks=frozenset({"experts.gate_up_proj", "experts.down_proj"}),
        fields={mixer: numbers | {"value_dim": (values,), "conv_dim": kinds}},
        divided={"key heads of recurrent layers": key_heads, "heads of recurrent layers": heads},
        inputs={"recurrent layers' output": values.length},
        has_states=True,
    )


@dataclass(frozen=True, slots=True)
class LinearHeads:
    """Sizes of the delta rule's layers."""

    name: str
    """Of their module."""
    heads: int
    key_heads: int
    keys: int
    """Numbers of all key heads."""
    values: int
    """Numbers of all value heads."""


@dataclass(frozen=True, slots=True)
class Mamba2Sizes:
    """Sizes of Mamba 2's layers."""

    name: str
    """Of their module."""
    heads: int
    head_dim: int
    groups: int
    state_dim: int


def mamba2_cuts(sizes: Mamba2Sizes, num_ranks: int) -> Cuts:
    """Return the cuts of layers of Mamba 2, beside those of the Llama pattern.

    A single group's inputs and outputs of states are whole on every rank, and its norm goes over all ranks.
    """
    mixer, shares_group = sizes.name, sizes.groups == 1 and num_ranks > 1
    inner, heads = CutRun(sizes.heads * sizes.head_dim), CutRun(sizes.heads)
    states = CutRun(sizes.groups * sizes.state_dim, is_shared=shares_group)
    convolved = (inner, states, states)
    parts: dict[str, Runs] = {"in_proj": (inner, *convolved, heads), "conv1d": convolved, "norm": (inner,)}
    parts |= dict.fromkeys(("A_log", "D", "dt_bias"), (heads,))
    return Cuts(
        columns=_COLUMNS | {f"{mixer}.{name}": runs for name, runs in parts.items()},
        rows=_ROWS | {f"{mixer}.out_proj"},
        fields={
            mixer: {
                "intermediate_size": (inner,),
                "num_heads": (heads,),
                "n_groups": (CutRun(sizes.groups, is_shared=shares_group),),
                "conv_dim": convolved,
            }
        },
        norms=frozenset({f"{mixer}.norm"}) if shares_group else frozenset(),
        divided={"heads of recurrent layers": sizes.heads}
        | ({} if sizes.groups == 1 else {"groups of recurrent layers": sizes.groups}),
        inputs={"recurrent layers' output": inner.length},
        has_states=True,
    )


def mamba1_cuts(mixer: str, channels: int, _num_ranks: int) -> Cuts:
    """Return the cuts of layers of Mamba, beside those of the Llama pattern, by channels.

    Steps and the inputs and outputs of states are made of all channels: of partial sums.
    """
    run = CutRun(channels)
    parts: dict[str, Runs] = {"in_proj": (run, run)}
    parts |= dict.fromkeys(("conv1d", "dt_proj", "A_log", "D"), (run,))
    return Cuts(
        columns=_COLUMNS | {f"{mixer}.{name}": runs for name, runs in parts.items()},
        rows=_ROWS | {f"{mixer}.x_proj", f"{mixer}.out_proj"},
        fields={mixer: {"intermediate_size": (run,)}},
        divided={"channels of recurrent layers": channels},
        inputs={"recurrent layers' channels": channels},
        has_states=True,
    )


def linear_head_cuts(sizes: LinearHeads, columns: Mapping[str, Runs]) -> Cuts:
    """Return the cuts of layers of the delta rule whose queries, keys and values are layers of their own.

    `columns`: what else of them is divided. Files hold their convolutions apart, modules in one.
    """
    keys, values, heads = CutRun(sizes.keys), CutRun(sizes.values), CutRun(sizes.heads)
    kinds = (keys, keys, values)
    apart: dict[str, Runs] = {"q_conv1d": (keys,), "k_conv1d": (keys,), "v_conv1d": (values,)}
    return Cuts(
        columns=_COLUMNS | apart | {"conv1d": kinds, "b_proj": (heads,), "w1": (), "w3": ()} | dict(columns),
        rows=_ROWS | {"w2"},
        fields={
            sizes.name: {
                **dict.fromkeys(("num_heads", "num_v_heads"), (heads,)),
                **{"num_k_heads": (CutRun(sizes.key_heads),), "key_dim": (keys,), "value_dim": (values,)},
                **{"qkv_dim": (keys,), "conv_dim": kinds},
            }
        },
        divided={"heads of recurrent layers": sizes.heads, "key heads of recurrent layers": sizes.key_heads},
        inputs={"recurrent layers' output": values.length},
        has_states=True,
    )


def lightning_cuts(config: Any, _num_ranks: int) -> Cuts:
    """Return the cuts of MiniMax: its lightning attention's norm goes over all ranks."""
    heads = CutRun(config.num_attention_heads)
    inner = CutRun(heads.length * (config.head_dim or config.hidden_size // heads.length))
    joined = CutRun(3 * inner.length)  # head by head
    columns: dict[str, Runs] = {"qkv_proj": (joined,), "output_gate": (inner,), "self_attn.norm": (inner,)}
    return Cuts(
        columns=_COLUMNS | columns | {"w1": (), "w3": ()},
        rows=_ROWS | {"self_attn.out_proj", "w2"},
        fields={"self_attn": {"num_attention_heads": (heads,)}},
        buffers={"slope_rate": (heads,)},
        norms=frozenset({"self_attn.norm"}),
        inputs={"recurrent layers' output": inner.length},
        has_states=True,
    )


def short_convolution_cuts(config: Any, _num_ranks: int) -> Cuts:
    """Return the cuts of LFM2, dense and mixture: its convolutions have a channel for each hidden number."""
    channels = CutRun(config.hidden_size)
    inner = CutRun(getattr(config, "moe_intermediate_size", 0))
    return Cuts(
        columns=_COLUMNS
        | {"conv.in_proj": (channels, channels, channels), "conv.conv": (channels,), "w1": (), "w3": ()}
        | {"experts.gate_up_proj": (inner, inner)},
        rows=_ROWS | {"conv.out_proj", "self_attn.out_proj", "w2", "experts.down_proj"},
        stacks=frozenset({"experts.gate_up_proj", "experts.down_proj"}),
        divided={"hidden_size": channels.length},
        inputs={"convolutions' output": channels.length},
        has_states=True,
    )
