"""Envelopes, keys, files and sampling of receipts, each alone."""

from __future__ import annotations

import base64
import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from stemma.cli import make_app
from stemma.engine.sampling.calls import CallRule, CallRules
from stemma.engine.sampling.grammar import GrammarSpec
from stemma.engine.sampling.params import SamplingParams
from stemma.engine.sampling.thinking import ThinkingMarks, ThinkingTokens
from stemma.errors import ConfigError, StorageError
from stemma.prefix.keys import KeySpace
from stemma_receipts import sampling
from stemma_receipts.envelope import opened, pre_authentication, signed
from stemma_receipts.errors import ReceiptError
from stemma_receipts.identity import computation_of, level_of
from stemma_receipts.keys import key_id, make_key, read_private_key, read_public_key
from stemma_receipts.reading import read_receipts
from stemma_receipts.statement import Opening, told_by

MARKS = ThinkingMarks(b"<think>", b"</think>", True)
SPEC = GrammarSpec("regex", "[a-z]+")
EVERYTHING = SamplingParams(
    n=2,
    temperature=0.7,
    top_k=3,
    top_p=0.1 + 0.2,
    min_p=0.1,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    presence_penalty=0.2,
    seed=2**63 - 1,
    stop=("a", "\n"),
    stop_token_ids=(1, 2),
    include_stop_str_in_output=True,
    max_tokens=None,
    min_tokens=0,
    ignore_eos=True,
    skip_special_tokens=False,
    grammar=SPEC,
    logit_bias=((1, 0.5), (2, -1.0)),
    bad_words=((1, 2), (3,)),
    max_thinking_tokens=5,
    thinking=ThinkingTokens(MARKS, ((1, 2), (3,)), {}, (4,)),
    calls=CallRules((CallRule(b"<tool_call>", SPEC),), MARKS, {}),
)


def test_every_field_of_sampling_is_signed_or_changes_no_answer():
    signed_fields = {*sampling.NUMBERS, *sampling.NOT_IN_IT, *sampling.rules(EVERYTHING), "allowed_token_ids"}
    assert {one.name for one in fields(SamplingParams)} == signed_fields


@pytest.mark.parametrize("params", [EVERYTHING, SamplingParams(), SamplingParams(allowed_token_ids=(4, 5))])
def test_sampling_comes_back_from_json(params: SamplingParams):
    numbers, rules = json.loads(json.dumps([sampling.numbers(params), sampling.rules(params)]))
    assert sampling.params_of(numbers, rules, {}) == params


def test_log_probabilities_are_no_part_of_an_answer():
    with_them = replace(EVERYTHING, logprobs=3)
    assert sampling.numbers(with_them) == sampling.numbers(EVERYTHING)


@pytest.mark.parametrize(
    ("plain", "rules"),
    [
        ({}, {}),
        (sampling.numbers(SamplingParams()) | {"temperature": -1.0}, {}),
        (sampling.numbers(SamplingParams()) | {"temperature": "a"}, {}),
        (sampling.numbers(SamplingParams()), {"grammar": {"kind": "regex", "other": 1}}),
        (sampling.numbers(SamplingParams()), {"calls": {"rules": [{"head": "xy"}], "thinking": None}}),
        (sampling.numbers(SamplingParams()), {"unknown": 1}),
    ],
)
def test_sampling_that_is_broken_is_an_error(plain, rules):
    with pytest.raises(ReceiptError):
        sampling.params_of(plain, rules, {})


def test_the_bytes_that_are_signed_are_those_of_dsse():
    """The form of the protocol: type and payload, each behind its length."""
    assert pre_authentication(b"hello world") == b"DSSEv1 28 application/vnd.in-toto+json 11 hello world"


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "key.pem"
    make_key(path)
    return path


