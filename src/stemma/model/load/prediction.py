"""The layer for multi-token prediction (MTP) of DeepSeek-V3 and Qwen3-Next: it guesses the token after next.

After the DeepSeek-V3 technical report (arXiv:2412.19437, section 2.2). The layer takes pairs: a token's
embedding and the model's last hidden state (behind the final norm) of the token before it, joined by
`eh_proj`. It runs one decoder layer over all pairs so far. The output, behind a norm of the layer's own, goes
through the model's output head and predicts the token that follows the pair. To guess further tokens the
layer runs again, on its own output and its own guess.

Of a model with recurrent layers the last hidden state is a part of a sequence's state, since a prompt that
goes on behind a checkpoint can't compute the token before it again.

The pair of token j is kept in slot j of the block table, as one more layer of the block's bytes. A pair
depends on no token after its own, so its KV is shared and stored with the same prefix as the model's own KV.
Token 0 has no pair: its slot holds KV that no later pair attends to (`stemma_first_key`).

transformers ignores these weights when it loads the model. Here they are read into transformers' own decoder
layer, whose modules run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from stemma.config.settings import ModelSettings
from stemma.errors import ConfigError, ModelError
from stemma.foreign_code import ForeignCode
from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import StateLayout, StatePart
from stemma.model.attend.attention import StepContext
from stemma.model.attend.batch import ForwardBatch, StateMoves
from stemma.model.attend.kept_kv import KVShape
from stemma.model.attend.paged import AttentionStep
from stemma.model.cpu.attention import NativeAttentionStep
from stemma.model.families.prediction import PredictionNames
from stemma.model.families.registry import PREDICTING
from stemma.model.foreign.attention import STEP_KEYWORD, use_paged_attention
from stemma.model.foreign.decoder import ModuleDecoder
from stemma.model.foreign.latent import cache_latents
from stemma.model.foreign.loading import loading_options
from stemma.model.foreign.recurrence import running
from stemma.model.foreign.reports import transformers_reports
from stemma.model.foreign.rowwise import RowwiseOperations
from stemma.model.formats.checkpoint import CheckpointTensors
from stemma.model.formats.reading import GGUF, find_format, read_quantized
from stemma.model.lora.adapter import Adapter, LinearShape
from stemma.model.opened.causal_lm import Decoder
from stemma.model.opened.checkpoint import DecoderParts
from stemma.model.opened.checkpoint_config import quantization_of, runs_remote_code
from stemma.native.library import Kernels

_EMBEDDING, _HEAD = "embed_tokens.weight", "shared_head.head.weight"
"""Weights of the layer that are copies of the model's own."""
_HIDDEN = "hidden"
"""The part of a sequence's state."""


class PredictionLayer(nn.Module):
    """The layer, but for the embedding and the output head, which are the model's."""

    def __init__(
        self, model: Any, norms: tuple[torch.Tensor, torch.Tensor], joining: torch.Tensor, layer_idx: int
    ) -> None:
        """Take a model of transformers with this one decoder layer, and the weights beside it.

        `norms`: of embeddings and of hidden states. `layer_idx`: its number among layers with KV.
        """
        super().__init__()
        block, norm = model.model.layers[0], model.model.norm
        self._rotary = model.model.rotary_emb
        self.enorm, self.hnorm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.enorm.weight = nn.Parameter(norms[0], requires_grad=False)
        self.hnorm.weight = nn.Parameter(norms[1], requires_grad=False)
        hidden_size, joined_size = joining.shape
        self.eh_proj = nn.Linear(joined_size, hidden_size, bias=False, device="meta")
        self.eh_proj.weight = nn.Parameter(joining, requires_grad=False)
        self.block, self.norm = block, norm
        attention: Any = block.self_attn
        attention.layer_idx = layer_idx
        attention.stemma_first_key = 1

    def forward(
        self,
        embedded: torch.Tensor,
        previous: torch.Tensor,
        positions: torch.Tensor,
        step: StepContext,
    ) -> torch.Tensor:
        """Take embeddings and the hidden states of the tokens before, [1, T, H], and positions [1, T].

        Returns hidden states [1, T, H].
        """
        joined = torch.cat((self.enorm(embedded), self.hnorm(previous)), dim=-1)
        hidden = self.block(
            self.eh_proj(joined),
            attention_mask=None,
            position_embeddings=self._rotary(embedded, positions),
            **{STEP_KEYWORD: step},
        )
        result: torch.Tensor = self.norm(hidden)
        return result


