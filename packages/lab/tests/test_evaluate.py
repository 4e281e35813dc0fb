"""`stemma eval`: one line a measurement, JSON, and files that aren't what they should be."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from tests import gguf_files
from tests.checkpoints import build
from typer.testing import CliRunner, Result

from stemma.cli import make_app
from stemma.errors import ConfigError

ROW = '"Which letter comes first?",a,b,c,d,{}\n'


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(make_app(), ["eval", *map(str, arguments)])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("eval")
    build("llama", root / "model")
    (root / "text.txt").write_text("a short text that is read twice. " * 20)
    for folder, rows in (("dev", "AB"), ("test", "ABD")):
        (root / folder).mkdir()
        (root / folder / f"letters_{folder}.csv").write_text("".join(ROW.format(row) for row in rows))
    return root


def test_text_and_questions(files: Path) -> None:
    test = files / "test" / "letters_test.csv"
    options = ("--device", "cpu", "--kv-cache-memory", "4MB", "--shots", "2", "--json")
    result = run(files / "model", "--text", files / "text.txt", "--mmlu", test, *options)
    assert result.exit_code == 0, result.output
    found = orjson.loads(result.stdout)
    assert found["perplexity"]["same_bits"]
    assert found["perplexity"]["warm"] == found["perplexity"]["cold"] > 1
    subject = found["mmlu"][0]
    assert (subject["subject"], subject["num_questions"], subject["same_bits"]) == ("letters", 3, True)
    assert subject["num_right"] == subject["num_right_cached"] == 1  # it says one letter to equal questions
    assert 0 < subject["num_cached_tokens"] < subject["num_prompt_tokens"]


def test_a_gguf_file_is_scored_as_the_model_it_holds(files: Path, tmp_path: Path) -> None:
    file = gguf_files.build("llama", tmp_path, gguf_files.Kind.F32)
    found = []
    for model in (file.path, file.plain):
        arguments = ("--text", files / "text.txt", "--mmlu", files / "test" / "letters_test.csv")
        result = run(model, *arguments, "--kv-cache-memory", "4MB", "--shots", "2", "--json")
        assert result.exit_code == 0, result.output
        found.append(orjson.loads(result.stdout))
    ours, plain = found
    assert ours["perplexity"]["same_bits"]
    assert ours["perplexity"]["cold"] == pytest.approx(plain["perplexity"]["cold"], rel=1e-5)
    assert ours["mmlu"][0]["num_right"] == plain["mmlu"][0]["num_right"]


def test_what_cant_be_scored_is_named(files: Path) -> None:
    bad = files / "test" / "bad_test.csv"
    bad.write_text("a question without choices,A\n")
    for arguments, message in (
        ((), "nothing to score"),
        (("--text", files / "missing.txt"), "can't read"),
        (("--mmlu", bad, "--shots", "0"), "row 1"),
        (("--mmlu", files / "test" / "letters_test.csv", "--shots", "3"), "has 2 examples"),
    ):
        result = run(files / "model", *arguments)
        assert isinstance(result.exception, ConfigError)
        assert message in str(result.exception)
