"""How a model runs on CUDA: its own modules, Triton kernels for attention, graphs for decode.

Without Triton (part of CUDA builds of torch on Linux) attention runs through torch: slower but correct.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from stemma.config.folders import cache_folder
from stemma.memory.device.kv import DeviceKV
from stemma.model.attend.batch import ForwardBatch
from stemma.model.attend.shared_prefix import SharedTensors, find_groups
from stemma.model.cuda.graphs import CudaGraphRecorder, GraphDecoder
from stemma.model.cuda.step_tensors import StepTensors
from stemma.model.foreign.decoder import ModuleDecoder
from stemma.model.lora.adapter import Adapter, LinearShape
from stemma.model.opened.causal_lm import Decoder

logger = logging.getLogger(__name__)


class TritonDecoder:
    """Runs the modules of transformers with `TritonAttentionStep`. Needs Triton."""

    def __init__(self, modules: ModuleDecoder, num_multiprocessors: int) -> None:
        # Only here: the package may be missing, and no other path needs it.
        from stemma.model.cuda.triton_attention import TritonAttentionStep

        self._step_type = TritonAttentionStep
        self._modules = modules
        self._num_multiprocessors = num_multiprocessors

    def forward(self, batch: ForwardBatch, kv: DeviceKV) -> torch.Tensor:
        """Write the batch's KV and return logits [L, vocab]."""
        block_size = kv.layout.block_size
        groups = find_groups(batch, block_size)
        shared = SharedTensors.of(groups, batch.num_seqs, block_size, kv.device) if groups else None
        tensors = StepTensors.of(batch, kv.device, shared)
        step = self._step_type(tensors, kv, batch=batch, num_multiprocessors=self._num_multiprocessors)
        return self._modules.run(batch, step)

    def adaptable(self) -> Mapping[str, LinearShape]:
        """Return the linear layers that adapters may add to, by their names in transformers."""
        return self._modules.adaptable()

    def prepare_adapter(self, adapter: Adapter) -> object:
        """Return the adapter as a step of this decoder uses it."""
        return self._modules.prepare_adapter(adapter)

    def decode_step(self, tensors: StepTensors, kv: DeviceKV) -> Any:
        """Return the context of a decode-only step."""
        return self._step_type(tensors, kv, batch=None, num_multiprocessors=self._num_multiprocessors)


def triton_version() -> str:
    """Return the name and version of the compiler of our kernels, or that there is none."""
    try:
        return f"triton-{version('triton')}"
    except PackageNotFoundError:
        return "no-triton"


def keep_compiled_kernels() -> None:
    """Have Triton keep what it compiles with this user's other caches, unless it was told where."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_folder() / "triton"))


def triton_problem(device: torch.device) -> str | None:
    """Return why Triton's kernels don't run; None: a small one computed what it should."""
    if importlib.util.find_spec("triton") is None:
        return "Triton isn't installed"
    keep_compiled_kernels()
    try:
        from stemma.model.cuda.triton_trial import doubled

        numbers = torch.arange(100, device=device)
        return None if torch.equal(doubled(numbers), numbers + numbers) else "it computes wrong numbers"
    except Exception as error:  # noqa: BLE001 - its compiler, its driver, and the C compiler that it calls
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no reason'])[0]}"


def make_cuda_decoder(hf_model: Any, device: torch.device, *, max_context: int, use_graphs: bool) -> Decoder:
    """Return the fastest decoder there is for a model on a CUDA device."""
    modules = ModuleDecoder(hf_model, None, None)
    if importlib.util.find_spec("triton") is None:
        logger.warning("Triton is not installed: attention runs through torch, decode without CUDA graphs")
        return modules
    keep_compiled_kernels()
    triton = TritonDecoder(modules, torch.cuda.get_device_properties(device).multi_processor_count)
    if not use_graphs:
        return triton
    return GraphDecoder(triton, modules.run, triton.decode_step, CudaGraphRecorder(), max_context=max_context)
