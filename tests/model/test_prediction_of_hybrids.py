"""Qwen3-Next's layer for multi-token prediction computes what transformers' modules do, over paged KV."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from stemma.config.settings import ModelSettings
from stemma.errors import ConfigError, ModelError
from stemma.model.load import loading
from stemma.model.load.loading import load_model
from stemma.model.load.prediction import PredictingDecoder
from stemma.model.opened.causal_lm import CausalLM
from tests import hybrids
from tests.checkpoints import make_model
from tests.model.paging import PagedSequences, single_tokens

TOLERANCE = 1e-4
KV_LAYERS = 1
"""Of the tiny model's three."""


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hybrids.build_mtp(tmp_path_factory.mktemp("mtp") / "model", family)


def load(path: Path) -> CausalLM:
    return load_model(ModelSettings(path=path, device="cpu"), predicts=True)


class Reference:
    """The model, and a model of one layer that gets joined embeddings; whole sequences, without any cache."""

    def __init__(self, path: Path, family: str) -> None:
        self.main: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        tensors = load_file(path / "model.safetensors")
        mtp = {name.removeprefix("mtp."): one for name, one in tensors.items() if name.startswith("mtp.")}
        config = hybrids.config_of(family, num_hidden_layers=1, layer_types=["full_attention"])
        model: Any = make_model(config, 1)
        self.layer = model.eval().model
        self.joining = mtp["fc.weight"]
        self.norms = [mtp[f"pre_fc_norm_{kind}.weight"] for kind in ("embedding", "hidden")]
        self.eps = config.rms_norm_eps
        with torch.no_grad():
            for name, parameter in self.layer.named_parameters():
                if name in mtp:
                    parameter.copy_(mtp[name])
            experts_at = "layers.0.mlp.experts."
            num_apart = sum(name.startswith(experts_at) and name.endswith("down_proj.weight") for name in mtp)
            experts: Any = self.layer.layers[0].mlp.experts if num_apart else None
            for number in range(num_apart):
                path_of = f"{experts_at}{number}."
                parts = [mtp[f"{path_of}{name}_proj.weight"] for name in ("gate", "up")]
                experts.gate_up_proj[number].copy_(torch.cat(parts))
                experts.down_proj[number].copy_(mtp[f"{path_of}down_proj.weight"])

    @torch.inference_mode()
    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of hidden states [S, H]."""
        logits: torch.Tensor = self.main.lm_head(hidden)
        return logits

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + weight)

    @torch.inference_mode()
    def guess(self, tokens: list[int], num_tokens: int) -> list[torch.Tensor]:
        """Return the logits [vocab] of each guess after `tokens`; each follows the likeliest before it."""
        hidden = self.main.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[:, :-1]
        pairs, logits = torch.tensor([tokens[1:]]), []
        for _ in range(num_tokens):
            embedded = self.main.model.embed_tokens(pairs)
            both = self._norm(embedded, self.norms[0]), self._norm(hidden, self.norms[1])
            output = self.layer(
                inputs_embeds=torch.cat(both, dim=-1) @ self.joining.T,
                position_ids=torch.arange(1, pairs.shape[1] + 1)[None],
                use_cache=False,
            ).last_hidden_state[:, -1:]
            logits.append(self.main.lm_head(output)[0, 0])
            pairs = torch.cat((pairs, logits[-1].argmax().view(1, 1)), dim=1)
            hidden = torch.cat((hidden, output), dim=1)
        return logits


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", ["native", "modules", "torch"])
def test_guesses_are_those_of_transformers(
    checkpoint: Path, family: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several sequences, in chunks, each guess following the one before; the hidden states lie in states."""
    if way != "native":
        monkeypatch.setattr(loading, "fitting_layout", lambda _checkpoint: None)
    if way == "torch":
        monkeypatch.setattr(loading, "load_kernels", lambda _isa: None)
    model, reference, rng = load(checkpoint), Reference(checkpoint, family), random.Random(0)
    assert isinstance(model.decoder, PredictingDecoder)
    layout = model.layout(8)
    assert layout.num_layers == KV_LAYERS + 1
    assert layout.state is not None
    assert layout.state.parts[-1].name == "hidden"
    texts = [[rng.randrange(3, 500) for _ in range(length)] for length in (2, 17, 66, 41)]
    run = PagedSequences(model, [text[:-1] + [0] * 4 for text in texts])
    run.prompts = [text[:-1] for text in texts]
    run.step([(3, 20), (2, 65), (0, 1)])
    run.step([(1, 9), (3, 1)])
    run.finish(chunk=7)
    for table, text in zip(run.tables, texts, strict=True):
        while len(table) * run.block_size < len(text) + 3:
            table.append(run.free.pop())
    previous = torch.stack([hidden for hidden in run.hidden if hidden is not None])
    token_ids = torch.tensor([text[-1] for text in texts])
    expected = [reference.guess(text, 3) for text in texts]
    for depth in range(3):
        batch = single_tokens(run, token_ids, [len(text) - 1 + depth for text in texts])
        token_ids, previous = model.decoder.predict(batch, previous, run.kv)
        logits = reference.head(previous)
        for row, guesses in enumerate(expected):
            torch.testing.assert_close(logits[row], guesses[depth], atol=TOLERANCE, rtol=0)


def test_the_models_own_logits_are_the_same_bits(checkpoint: Path) -> None:
    prompts = [[random.Random(1).randrange(3, 500) for _ in range(40)]]
    logits = []
    for predicts in (False, True):
        settings = ModelSettings(path=checkpoint, device="cpu")
        run = PagedSequences(load_model(settings, predicts=predicts), prompts)
        run.finish(chunk=16)
        logits.append(run.logits[0])
    assert logits[0].equal(logits[1])


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("mtp.fc.weight", ConfigError, "no layer for it: mtp.fc.weight is missing"),
        ("mtp.layers.0.self_attn.q_proj.weight", ModelError, "weights of the MTP layer are missing"),
    ],
)
def test_what_is_missing_is_named(name: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    path = hybrids.build_mtp(tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    del tensors[name]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(error, match=message):
        load(path)


def test_two_layers_are_refused(tmp_path: Path) -> None:
    path = hybrids.build_mtp(tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    more = {n.replace("mtp.layers.0.", "mtp.layers.1."): one.clone() for n, one in tensors.items()}
    save_file(tensors | more, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"have no place, e\.g\. mtp"):
        load(path)


def test_a_checkpoint_without_the_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no layer for it: mtp.pre_fc_norm_embedding.weight is missing"):
        load(hybrids.build("qwen3_next", tmp_path / "model"))