class MainDecoder(Decoder, Protocol):
    """A decoder that gives the model's hidden states too."""

    def run_with_states(
        self, batch: ForwardBatch, step: StepContext, kv: DeviceKV
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the batch's KV; return logits [L, vocab] and all rows' states [T, H] behind the last norm."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return embeddings [T, H] of ids [T]."""

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits [T, vocab] of hidden states [T, H] behind the final norm."""


class StatesOfModules(ModuleDecoder):
    """A `MainDecoder` that runs the modules of transformers."""

    def run_with_states(
        self, batch: ForwardBatch, step: StepContext, kv: DeviceKV
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the batch's KV; return logits [L, vocab] and all rows' states [T, H] behind the last norm."""
        model, options = self._hf, self._cache_options()
        with self._adapted.step(batch), running(self._states(batch, kv)):
            output = model.model(
                input_ids=batch.token_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                **{STEP_KEYWORD: step, **options},
            )
            states: torch.Tensor = output.last_hidden_state[0]
            return self.head(states[batch.logits_rows]), states

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return embeddings [T, H] of ids [T]."""
        embedded: torch.Tensor = self._hf.model.embed_tokens(token_ids)
        return embedded

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits [T, vocab] of hidden states [T, H] behind the final norm."""
        logits: torch.Tensor = self._hf.lm_head(states)
        return logits


class PredictingDecoder:
    """Runs a model and, behind it, its MTP layer, which keeps KV for every token that the model does."""

    def __init__(
        self,
        main: MainDecoder,
        layer: PredictionLayer,
        kernels: Kernels | None,
        operations: RowwiseOperations | None,
    ) -> None:
        """`main` runs all but `layer`, whose weights are packed already.

        `operations` replace torch's while the layer runs, and `main` too; None: without kernels.
        """
        self._main, self._layer = main, layer
        self._kernels, self._operations = kernels, operations
        self.hidden_size, self.dtype = layer.enorm.weight.shape[0], layer.enorm.weight.dtype
        self.hidden = torch.empty(0, self.hidden_size)
        """[T, H]: the model's last hidden states of the batch that ran last."""

    def adaptable(self) -> Mapping[str, LinearShape]:
        """Return the linear layers that adapters may add to, by their names in transformers."""
        return self._main.adaptable()

    def prepare_adapter(self, adapter: Adapter) -> object:
        """Return the adapter as a step of this decoder uses it."""
        return self._main.prepare_adapter(adapter)

    def forward(self, batch: ForwardBatch, kv: DeviceKV) -> torch.Tensor:
        """Write the batch's KV and return logits [L, vocab]."""
        previous = batch.previous_hidden if batch.states is None else self._previous(batch.states, kv)
        with self._computing(batch, kv) as step:
            logits, self.hidden = self._main.run_with_states(batch, step, kv)
            self._advance(batch, _before(self.hidden, batch, previous), step)
        if batch.states is not None:
            self._keep(batch, batch.states, kv)
        if batch.wants_hidden:
            batch.hidden = self.hidden
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

    def _previous(self, moves: StateMoves, kv: DeviceKV) -> torch.Tensor:
        """Return the hidden state of the token before each sequence's first row, [S, H]; zeros: none."""
        zeros = torch.zeros(self.hidden_size)
        parts = [zeros if state is None else self._part(state, kv) for state in moves.initial]
        return torch.stack(parts).to(self.dtype)

    def _keep(self, batch: ForwardBatch, moves: StateMoves, kv: DeviceKV) -> None:
        """Keep the hidden states of the rows behind which states are kept."""
        for end, state in zip(batch.query_starts[1:], moves.last, strict=True):
            self._part(state, kv).copy_(self.hidden[end - 1])
        for row, state in moves.snapshots:
            self._part(state, kv).copy_(self.hidden[row])

    def _part(self, state: int, kv: DeviceKV) -> torch.Tensor:
        """Return the place of the hidden state [H] float32 in a sequence's state."""
        layout = kv.layout.state
        assert layout is not None
        last = layout.parts[-1]
        assert last.name == _HIDDEN
        return kv.state_part(state, layout.num_bytes - last.num_bytes, last.shape)

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
        result: torch.Tensor = self._layer(embedded, previous[None], batch.positions[None], step)[0]
        return result


def with_prediction(shape: KVShape, hidden_size: int) -> KVShape:
    """Return what a model keeps with its MTP layer, given what it keeps without: KV, and a hidden state."""
    state = shape.state
    if state is not None:
        state = StateLayout((*state.parts, StatePart(shape.num_layers, _HIDDEN, (hidden_size,))))
    return replace(shape, num_layers=shape.num_layers + 1, state=state)


def _before(hidden: torch.Tensor, batch: ForwardBatch, previous: torch.Tensor | None) -> torch.Tensor:
    """Return for each row the hidden state of the token before it, [T, H]; `previous`: before first rows."""
    before = torch.empty_like(hidden)
    before[1:] = hidden[:-1]
    starts = torch.tensor(batch.query_starts[:-1], device=hidden.device)
    before[starts] = 0 if previous is None else previous
    return before


def read_prediction_layer(
    checkpoint: DecoderParts, model_class: Any, main_weight: Callable[[str], torch.Tensor]
) -> PredictionLayer:
    """Return the MTP layer of a checkpoint of transformers' `model_class`, on CPU.

    `main_weight` takes the name of a weight of the model; returns its plain numbers. Raises ConfigError if
    there is no layer that we run, ModelError if its weights don't fit.
    """
    path, config, dtype = checkpoint.path, checkpoint.config, checkpoint.dtype
    is_known = model_class.__module__.startswith("transformers.models.")
    _check_servable(path, config, model_class.__name__ if is_known else str(model_class))
    how = PREDICTING[model_class.__name__]
    prefix = how.prefix(config)
    weights = _read(path, prefix, config, dtype)
    _check_present(path, config, how, {prefix + name for name in weights})
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    for name, main in ((_EMBEDDING, "model.embed_tokens.weight"), (_HEAD, head)):
        own = weights.pop(name, None)
        if own is not None and not torch.equal(own.to(dtype), main_weight(main)):
            raise ModelError(
                f"{path}: {prefix}{name} differs from {main}; an MTP layer shares both with its model"
            )
    norms = weights.pop(how.embedding_norm).to(dtype), weights.pop(how.hidden_norm).to(dtype)
    joining = weights.pop(how.joining).to(dtype)
    if joining.shape != (config.hidden_size, 2 * config.hidden_size):
        raise ModelError(f"{path}: {prefix}{how.joining} has another shape than config.json says")
    model = _build(checkpoint, model_class, how, weights)
    return PredictionLayer(model, norms, joining, _num_with_kv(config)).eval().requires_grad_(False)


def _num_with_kv(config: Any) -> int:
    """Return how many layers of a model keep KV."""
    types = getattr(config, "layer_types", None) or []
    return int(config.num_hidden_layers) - types.count("linear_attention")


def check_prediction(settings: ModelSettings, config: Any, names: Collection[str]) -> None:
    """Raise ConfigError unless a checkpoint seems to hold a layer for multi-token prediction that we run.

    `names` are those of its stored tensors, of which a quantized weight may have several: then only the load
    can tell whether the layer is whole. `config` is that of transformers.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    named = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, config.model_type))
    _check_servable(settings.path, config, "code of its own" if runs_remote_code(settings) else named)
    if find_format(settings.path, quantization_of(config)) is None:
        _check_present(settings.path, config, PREDICTING[named], names)


def _check_servable(path: Path, config: Any, architecture: str) -> None:
    if architecture not in PREDICTING:
        raise ConfigError(
            f"speculation is mtp, but {path} holds {architecture}; Stemma runs the layer for multi-token "
            "prediction of DeepSeek-V3, R1 and V3.1, of Qwen3-Next and Qwen3.5. Take another speculation, "
            "e.g. auto"
        )
    how = PREDICTING[architecture]
    if (count := how.num_layers(config)) != 1:
        raise ConfigError(
            f"speculation is mtp, but config.json of {path} counts {count} layers for multi-token prediction "
            f"({how.counted_as}); it must be 1. Take another speculation, e.g. auto"
        )
    quantization = quantization_of(config)
    format_name = find_format(path, quantization)
    if format_name == GGUF or (quantization and format_name is None):
        raise ConfigError(
            f"speculation is mtp, but Stemma doesn't read the MTP layer of {path}, whose weights are in the "
            f"format {format_name or quantization.get('quant_method')}"
        )


def _check_present(path: Path, config: Any, how: PredictionNames, names: Collection[str]) -> None:
    """Raise ConfigError unless `names` hold the tensors that the layer has beside its decoder layer."""
    prefix = how.prefix(config)
    missing = [name for name in how.beside if prefix + name not in names]
    if missing:
        raise ConfigError(
            f"speculation is mtp, but {path} has no layer for it: {prefix}{missing[0]} is "
            "missing. Take another speculation, e.g. auto, or the checkpoint as it was published"
        )


def _read(path: Path, prefix: str, config: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the weights whose names begin with `prefix`, without it; quantized ones are dequantized."""
    quantization = quantization_of(config)
    format_name = find_format(path, quantization)
    if format_name is None:
        tensors = CheckpointTensors(path, prefix)
        return {name.removeprefix(prefix): tensors.read(name) for name in tensors.stored}
    read, _ = read_quantized(path, format_name, quantization, config, dtype, prefix=prefix)
    return {name.removeprefix(prefix): weight for name, weight in read.dequantized(dtype).items()}


def _build(
    checkpoint: DecoderParts, model_class: Any, how: PredictionNames, weights: dict[str, torch.Tensor]
) -> Any:
    """Return a model of transformers with that one decoder layer and the norm behind it."""
    path = checkpoint.path
    config = copy.deepcopy(checkpoint.config)
    prefix = how.prefix(config) + how.block
    config.num_hidden_layers = 1
    how.make_alone(config, any(name.startswith(f"{how.block}mlp.experts.") for name in weights))
    config.vocab_size, config.pad_token_id = 1, None  # its embedding and head are dropped
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    state = {"model.norm.weight": weights.pop(how.final_norm)}
    state |= {f"model.layers.0.{name.removeprefix(how.block)}": one for name, one in weights.items()}
    doing = f"can't load the MTP layer of {path}"
    with ForeignCode(doing), transformers_reports(lambda _stage, _share: None):
        model, loaded = model_class.from_pretrained(
            None, config=config, state_dict=state, **loading_options(checkpoint.dtype)
        )
        use_paged_attention(model)
        cache_latents(model)
    missing = set(loaded["missing_keys"]) - {"model.embed_tokens.weight", "lm_head.weight"}
    mismatched = {name for name, _, _ in loaded["mismatched_keys"]}
    if wrong := sorted(missing | mismatched | set(loaded["unexpected_keys"])):
        name = wrong[0].replace("model.layers.0.", prefix)
        raise ModelError(
            f"{path}: {len(wrong)} weights of the MTP layer are missing, of another shape than config.json "
            f"says, or have no place, e.g. {name}"
        )
    return model
