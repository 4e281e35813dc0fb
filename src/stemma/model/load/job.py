"""Data that the steps of one load share: its input and its result."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from stemma.config.settings import ModelSettings
from stemma.model.attend.kept_kv import KVShape
from stemma.model.cpu.packing import Packing
from stemma.model.files.progress import Progress
from stemma.model.load.plan import LoadPlan
from stemma.model.opened.causal_lm import Decoder
from stemma.model.opened.checkpoint import DecoderParts
from stemma.model.opened.draw_rules import Choose
from stemma.model.opened.selfcheck import Reference
from stemma.model.parallel.group import RankGroup


@dataclass(frozen=True, slots=True)
class LoadJob:
    """A checkpoint to load, and how."""

    settings: ModelSettings
    checkpoint: DecoderParts
    device: torch.device
    max_model_len: int
    packing: Packing | None
    """None: without kernels."""
    predicts: bool
    """Load the layer for multi-token prediction too."""
    group: RankGroup | None
    plan: LoadPlan | None
    report: Progress


@dataclass(frozen=True, slots=True)
class Loaded:
    """A decoder, and what its checks need."""

    decoder: Decoder
    kv_shape: KVShape
    architecture: str
    num_bytes: int
    """Bytes of all weights, were they plain."""
    num_codes: int
    """Weights of the checkpoint that stay quantized."""
    reference: Reference | None = None
    """Results that the model computes by itself; None: tests have compared its family."""
    checked: Callable[[], AbstractContextManager[None]] = field(default=nullcontext)
    """Lets the decoder run just those layers that the reference comes from."""
    computed_by: str = ""
    """The versions of libraries whose code computes KV; empty: our kernels alone do."""
    choose: Choose | None = None
    """How the device draws tokens; None: by torch's operations."""
