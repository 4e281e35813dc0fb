"""Ask a GPU whether rows and states of recurrent layers depend on the batch, and what a layer costs.

`python -m benchmarks.device.recurrent_probe --check --time --json FILE`. `--check`: the steps in which rows,
or the state behind them, have other bits than in one step of all rows; and the error beside torch, token by
token. `--time`: microseconds of a layer before its output product, in a recording, and the limit by what is
read and written of states. Without a GPU `--check` runs small shapes in Triton's interpreter
(TRITON_INTERPRET=1); there `--time` is refused.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.device.recorded import record, replay
from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout
from stemma.model.attend.batch import ForwardBatch, StateMoves
from stemma.model.attend.recurrence import SequenceRows, TorchRecurrence
from stemma.model.cpu.recurrent_layer import state_layout_of
from stemma.model.cuda.layers import LayerStep, OnDevice
from stemma.model.cuda.listed_attention import ListedAttentionStep, PieceRoom
from stemma.model.cuda.recurrent import RecurrentLayer
from stemma.model.cuda.step_inputs import StepInputs
from stemma.model.families import layout
from stemma.model.weights.named import NamedWeights

DELTA, MAMBA2 = layout.RecurrentKind


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer."""

    kind: layout.RecurrentKind
    hidden: int
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int


SHAPES = {
    "delta rule": Shape(DELTA, 2048, 32, 16, 128, 128),
    "mamba 2": Shape(MAMBA2, 1536, 48, 1, 128, 64),
}
SMALL = {"small delta rule": Shape(DELTA, 32, 2, 1, 16, 12), "small mamba 2": Shape(MAMBA2, 32, 2, 1, 16, 12)}
LENGTH, COUNTS, BESIDE = 2000, (1, 2, 7, 64, 300, 1000), (1, 40, 700, 1, 1)
"""Rows of the sequence that is asked for, numbers of its last ones, and rows of others."""
TIMED = {
    "decode 1": (1,),
    "decode 64": (1,) * 64,
    "prompt of 2048": (2048,),
    "64 beside 448": (*(1,) * 64, 448),
}
WIDTH = 4
_ROWS_OF_TORCH = 64


