"""Recurrent layers of transformers' modules, over the states of a step.

transformers writes all of them alike: a module projects, calls a function for the short convolution and one
for the scan, and gives both states to a cache. `divert` replaces these functions in the modules' files by
ones that compute with the step that runs (`StateStep`), token by token; where no step of ours runs,
transformers' own run as before. `LayerCache` is the cache that the modules are given: it keeps nothing, and
says which layer runs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from stemma.errors import UnsupportedModel
from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import StateLayout, StatePart
from stemma.model.attend.attention import SUPPORTED
from stemma.model.attend.batch import ForwardBatch
from stemma.model.attend.recurrence import Recurrence, SequenceRows

CONV, RECURRENT = "conv", "recurrent"
Function: TypeAlias = Callable[..., Any]
_step: ContextVar[StateStep | None] = ContextVar("stemma_state_step", default=None)


class StateStep:
    """Where the states of a step lie, and what computes with them."""

    def __init__(self, recurrence: Recurrence) -> None:
        self.recurrence = recurrence
        self.layer = -1
        """The layer that runs."""

    def sequences(self, name: str, shape: tuple[int, ...]) -> Sequence[SequenceRows]:
        """Return the step's sequences with a part of their states in the layer that runs."""
        raise NotImplementedError


class PagedStates(StateStep):
    """States in the device tier."""

    def __init__(self, recurrence: Recurrence, batch: ForwardBatch, kv: DeviceKV) -> None:
        super().__init__(recurrence)
        assert batch.states is not None
        assert kv.layout.state is not None
        self._batch, self._kv, self._moves = batch, kv, batch.states
        self._offsets = kv.layout.state.offsets()

    def sequences(self, name: str, shape: tuple[int, ...]) -> Sequence[SequenceRows]:
        """Return each sequence's rows, and the place of its state `name`."""
        offset = self._offsets[self.layer, name]
        starts, moves = self._batch.query_starts, self._moves

        def part(state: int) -> torch.Tensor:
            return self._kv.state_part(state, offset, shape)

        found = []
        for number, last in enumerate(moves.last):
            rows = range(starts[number], starts[number + 1])
            initial = moves.initial[number]
            snapshots = [(row, part(state)) for row, state in moves.snapshots if row in rows]
            found.append(
                SequenceRows(rows, None if initial is None else part(initial), part(last), snapshots)
            )
        return found


class ProbedStates(StateStep):
    """States of one sequence of `num_tokens` that begins, kept nowhere; records what layers have."""

    def __init__(self, recurrence: Recurrence, num_tokens: int) -> None:
        super().__init__(recurrence)
        self._rows = range(num_tokens)
        self.parts: dict[tuple[int, str], StatePart] = {}

    def sequences(self, name: str, shape: tuple[int, ...]) -> Sequence[SequenceRows]:
        """Return each sequence's rows, and the place of its state `name`."""
        if self.layer < 0 or (self.layer, name) in self.parts:
            raise UnsupportedModel(f"recurrent layers run in an order that isn't known. {SUPPORTED}")
        self.parts[self.layer, name] = StatePart(self.layer, name, shape)
        return [SequenceRows(self._rows, None, torch.empty(shape))]

    def layout(self) -> StateLayout | None:
        """Return what the layers that ran keep; None: nothing."""
        return StateLayout(tuple(self.parts.values())) if self.parts else None


