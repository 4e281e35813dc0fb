"""The layer for multi-token prediction computes what transformers' own does, over paged KV."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints import MTP_LAYER, build, build_mtp
from tests.model.edited_checkpoints import configure, fp8_checkpoint
from tests.model.paging import PagedSequences, single_tokens
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from stemma.config.settings import ModelSettings
from stemma.errors import ConfigError, ModelError
from stemma.model.load import loading
from stemma.model.load.loading import load_model
from stemma.model.load.prediction import PredictingDecoder
from stemma.model.opened.causal_lm import CausalLM

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mtp(tmp_path_factory.mktemp("mtp") / "model")


def load(path: Path, dtype: str = "float32") -> CausalLM:
    return load_model(
        ModelSettings.model_validate({"path": path, "dtype": dtype, "device": "cpu"}), predicts=True
    )


class Reference:
    """transformers' `MtpModel` over whole sequences, without any cache."""

    def __init__(self, path: Path) -> None:
        self.main = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        # By this pattern `MtpModel` finds its weights; transformers has the number of the published model.
        self.main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{MTP_LAYER}.*"]
        self.mtp = MtpModel.from_pretrained(self.main).eval()

    @torch.inference_mode()
    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of hidden states [S, H]."""
        logits: torch.Tensor = self.main.lm_head(hidden)
        return logits

    @torch.inference_mode()
    def guess(self, tokens: list[int], num_tokens: int) -> list[torch.Tensor]:
        """Return the logits [vocab] of each guess after `tokens`; each follows the likeliest before it."""
        hidden = self.main.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[:, :-1]
        pairs, logits = torch.tensor([tokens[1:]]), []
        for _ in range(num_tokens):
            positions = torch.arange(1, pairs.shape[1] + 1)[None]
            output = self.mtp.forward_layer(0, hidden, positions, None, input_ids=pairs)[:, -1:]
            logits.append(self.main.lm_head(output)[0, 0])
            pairs = torch.cat((pairs, logits[-1].argmax().view(1, 1)), dim=1)
            hidden = torch.cat((hidden, output), dim=1)
        return logits


@pytest.mark.parametrize("kernels", [True, False], ids=["native", "torch"])
def test_guesses_equal_transformers(checkpoint: Path, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After prompts in chunks and in one, three guesses deep, for four sequences at a time."""
    if not kernels:
        monkeypatch.setattr(loading, "load_kernels", lambda isa: None)
    model, reference, rng = load(checkpoint), Reference(checkpoint), random.Random(0)
    assert isinstance(model.decoder, PredictingDecoder)
    assert model.layout(8).num_layers == MTP_LAYER + 1
    # A sequence is computed up to its last token but one: the layer itself is asked about the last.
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
            assert token_ids[row] == guesses[depth].argmax()


def test_the_models_own_logits_are_the_same_bits(checkpoint: Path) -> None:
    prompts = [[random.Random(1).randrange(3, 500) for _ in range(40)]]
    logits = []
    for predicts in (False, True):
        settings = ModelSettings(path=checkpoint, device="cpu")
        run = PagedSequences(load_model(settings, predicts=predicts), prompts)
        run.finish(chunk=16)
        logits.append(run.logits[0])
    assert logits[0].equal(logits[1])


def test_a_row_that_is_not_written_changes_no_kv(checkpoint: Path) -> None:
    """The last token of a prefix hit, computed again for its hidden state: its slot keeps its bytes."""
    model = load(checkpoint)
    prompt = [random.Random(2).randrange(3, 500) for _ in range(24)]
    run = PagedSequences(model, [prompt])
    run.finish(chunk=24)
    before = run.kv.data.clone()
    assert isinstance(model.decoder, PredictingDecoder)
    hidden = model.decoder.hidden[-1].clone()
    batch = single_tokens(run, torch.tensor(prompt[-1:]), [23])
    batch.written_rows = torch.empty(0, dtype=torch.int64)
    batch.logits_rows = torch.tensor([0])
    model.forward(batch, run.kv)
    assert run.kv.data.equal(before)
    torch.testing.assert_close(model.decoder.hidden[0], hidden, atol=TOLERANCE, rtol=0)


def test_a_layer_in_fp8(tmp_path: Path) -> None:
    """DeepSeek publishes the layer in FP8 too, the joining projection and both norms in bfloat16."""
    path = fp8_checkpoint(tmp_path, (16, 32), build_mtp)
    prompt = [random.Random(3).randrange(3, 500) for _ in range(30)]
    guesses = []
    for name in ("fp8", "plain"):
        model = load(path / name)
        run = PagedSequences(model, [prompt])
        run.finish(chunk=30)
        assert isinstance(model.decoder, PredictingDecoder)
        assert run.hidden[0] is not None
        run.tables[0].append(run.free.pop())
        batch = single_tokens(run, torch.tensor([7]), [30])
        guesses.append(model.decoder.predict(batch, run.hidden[0][None], run.kv)[1])
    torch.testing.assert_close(guesses[0], guesses[1], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("family", ["qwen2", "deepseek-v2"])
def test_other_models_are_refused(family: str, tmp_path: Path) -> None:
    path = build(family, tmp_path / family)
    with pytest.raises(ConfigError, match=r"speculation is mtp, but .* holds .*ForCausalLM"):
        load(path)


def without_layer(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    kept = {name: one for name, one in tensors.items() if f"layers.{MTP_LAYER}." not in name}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})


def change(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        key = f"model.layers.{MTP_LAYER}.{name}"
        tensors[key] = make(tensors[key])
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

    return apply


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (without_layer, ConfigError, "no layer for it: model.layers.3.enorm.weight is missing"),
        (lambda path: configure(path, num_nextn_predict_layers=2), ConfigError, "counts 2 layers"),
        (lambda path: configure(path, num_nextn_predict_layers=0), (ConfigError, ModelError), "layer"),
        (
            change("eh_proj.weight", lambda w: w[:, :64].clone()),
            ModelError,
            "eh_proj.weight has another shape",
        ),
        (
            change("embed_tokens.weight", lambda w: w + 1),
            ModelError,
            "differs from model.embed_tokens.weight",
        ),
        (change("hnorm.weight", lambda w: w * float("nan")), ModelError, "NaN"),
        (change("self_attn.o_proj.weight", lambda w: w[1:].clone()), ModelError, "another shape"),
    ],
)
def test_what_does_not_fit_is_named(
    damage: Callable[[Path], None], error: type[Exception], message: str, tmp_path: Path
) -> None:
    path = build_mtp(tmp_path / "model")
    damage(path)
    with pytest.raises(error, match=message):
        load(path)