class Probe:
    """One layer of random weights on a device, and states."""

    def __init__(self, shape: Shape, device: torch.device, num_states: int) -> None:
        self.device, self.generator = device, torch.Generator(device).manual_seed(0)
        self.one = one = _recurrent(shape)
        linear = layout.Linear(
            "r.in", one.step_at + (2 if shape.kind == DELTA else 1) * one.heads, shape.hidden
        )
        norm, mlp = one.norm, layout.Gated(linear, linear, linear)
        layer = layout.Layer((linear,), linear, mlp, norm, norm, 1.0, recurrent=one)
        heads = layout.GroupedHeads(1, 1, 64)
        model = layout.ModelLayout((layer,), heads, linear, norm, None, lambda: None)  # type: ignore[arg-type, return-value]
        states = state_layout_of(model)
        kept = KVLayout(1, 2, 64, 1, 64, "bfloat16", state=states)
        self.kv = DeviceKV(kept, kept.aligned(1), device, num_states=num_states)
        self.kv.data.fill_(7.0)
        self.weights = {name: self.random(*size) for name, size in dict(layer.shapes()).items()}
        self.weights["r.in.weight"] *= shape.hidden**-0.5
        load = OnDevice(
            NamedWeights(self.weights, torch.bfloat16, lambda _name, _numbers: None), torch.bfloat16, device
        )
        self.layer = RecurrentLayer(0, layer, states, load)
        self.product = load.product(linear)
        self.room = PieceRoom(1, 64) if device.type == "cpu" else PieceRoom.on(device)

    def random(self, *shape: int) -> torch.Tensor:
        """Return random numbers in bfloat16."""
        return torch.randn(*shape, device=self.device, generator=self.generator).bfloat16()

    def step(self, counts: Sequence[int], moves: StateMoves) -> LayerStep:
        """Return the step of sequences with so many rows each."""
        num_rows = sum(counts)
        rows = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        tables = torch.zeros(len(counts), 1, dtype=torch.int32)
        starts = np.cumsum([0, *counts]).tolist()
        batch = ForwardBatch(rows, rows, rows - 1, starts, [1] * len(counts), tables, rows[:1], states=moves)
        inputs = StepInputs(num_rows, self.device, self.room.num_programs)
        assert inputs.fill(batch, num_rows, self.kv)
        listed = ListedAttentionStep(inputs, self.kv, self.room)
        return LayerStep(listed, self.kv, states=listed.states)

    def state(self, number: int) -> torch.Tensor:
        """Return all parts of a state."""
        assert self.kv.layout.state is not None
        return self.kv.state_part(number, 0, (self.kv.layout.state.num_bytes // 4,))


def _recurrent(shape: Shape) -> layout.Recurrent:
    keys, values = shape.key_heads * shape.key_dim, shape.heads * shape.value_dim
    is_delta, channels = shape.kind == DELTA, 2 * keys + values
    return layout.Recurrent(
        shape.kind,
        "r",
        *(shape.heads, shape.key_heads, shape.key_dim, shape.value_dim, WIDTH),
        norm=layout.Norm("r.norm", shape.value_dim if is_delta else values, 1e-6),
        conv_at=0 if is_delta else values,
        gate_at=channels if is_delta else 0,
        step_at=channels + values,
        beta_at=channels + values + shape.heads if is_delta else 0,
        has_conv_bias=not is_delta,
        has_skip=not is_delta,
        gates_first=not is_delta,
        norm_dim=shape.value_dim if is_delta else values,
    )


def check(name: str, shape: Shape, device: torch.device) -> dict[str, object]:
    """Return the steps whose rows or states have other bits."""
    length, counts, beside = (LENGTH, COUNTS, BESIDE) if device.type == "cuda" else (20, (1, 2, 11), (1, 5))
    probe = Probe(shape, device, len(counts) + len(beside) + 2)
    x, positions = probe.random(length, shape.hidden), torch.zeros(0, device=device)
    kept = tuple(
        (length - count - 1, 2 + at) for at, count in sorted(enumerate(counts), key=lambda one: -one[1])
    )
    whole = probe.layer(x, positions, probe.step([length], StateMoves((None,), (0,), kept)))
    found, first = [], len(counts) + 2
    for at, count in enumerate(counts):
        for way, others in (("alone", ()), ("beside others", beside)):
            numbers = tuple(range(first, first + len(others)))
            moves = StateMoves((2 + at, *(None for _ in others)), (1, *numbers), ())
            rows = torch.cat((x[length - count :], probe.random(sum(others), shape.hidden)))
            made = probe.layer(rows, positions, probe.step([count, *others], moves))[:count]
            if not (
                torch.equal(made, whole[length - count :]) and torch.equal(probe.state(0), probe.state(1))
            ):
                found.append(f"{count} {way}")
    return {"shape": name, "bits differ": found, "error": _error(probe, x[:_ROWS_OF_TORCH], whole)}


def _error(probe: Probe, x: torch.Tensor, whole: torch.Tensor) -> float:
    """Return the relative error of the first rows beside torch, token by token in float32."""
    one, weights = probe.one, {name: tensor.float() for name, tensor in probe.weights.items()}
    given, torch_alone = probe.product(x).join().float(), TorchRecurrence()
    rows, is_delta = range(len(x)), one.kind == DELTA

    def sequence(*shape: int) -> list[SequenceRows]:
        return [SequenceRows(rows, None, torch.empty(shape, device=x.device))]

    def part(at: int, count: int) -> torch.Tensor:
        return given[:, at : at + count]

    mixed = torch_alone.convolve(
        sequence(WIDTH - 1, one.channels),
        part(one.conv_at, one.channels),
        weights["r.conv1d.weight"][:, 0].T,
        weights.get("r.conv1d.bias"),
        is_activated=True,
    )
    keys, values = one.key_heads * one.key_dim, one.heads * one.value_dim
    split = [keys, keys, values] if is_delta else [values, keys, keys]
    parts = torch.split(mixed, split, 1)
    q, k, v = parts if is_delta else parts[::-1]
    q, k = (each.view(len(x), one.key_heads, one.key_dim) for each in (q, k))
    v = v.view(len(x), one.heads, one.value_dim)
    step, beta = F.softplus(part(one.step_at, one.heads) + weights["r.dt_bias"]), None
    decay = -weights["r.A_log"].exp() * step
    scaled = v
    if is_delta:
        q, k = (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + 1e-6) for each in (q, k))
        q, beta = q * one.key_dim**-0.5, part(one.beta_at, one.heads).sigmoid()
    else:
        scaled = v * step[..., None]
    y = torch_alone.scan(sequence(one.heads, one.key_dim, one.value_dim), q, k, scaled, decay, beta)
    if not is_delta:
        y = y + v * weights["r.D"][:, None]
    y, gate = y.flatten(1), F.silu(part(one.gate_at, values))
    y = (y if is_delta else y * gate).view(len(x), -1, one.norm_dim)
    y = (y * torch.rsqrt((y * y).mean(-1, keepdim=True) + one.norm.eps) * weights["r.norm.weight"]).flatten(1)
    exact = y * gate if is_delta else y
    return float(f"{((whole[: len(x)].float() - exact).norm() / exact.norm()).item():.1e}")


def timed(name: str, shape: Shape, device: torch.device) -> Iterator[dict[str, object]]:
    """Yield microseconds of each step, and what they would be if states alone were moved at 4 TB/s."""
    probe = Probe(shape, device, 65)
    for what, counts in TIMED.items():
        numbers = tuple(range(len(counts)))
        step = probe.step(counts, StateMoves(numbers, numbers, ()))
        x = probe.random(sum(counts), shape.hidden)
        recording = record(partial(probe.layer, x, x, step))
        us = round(1e6 * min(replay(recording)[0] for _ in range(10)), 1)
        assert probe.kv.layout.state is not None
        moved = 2 * len(counts) * probe.kv.layout.state.num_bytes
        yield {"shape": name, "step": what, "us": us, "us_of_states_at_4_tb_s": round(moved / 4e6, 1)}


def main() -> None:
    """Print a line of JSON for each answer, as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--json", type=Path, help="write all answers here")
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if given.time and device.type != "cuda":
        parser.error("--time needs a GPU")
    answers: list[dict[str, object]] = []
    for name, shape in (SHAPES if device.type == "cuda" else SMALL).items():
        for answer in (
            *([check(name, shape, device)] if given.check else ()),
            *(timed(name, shape, device) if given.time else ()),
        ):
            answers.append(answer)
            print(json.dumps(answer), flush=True)
            if given.json is not None:
                given.json.write_text(json.dumps(answers, indent=1))


if __name__ == "__main__":
    main()