@contextmanager
def running(step: StateStep | None) -> Iterator[None]:
    """Let recurrent layers compute with a step's states; None: there are none."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


class LayerCache:
    """Stand-in for transformers' cache. It keeps nothing: attention and scans find their own."""

    def get_conv_state(self, layer_idx: int, **_options: Any) -> None:
        """Return that a sequence begins, so that modules call the functions that `divert` replaces."""
        _running().layer = layer_idx

    def get_recurrent_state(self, layer_idx: int, **_options: Any) -> None:
        """Return that a sequence begins, as `get_conv_state` does."""
        _running().layer = layer_idx

    def update_conv_state(self, inputs: torch.Tensor, *_place: Any, **_options: Any) -> torch.Tensor:
        """Return the inputs alone: those before them are in the step's states."""
        return inputs

    def update_recurrent_state(self, state: object, *_place: Any, **_options: Any) -> object:
        """Keep nothing."""
        return state

    def update(
        self, key: torch.Tensor, value: torch.Tensor, *_place: Any, **_options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the step's own keys and values: those before them are in blocks."""
        return key, value

    def get_seq_length(self, *_place: Any) -> int:
        """Return 0: positions are given."""
        return 0

    def is_recording_past(self, *_place: Any) -> bool:
        """Return that nothing is recorded."""
        return False

    def has_previous_state(self, *_place: Any) -> bool:
        """Return that sequences begin."""
        return False


def cache_of(model: nn.Module) -> dict[str, LayerCache]:
    """Return the keyword under which a model with recurrent layers takes its cache, and the cache."""
    known = inspect.signature(model.forward).parameters
    return {"cache_params" if "cache_params" in known else "past_key_values": LayerCache()}


def _running() -> StateStep:
    step = _step.get()
    assert step is not None
    return step


def divert(model: nn.Module) -> bool:
    """Replace the functions of recurrent layers in the files of a model's modules.

    Returns whether there are any.
    """
    found = False
    for name in {type(module).__module__ for module in model.modules()}:
        file = sys.modules.get(name)
        for function, replacement in _REPLACED.items():
            own = getattr(file, function, None)
            if own is None:
                continue
            found = True
            if not hasattr(own, "stemma_own"):
                setattr(file, function, _diverted(own, replacement))
        for kind, replacement in _REPLACED_FORWARDS.items():
            layer = getattr(file, kind, None)
            if layer is None:
                continue
            found = True
            if not hasattr(layer.forward, "stemma_own"):
                layer.forward = _diverted(layer.forward, replacement)
    return found


def _diverted(own: Function, replacement: Function) -> Function:
    @wraps(own)
    def call(*args: Any, **options: Any) -> Any:
        step = _step.get()
        return own(*args, **options) if step is None else replacement(step, *args, **options)

    call.stemma_own = own  # type: ignore[attr-defined]
    return call


def _floats(x: torch.Tensor) -> torch.Tensor:
    return x.float().contiguous()


def _convolve(
    step: StateStep,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_options: Any,
) -> torch.Tensor:
    """Replace `causal_conv1d_fn`: [1, C, T] by [C, width] -> [1, C, T]."""
    x = _floats(hidden_states[0].T)
    if activation not in (None, "silu", "swish"):
        raise UnsupportedModel(f"a short convolution with activation {activation} isn't served")
    channels, width = weight.shape
    output = step.recurrence.convolve(
        step.sequences(CONV, (width - 1, channels)),
        x,
        _floats(weight.detach().T),
        None if bias is None else _floats(bias.detach()),
        is_activated=activation is not None,
    )
    return output.to(hidden_states.dtype).T[None]


def _normalized(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)


def _delta_rule(
    step: StateStep,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace `torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention`: [1, T, heads, dim] each."""
    q, k = query[0].float(), key[0].float()
    if use_qk_l2norm_in_kernel:
        q, k = _normalized(q), _normalized(k)
    q = q * (1 / q.shape[-1] ** 0.5)
    heads, value_dim = value.shape[2:]
    output = step.recurrence.scan(
        step.sequences(RECURRENT, (heads, k.shape[-1], value_dim)),
        q.contiguous(),
        k.contiguous(),
        _floats(value[0]),
        _floats(g[0]),
        _floats(beta[0]),
    )
    return output.to(query.dtype)[None], value.new_empty(0)  # the state is where it belongs


def _mamba2(
    step: StateStep,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    z: torch.Tensor | None = None,
    **_options: Any,
) -> Any:
    """Replace `mamba2_chunk_scan`: x [1, T, H, P], dt [1, T, H], A [H], B and C [1, T, G, N]."""
    steps = dt[0].float()
    if dt_bias is not None:
        steps = steps + dt_bias.detach().float()
    if dt_softplus:
        steps = F.softplus(steps)
    steps = torch.clamp(steps, *dt_limit)
    x = hidden_states[0].float()
    heads, head_dim = x.shape[1:]
    output = step.recurrence.scan(
        step.sequences(RECURRENT, (heads, B.shape[-1], head_dim)),
        _floats(C[0]),
        _floats(B[0]),
        (x * steps[..., None]).contiguous(),
        (steps * A.float()).contiguous(),
        None,
    )
    if D is not None:
        output = output + x * D.detach().float()[:, None]
    if z is not None:
        output = output * F.silu(z[0].float())
    output = output.to(hidden_states.dtype)[None]
    return (output, None) if return_final_states else output


def _mamba(
    step: StateStep,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_options: Any,
) -> Any:
    """Replace `mamba_selective_scan`: x and dt [1, C, T], A [C, N], B and C [1, N, T]."""
    steps = dt[0].T.float()
    if delta_bias is not None:
        steps = steps + delta_bias.detach().float()
    if delta_softplus:
        steps = F.softplus(steps)
    channels, state_dim = A.shape
    output = step.recurrence.select(
        step.sequences(RECURRENT, (state_dim, channels)),
        _floats(hidden_states[0].T),
        steps.contiguous(),
        _floats(A.T),
        _floats(B[0].T),
        _floats(C[0].T),
        None if D is None else _floats(D.detach()),
    )
    if z is not None:
        output = output * F.silu(z[0].T.float())
    scanned = output.to(hidden_states.dtype).T[None]
    return (scanned, None) if return_last_state else scanned


def _lightning(
    step: StateStep, layer: Any, hidden_states: torch.Tensor, *_place: Any, **_options: Any
) -> tuple[torch.Tensor, None]:
    """Replace the forward of MiniMax's lightning attention: hidden states [1, T, H] -> [1, T, H].

    A state decays by one factor a head; transformers computes it in blocks of 256 tokens.
    """
    step.layer = layer.layer_idx
    heads, dim = layer.num_attention_heads, layer.head_dim
    joined = layer.act_fn(layer.qkv_proj(hidden_states))[0].float().view(-1, heads, 3 * dim)
    query, key, value = (part.contiguous() for part in joined.split(dim, dim=-1))
    decay = -layer.slope_rate.float().view(1, heads).expand(len(joined), heads).contiguous()
    sequences = step.sequences(RECURRENT, (heads, dim, dim))
    output = step.recurrence.scan(sequences, query, key, value, decay, None)
    attended = layer.norm(output.flatten(1).to(hidden_states.dtype)[None])
    gated = F.sigmoid(layer.output_gate(hidden_states)) * attended
    return layer.out_proj(gated), None


_REPLACED_FORWARDS: dict[str, Function] = {"MiniMaxLightningAttention": _lightning}
"""Classes whose recurrence stands in their forward -> what replaces it."""
_REPLACED: dict[str, Function] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba,
}
"""Names of transformers' functions -> what computes them over a step's states."""
