"""DeepSeek-V3's layer for multi-token prediction (MTP), which guesses the token after the next one.

After the DeepSeek-V3 technical report (arXiv:2412.19437, section 2.2). The layer takes pairs: a token's
embedding and the model's last hidden state (behind the final norm) of the token before it, joined by
`eh_proj`. It runs one decoder layer over all pairs so far. The output, behind a norm of the layer's own, goes
through the model's output head and predicts the token that follows the pair. To guess further tokens the
layer runs again, on its own output and its own guess.

The pair of token j is kept in slot j of the block table, as one more layer of the block's bytes. A pair
depends on no token after its own, so its KV is shared and stored with the same prefix as the model's own KV.
Token 0 has no pair: its slot holds KV that no later pair attends to (`stemma_first_key`).

transformers ignores these weights when it loads the model. Here they are read into transformers' own decoder
layer, which becomes a submodule of the model, so that its weights are packed with the others.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from stemma.config.settings import ModelSettings
from stemma.errors import ConfigError, ModelError
from stemma.memory.device.kv import DeviceKV
from stemma.model.attention import STEP_KEYWORD, StepContext
from stemma.model.batch import ForwardBatch
from stemma.model.causal_lm import Decoder, ModuleDecoder
from stemma.model.cpu.attention import NativeAttentionStep
from stemma.model.cpu.rowwise import RowwiseOperations
from stemma.model.families.registry import PREDICTING
from stemma.model.foreign import foreign_code
from stemma.model.formats.checkpoint import CheckpointTensors
from stemma.model.formats.reading import GGUF, find_format, read_quantized
from stemma.model.lora.adapter import Adapter, LinearShape
from stemma.model.paged import AttentionStep
from stemma.model.pretrained import quantization_of, transformers_reports
from stemma.model.quantization.attach import plain_weight, plain_weights
from stemma.native.library import Kernels

_SHARED = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
"""Weights of the layer that are copies of the model's own."""
_OWN = ("enorm.weight", "hnorm.weight", "eh_proj.weight")


class PredictionLayer(nn.Module):
    """The layer, but for the embedding and the output head, which are the model's."""

    def __init__(
        self, block: nn.Module, norm: nn.Module, own: dict[str, torch.Tensor], layer_idx: int
    ) -> None:
        """Take a decoder layer of transformers, the norm behind it, and the weights that `_OWN` names."""
        super().__init__()
        self.enorm, self.hnorm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.enorm.weight = nn.Parameter(own["enorm.weight"], requires_grad=False)
        self.hnorm.weight = nn.Parameter(own["hnorm.weight"], requires_grad=False)
        hidden_size, joined_size = own["eh_proj.weight"].shape
        self.eh_proj = nn.Linear(joined_size, hidden_size, bias=False, device="meta")
        self.eh_proj.weight = nn.Parameter(own["eh_proj.weight"], requires_grad=False)
        self.block, self.norm = block, norm
        attention: Any = block.self_attn
        attention.layer_idx = layer_idx
        attention.stemma_first_key = 1

    def forward(
        self,
        embedded: torch.Tensor,
        previous: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        step: StepContext,
    ) -> torch.Tensor:
        """Take embeddings and the hidden states of the tokens before, [1, T, H]; return hidden states."""
        joined = torch.cat((self.enorm(embedded), self.hnorm(previous)), dim=-1)
        hidden = self.block(
            self.eh_proj(joined),
            attention_mask=None,
            position_embeddings=position_embeddings,
            **{STEP_KEYWORD: step},
        )
        result: torch.Tensor = self.norm(hidden)
        return result