@given(payload=st.binary(max_size=200), at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_changed_bit_of_an_envelope_is_found(key_file: Path, payload: bytes, at: int, bit: int):
    key = read_private_key(key_file)
    envelope = signed(payload, key, key_id(key.public_key()))
    assert opened(envelope, key.public_key()) == payload
    content = bytearray(base64.b64decode(envelope["signatures"][0]["sig"]))
    content[at % len(content)] ^= 1 << bit
    with pytest.raises(ReceiptError, match="not signed"):
        opened(envelope | {"signatures": [{"sig": base64.b64encode(content).decode()}]}, key.public_key())


@pytest.mark.parametrize(
    "change",
    [
        {"payloadType": "text/plain"},
        {"payload": 1},
        {"payload": "é"},
        {"signatures": {}},
        {"signatures": [1]},
        {"signatures": [{"sig": "!"}]},
        {"signatures": []},
    ],
)
def test_a_broken_envelope_is_an_error(key_file: Path, change):
    key = read_private_key(key_file)
    with pytest.raises(ReceiptError):
        opened(signed(b"{}", key, "") | change, key.public_key())


def test_keys_of_files(key_file: Path, tmp_path: Path):
    assert key_file.stat().st_mode & 0o777 == 0o600
    public = read_public_key(key_file.with_name("key.pem.pub"))
    answer = tmp_path / "answer.json"  # of /v1/receipts/key
    answer.write_text(json.dumps({"public_key": key_file.with_name("key.pem.pub").read_text()}))
    assert read_public_key(answer) == public
    assert key_id(public) == key_id(read_private_key(key_file).public_key())
    with pytest.raises(ConfigError, match="File exists"):
        make_key(key_file)
    open_to_all = tmp_path / "open.pem"
    open_to_all.write_bytes(key_file.read_bytes())
    open_to_all.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_private_key(open_to_all)
    other = tmp_path / "rsa.pem"
    made = rsa.generate_private_key(65537, 2048)
    parts = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    other.write_bytes(made.private_bytes(*parts))
    other.chmod(0o600)
    with pytest.raises(ConfigError, match="Ed25519"):
        read_private_key(other)
    other.write_text("no key")
    for read in (read_private_key, read_public_key):
        with pytest.raises(ConfigError):
            read(other)
        with pytest.raises(ConfigError):
            read(tmp_path / "none")


def test_a_key_by_the_command(tmp_path: Path):
    result = CliRunner().invoke(make_app(), ["receipts-key", str(tmp_path / "k.pem")])
    assert result.exit_code == 0
    assert key_id(read_private_key(tmp_path / "k.pem").public_key()) in result.output


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{}\n{", "line 2: the line is not valid JSON"),
        (b'{"a":' * 80 + b"1" + b"}" * 80, "line 1: the line is nested"),
        (b"\n\n[1,", "line 3"),
    ],
)
def test_a_broken_file_is_named_by_its_line(tmp_path: Path, content: bytes, words: str):
    path = tmp_path / "r.jsonl"
    path.write_bytes(content)
    with pytest.raises(ReceiptError, match=words):
        list(read_receipts(path))
    with pytest.raises(StorageError):
        list(read_receipts(tmp_path / "none"))


def test_receipts_are_found_wherever_they_stand(tmp_path: Path):
    path = tmp_path / "r.json"
    one, two = {"envelope": {"n": 1}}, {"envelope": {"n": 2}, "opening": 5}
    path.write_text(
        json.dumps({"response": {"body": {"usage": {"stemma": {"receipts": [one, two]}}}}}, indent=1)
    )
    assert [receipt.envelope["n"] for receipt in read_receipts(path)] == [1, 2]


@pytest.mark.parametrize("payload", [b"", b"{}", b"[]", b'{"_type": 1, "predicateType": 2}', b"\xff"])
def test_a_broken_statement_is_an_error(payload: bytes):
    with pytest.raises(ReceiptError):
        told_by(payload, None)


@pytest.mark.parametrize("change", [{"prompt": [-1]}, {"answers": [["a"]]}, {"rules": []}, {"more": 1}])
def test_a_broken_opening_is_an_error(change):
    whole = {"salt": "", "prompt": [1], "answers": [[2]], "rules": {}, "images": []}
    assert Opening.read(whole).commitments() != Opening.read(whole | {"prompt": [2]}).commitments()
    with pytest.raises(ReceiptError):
        Opening.read(whole | change)


def test_only_paths_that_promise_bits_can_be_signed():
    assert computation_of(KeySpace("f", "bf16:rows:avx2-6:mtp", 16)) == "avx2-6"
    assert computation_of(KeySpace("f", "bf16:rows:avx512_bf16-6:tp2:ep1", 16)) == "avx512_bf16-6:tp2:ep1"
    assert level_of("avx512_bf16-6") == "avx512_bf16"
    for other in ("bf16:cuda-9-0-132", "bf16:cpu", "bf16"):
        with pytest.raises(ConfigError, match="kernels"):
            computation_of(KeySpace("f", other, 16))
