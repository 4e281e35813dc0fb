"""From a checkpoint to a fused decoder on a GPU (`gpu_path` fused), or to an error before it is read."""

from __future__ import annotations

import math
from importlib.util import find_spec

from stemma.errors import ConfigError, UnsupportedModel
from stemma.model.cpu.heads import kv_shape_of
from stemma.model.cuda.execution import keep_compiled_kernels, triton_version
from stemma.model.families.layout import ModelLayout
from stemma.model.families.registry import family_of
from stemma.model.foreign.vision import VisionEncoder, load_encoder
from stemma.model.load.fused_loading import fitting_layout, named_weights
from stemma.model.load.job import Loaded, LoadJob
from stemma.model.opened.checkpoint_config import runs_remote_code
from stemma.model.vision.family import VisionConfig


def load_on_device(load: LoadJob, vision: VisionConfig | None) -> tuple[Loaded, VisionEncoder | None]:
    """Return the decoder of what `load` names, and the vision encoder if there is one.

    Raises ConfigError without Triton, UnsupportedModel for what the kernels don't compute, ModelError for
    weights that aren't finite.
    """
    if find_spec("triton") is None:
        raise ConfigError("gpu_path is fused, which needs Triton; install stemma-llm[cuda], or set modules")
    keep_compiled_kernels()
    # Only here: no other path needs Triton.
    from stemma.model.cuda.fused import ORDER
    from stemma.model.cuda.fused_steps import make_fused_decoder
    from stemma.model.cuda.sampler import choose

    layout = fitting_layout(load.checkpoint)
    reason = _refusal(load, layout, vision)
    family = family_of(load.checkpoint.config.model_type)
    if reason is not None or layout is None or family is None:
        raise UnsupportedModel(
            f"gpu_path is fused, which doesn't compute {reason} yet ({load.checkpoint.path}); set gpu_path "
            "modules, which serves what transformers' modules do"
        )
    decoder = make_fused_decoder(
        layout,
        named_weights(load.checkpoint),
        load.checkpoint.dtype,
        load.device,
        max_positions=load.max_model_len,
        records=load.settings.cuda_graphs,
        report=lambda share: load.report("bringing weights to the device", share),
    )
    loaded = Loaded(
        decoder,
        kv_shape_of(layout),
        family.architecture,
        sum(math.prod(shape) for shape in layout.shapes().values()) * load.checkpoint.dtype.itemsize,
        len(load.checkpoint.codes),
        choose=choose,
        computed_by=f":fused-{ORDER}:{triton_version()}",
    )
    if vision is None:
        return loaded, None
    own = load.checkpoint
    return loaded, load_encoder(own.path, vision, own.tower, own.dtype, None, load.device)


def _refusal(load: LoadJob, layout: ModelLayout | None, vision: VisionConfig | None) -> str | None:
    """Return what isn't computed; None: all is."""
    checkpoint = load.checkpoint
    if vision is not None and vision.family.num_whole is not None:
        return "images whose tokens see each other both ways"
    if load.group is not None:
        return "parts of a model on several ranks"
    if runs_remote_code(load.settings):
        return "what a checkpoint's own code computes"
    if layout is None:
        kind, dtype = checkpoint.config.model_type, str(checkpoint.dtype).removeprefix("torch.")
        return f"{kind} models with these tensors in {dtype}"
    return None