class MainDecoder(Decoder, Protocol):
    """A decoder that gives the model's hidden states too."""

    def run_with_states(self, batch: ForwardBatch, step: StepContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the batch's KV; return logits [L, vocab] and all rows' states [T, H] behind the last norm."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return embeddings [T, H] of ids [T]."""

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits [T, vocab] of hidden states [T, H] behind the final norm."""


class StatesOfModules(ModuleDecoder):
    """A `MainDecoder` that runs the modules of transformers."""

    def run_with_states(self, batch: ForwardBatch, step: StepContext) -> tuple[torch.Tensor, torch.Tensor]:
        """See `MainDecoder.run_with_states`."""
        model = self._hf
        with self._adapted.step(batch):
            output = model.model(
                input_ids=batch.token_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                **{STEP_KEYWORD: step},
            )
            states: torch.Tensor = output.last_hidden_state[0]
            return self.head(states[batch.logits_rows]), states

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `MainDecoder.embed`."""
        embedded: torch.Tensor = self._hf.model.embed_tokens(token_ids)
        return embedded

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """See `MainDecoder.head`."""
        logits: torch.Tensor = self._hf.lm_head(states)
        return logits


class PredictingDecoder:
    """Runs a model and, behind it, its MTP layer, which keeps KV for every token that the model does."""

    def __init__(
        self, hf_model: Any, main: MainDecoder, kernels: Kernels | None, operations: RowwiseOperations | None
    ) -> None:
        """`main` runs `hf_model` but for the layer, whose weights are packed already.

        `operations` replace torch's while the layer runs, and `main` too; None: without kernels.
        """
        self._main = main
        self._layer: PredictionLayer = hf_model.stemma_prediction
        self._rotary = hf_model.model.rotary_emb
        self._kernels, self._operations = kernels, operations
        self.hidden_size, self.dtype = int(hf_model.config.hidden_size), hf_model.dtype
        self.hidden = torch.empty(0, self.hidden_size)
        """[T, H]: the model's last hidden states of the batch that ran last."""

    def adaptable(self) -> Mapping[str, LinearShape]:
        """See `Decoder.adaptable`."""
        return self._main.adaptable()

    def prepare_adapter(self, adapter: Adapter) -> object:
        """See `Decoder.prepare_adapter`."""
        return self._main.prepare_adapter(adapter)

    def forward(self, batch: ForwardBatch, kv: DeviceKV) -> torch.Tensor:
        """See `Decoder.forward`."""
        with self._computing(batch, kv) as step:
            logits, self.hidden = self._main.run_with_states(batch, step)
            self._advance(batch, _before(self.hidden, batch), step)
        return logits

    @torch.inference_mode()
    def predict(
        self, batch: ForwardBatch, previous: torch.Tensor, kv: DeviceKV
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the MTP layer alone, on one token of each sequence; write its KV.

        `previous` [S, H]: the hidden state of the token before each. Returns the likeliest next tokens [S]
        int64, and the layer's hidden states [S, H], which are `previous` for the token guessed.
        """
        with self._computing(batch, kv) as step:
            hidden = self._advance(batch, previous, step)
            return self._main.head(hidden).argmax(dim=-1), hidden

    @contextmanager
    def _computing(self, batch: ForwardBatch, kv: DeviceKV) -> Iterator[StepContext]:
        """Give the step's context of attention."""
        if self._kernels is None or self._operations is None:
            yield AttentionStep(batch, kv)
            return
        with self._operations, NativeAttentionStep(batch, kv, self._kernels) as step:
            yield step

    def _advance(self, batch: ForwardBatch, previous: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Run the layer on all rows; `previous` [T, H]. Returns [T, H]."""
        embedded = self._main.embed(batch.token_ids)[None]
        angles = self._rotary(embedded, batch.positions[None])
        result: torch.Tensor = self._layer(embedded, previous[None], angles, step)[0]
        return result


def _before(hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
    """Return for each row the hidden state of the token before it, [T, H]."""
    before = torch.empty_like(hidden)
    before[1:] = hidden[:-1]
    starts = torch.tensor(batch.query_starts[:-1], device=hidden.device)
    before[starts] = 0 if batch.previous_hidden is None else batch.previous_hidden
    return before


def add_prediction_layer(settings: ModelSettings, config: Any, hf_model: Any) -> None:
    """Read the MTP layer of the checkpoint and make it the submodule `stemma_prediction` of the model.

    `config` is that of the checkpoint; the model's own may lack what it says about quantized weights.
    Raises ConfigError if the checkpoint has none that we run, ModelError if its weights don't fit.
    """
    path = settings.path
    _check_servable(path, config, hf_model)
    number = int(config.num_hidden_layers)
    prefix = f"model.layers.{number}."
    weights = _read(path, prefix, config, hf_model.dtype)
    missing = [name for name in (*_OWN, "shared_head.norm.weight") if name not in weights]
    if missing:
        raise ConfigError(
            f"speculation is mtp, but {path} has no layer for it: {prefix}{missing[0]} is "
            "missing. Take another speculation, e.g. auto, or the checkpoint as it was published"
        )
    for name, main in _SHARED.items():
        own = weights.pop(name, None)
        shared = plain_weight(hf_model.get_submodule(main.removesuffix(".weight")))
        if own is not None and not torch.equal(own.to(hf_model.dtype), shared):
            raise ModelError(
                f"{path}: {prefix}{name} differs from {main}; an MTP layer shares both with its model"
            )
    own_weights = {name: weights.pop(name).to(hf_model.dtype) for name in _OWN}
    block, norm = _build(path, hf_model, prefix, weights)
    if own_weights["eh_proj.weight"].shape != (config.hidden_size, 2 * config.hidden_size):
        raise ModelError(f"{path}: {prefix}eh_proj.weight has another shape than config.json says")
    block.self_attn.config = hf_model.config  # its attention interface is chosen there
    layer = PredictionLayer(block, norm, own_weights, number).eval().requires_grad_(False)
    hf_model.add_module("stemma_prediction", layer)


def _check_servable(path: Path, config: Any, hf_model: Any) -> None:
    name = type(hf_model).__name__
    if name not in PREDICTING or not type(hf_model).__module__.startswith("transformers.models."):
        raise ConfigError(
            f"speculation is mtp, but {path} holds {name}; Stemma runs the layer for multi-token prediction "
            "of DeepSeek-V3, R1 and V3.1. Take another speculation, e.g. auto"
        )
    if (count := int(getattr(config, "num_nextn_predict_layers", None) or 0)) != 1:
        raise ConfigError(
            f"speculation is mtp, but config.json of {path} counts {count} layers for multi-token prediction "
            "(num_nextn_predict_layers); it must be 1. Take another speculation, e.g. auto"
        )
    quantization = quantization_of(config)
    format_name = find_format(path, quantization)
    if format_name == GGUF or (quantization and format_name is None):
        raise ConfigError(
            f"speculation is mtp, but Stemma doesn't read the MTP layer of {path}, whose weights are in the "
            f"format {format_name or quantization.get('quant_method')}"
        )
    if hf_model.device.type != "cpu":
        raise ConfigError("speculation is mtp, which runs on CPU only; take another speculation, e.g. auto")


def _read(path: Path, prefix: str, config: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the weights whose names begin with `prefix`, without it; quantized ones are dequantized."""
    quantization = quantization_of(config)
    format_name = find_format(path, quantization)
    if format_name is None:
        tensors = CheckpointTensors(path, prefix)
        weights = {name: tensors.read(name) for name in tensors.stored}
    else:
        read, _ = read_quantized(path, format_name, quantization, config, dtype, prefix=prefix)
        weights = plain_weights(read, dtype)
    return {name.removeprefix(prefix): weight for name, weight in weights.items()}


def _build(path: Path, hf_model: Any, prefix: str, weights: dict[str, torch.Tensor]) -> tuple[Any, nn.Module]:
    """Return the decoder layer and the norm behind it, as transformers loads a model of that one layer."""
    config = copy.deepcopy(hf_model.config)
    config.num_hidden_layers = 1
    config.first_k_dense_replace = int(not any(name.startswith("mlp.experts.") for name in weights))
    config.vocab_size, config.pad_token_id = 1, None  # its embedding and head are dropped
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    state = {f"model.layers.0.{name}": weight for name, weight in weights.items()}
    state["model.norm.weight"] = state.pop("model.layers.0.shared_head.norm.weight")
    doing = f"can't load the MTP layer of {path}"
    with foreign_code(doing), transformers_reports(lambda _stage, _share: None):
        model, loaded = type(hf_model).from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=hf_model.dtype,
            attn_implementation="eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    missing = set(loaded["missing_keys"]) - set(_SHARED.values())
    mismatched = {name for name, _, _ in loaded["mismatched_keys"]}
    if wrong := sorted(missing | mismatched | set(loaded["unexpected_keys"])):
        name = wrong[0].replace("model.layers.0.", prefix)
        raise ModelError(
            f"{path}: {len(wrong)} weights of the MTP layer are missing, of another shape than config.json "
            f"says, or have no place, e.g. {name}"
        )
    return model.model.layers[0], model.model.norm
