"""`stemma plan` from the command line."""

import json
from pathlib import Path

import pytest
from tests import gguf_files
from tests.gguf_files import Kind
from typer.testing import CliRunner

from stemma.cli import make_app
from stemma.config.settings import ModelSettings
from stemma.errors import ConfigError
from stemma.model.load.loading import load_model
from stemma_lab.commands.pool import layout_of

SAMPLE = Path(__file__).parent / "data" / "mooncake_conversation_head.jsonl"
GQA = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
DENSE = {"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512}
MLA = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "hidden_size": 7168,
}


def write(path: Path, config: dict[str, int]) -> Path:
    path.write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    return path


@pytest.mark.parametrize(
    ("config", "dtype", "expected"),
    [
        (GQA, None, 2 * 2 * 2 * 64 * 2),
        (DENSE, None, 2 * 2 * 8 * 64 * 2),
        (MLA, None, 61 * 576 * 2),
        (GQA, "float32", 2 * 2 * 2 * 64 * 4),
        (GQA, "int8", 2 * 2 * 2 * (64 + 2)),
        (MLA, "fp8", 61 * (576 + 2 * 2)),
    ],
)
def test_bytes_per_token(tmp_path, config, dtype, expected):
    assert layout_of(write(tmp_path / "config.json", config), dtype).bytes_per_token == expected


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), [(Kind.Q8_0, "bfloat16"), (Kind.F32, "float32")])
def test_a_gguf_file_is_planned_as_it_is_served(tmp_path, kind, dtype):
    file = gguf_files.build("qwen2", tmp_path, kind)
    planned, served = layout_of(file.path), load_model(ModelSettings(path=file.path, device="cpu")).layout(64)
    assert (planned.dtype, planned.bytes_per_token) == (dtype, served.bytes_per_token)
    sizes = ("--gpu-memory", "1MB", "--dram", "1MB", "--kv-dtype", "int8")
    result = CliRunner().invoke(
        make_app(), ["plan", str(file.path), "--trace", str(SAMPLE), *sizes, "--policy", "lru"]
    )
    assert result.exit_code == 0, result.output


def test_kv_that_no_server_holds_is_refused(tmp_path):
    write(tmp_path / "config.json", GQA)
    sizes = ("--gpu-memory", "1GB", "--kv-dtype", "int4")
    result = CliRunner().invoke(make_app(), ["plan", str(tmp_path), "--trace", str(SAMPLE), *sizes])
    assert isinstance(result.exception, ConfigError)
    assert "unknown KV dtype 'int4'" in str(result.exception)


@pytest.mark.slow
def test_plan(tmp_path):
    write(tmp_path / "config.json", GQA)
    sizes = ("--gpu-memory", "100MB", "--dram", "200MB", "--ssd", "400MB")
    out = ("--json", str(tmp_path / "plan.json"), "--html", str(tmp_path / "plan.html"))
    result = CliRunner().invoke(
        make_app(), ["plan", str(tmp_path), "--trace", str(SAMPLE), *sizes, "--policy", "lru", *out]
    )
    assert result.exit_code == 0, result.output
    assert "the next gigabyte helps most in" in result.output
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["bytes_per_token"] == 1024
    assert plan["trace"]["name"] == SAMPLE.name
    assert len(plan["trace"]["sha256"]) == 64
    base = plan["base"]
    assert len(base["token_hit_ratios"]) == 3
    assert 0 < sum(base["token_hit_ratios"]) < 1
    by_size = [sum(point["token_hit_ratios"]) for point in plan["curves"]["device"]]
    assert by_size[-1] >= by_size[0]
    page = (tmp_path / "plan.html").read_text()
    assert "Plotly.newPlot" in page
    assert "prefers-color-scheme: dark" in page  # the dashboard's style


def test_no_room(tmp_path):
    write(tmp_path / "config.json", GQA)
    arguments = ["plan", str(tmp_path), "--trace", str(SAMPLE), "--gpu-memory", "1kB"]
    result = CliRunner().invoke(make_app(), arguments)
    assert isinstance(result.exception, ConfigError)
