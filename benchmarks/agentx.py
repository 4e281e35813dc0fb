"""Hits predicted beside hits served: aiperf's AgentX scenario against `stemma serve`.

``python -m benchmarks.agentx AIPERF TRACE [--duration 600] [--lanes 6] [--out FOLDER]``

AIPERF is that program in an environment of its own (`pip install aiperf==0.13.0`). TRACE is a recording of
agents in Mooncake's fields with `session` and `parent`; its conversations become Weka files whose tokens are
divided by 32 and whose times by `--faster`, so that those of up to 108k tokens fit 4,096.
aiperf replays them in lanes. Then `stemma replay` reads those files, and what the server recorded, with the
cache's sizes: what each predicts stands beside what the server said in every answer's usage.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.peers import servers
from stemma.model.load.demo import demo_model

SCALE = 32
BLOCK = 512 // SCALE
CONTEXT = 4096
_ROOM = 700
"""Tokens of a prompt that its chat template and encoding its text again may add."""
Request = dict[str, Any]


def weka_files(trace: Path, folder: Path, faster: float) -> int:
    """Write a file for each conversation that fits, its subagents inside; return how many."""
    sessions: dict[int, list[Request]] = defaultdict(list)
    with gzip.open(trace, "rt") as lines:
        for line in lines:
            request = json.loads(line)
            sessions[request["session"]].append(request)
    fitting = {name: requests for name, requests in sessions.items() if _fits(requests)}
    folder.mkdir(parents=True)
    for name, requests in fitting.items():
        if requests[0]["parent"] < 0:
            children = {key: one for key, one in fitting.items() if one[0]["parent"] == name}
            record = _conversation(str(name), requests, children, faster)
            (folder / f"{name:03}.json").write_text(json.dumps(record))
    return len(list(folder.iterdir()))


def block_bytes() -> int:
    """Return the bytes of a block of the demo model's KV."""
    config = json.loads((demo_model().path / "config.json").read_text())
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * 2 * BLOCK * config["num_hidden_layers"] * config["num_key_value_heads"] * head)


def _fits(requests: list[Request]) -> bool:
    longest = max(one["input_length"] + one["output_length"] for one in requests)
    return bool(longest // SCALE + _ROOM < CONTEXT)


def _conversation(
    name: str, requests: list[Request], children: dict[int, list[Request]], faster: float
) -> dict[str, Any]:
    begins_ms = requests[0]["timestamp"]
    numbers: dict[int, int] = {}
    """Ids mean the same within a conversation only."""

    def entry(one: Request) -> dict[str, Any]:
        return {
            "t": (one["timestamp"] - begins_ms) / 1000 / faster,
            "type": "s",
            "model": "agent",
            "in": -(-one["input_length"] // SCALE),
            "out": max(1, one["output_length"] // SCALE),
            "hash_ids": [numbers.setdefault(block, len(numbers)) for block in one["hash_ids"]],
            "input_types": one["input_types"],
            "output_types": one["output_types"],
            "stop": one["finish_reason"],
        }

    entries = [entry(one) for one in requests]
    for key, inner in children.items():
        inside = [entry(one) for one in inner]
        entries.append(
            {
                "t": inside[0]["t"],
                "type": "subagent",
                "agent_id": str(key),
                "subagent_type": "Explore",
                "duration_ms": round(1000 * (inside[-1]["t"] - inside[0]["t"])),
                "status": "completed",
                "models": ["agent"],
                "requests": inside,
            }
        )
    entries.sort(key=lambda one: one["t"])
    return {
        "id": name,
        "models": ["agent"],
        "block_size": BLOCK,
        "hash_id_scope": "local",
        "requests": entries,
    }


def run_aiperf(program: Path, url: str, weka: Path, out: Path, asked: argparse.Namespace) -> None:
    """Run the scenario, which aiperf marks as no valid submission: those replay published traces only."""
    command = [
        *(str(program), "profile", "--scenario", "inferencex-agentx-mvp", "--url", url),
        *("--model", "demo", "--tokenizer", str(demo_model().path), "--endpoint-type", "chat"),
        *("--input-file", str(weka), "--custom-dataset-type", "weka_trace", "--use-server-token-count"),
        *("--concurrency", str(asked.lanes), "--benchmark-duration", str(asked.duration)),
        *("--random-seed", "1", "--ui", "none", "--output-artifact-dir", str(out)),
        *("--burst-phase-starts", "--unsafe-override"),
    ]
    names = {"AIPERF_HTTP_X_SESSION_ID_FROM_CORRELATION_ID": "1"}
    subprocess.run(command, check=True, env={**os.environ, **names})


def as_sent(weka: Path, records: list[Request], file: Path) -> None:
    """Write a Weka file of the requests as aiperf sent them: each play of a trace has blocks of its own."""
    plays: dict[tuple[str, int], int] = {}
    sessions: dict[str, list[Request]] = defaultdict(list)
    for record in records:
        about = record["metadata"]
        entry = json.loads((weka / f"{int(about['source_trace_id']):03}.json").read_text())["requests"][
            about["source_outer_idx"]
        ]
        if "source_inner_idx" in about:
            entry = entry["requests"][about["source_inner_idx"]]
        play = about["root_correlation_id"]
        numbers = [plays.setdefault((play, block), len(plays)) for block in entry["hash_ids"]]
        sent = {"t": about["request_start_ns"] / 1e9, "hash_ids": numbers}
        sessions[about["x_correlation_id"]].append({**entry, **sent})
    entries = [{"t": 0.0, "type": "subagent", "requests": requests} for requests in sessions.values()]
    file.write_text(
        json.dumps({"id": "sent", "block_size": BLOCK, "hash_id_scope": "local", "requests": entries})
    )


def replayed(trace: Path, sizes: list[int], folder: Path) -> float:
    """Return the share of prompt tokens that are hits, says `stemma replay`; no sizes: without a bound."""
    rows = folder / "rows.json"
    command = ["stemma", "replay", str(trace), "--policy", "hazard", "--json", str(rows), "--capacity"]
    if sizes:
        command += [str(sizes[0]), "--below", str(sizes[1]), "--sharing", "inclusive"]
    else:
        command.append("unlimited")
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return float(json.loads(rows.read_text())[0]["token_hit_ratio"])


def report(out: Path, sizes: list[int]) -> None:
    """Print what was predicted and what was served."""
    records = [
        json.loads(line) for line in (out / "aiperf" / "profile_export.jsonl").read_text().splitlines()
    ]
    records = [one for one in records if "usage_prompt_tokens" in one["metrics"]]
    as_sent(out / "weka", records, out / "sent.json")
    for name, file, scale in (
        ("Weka files", out / "weka", 1),
        ("the same requests as sent", out / "sent.json", 1),
        ("the server's recording", out / "recorded.jsonl", BLOCK // 4),
    ):
        scaled = [scale * size for size in sizes]
        print(
            f"{name:28} predicted {replayed(file, scaled, out):.4f} of tokens are hits, "
            f"{replayed(file, [], out):.4f} without a bound"
        )
    for phase in ("warmup", "profiling"):
        metrics = [one["metrics"] for one in records if one["metadata"]["benchmark_phase"] == phase]
        counts = [
            sum(one.get(name, {"value": 0})["value"] for one in metrics)
            for name in ("usage_prompt_cache_read_tokens", "usage_prompt_tokens")
        ]
        share = counts[0] / counts[1]
        print(f"served in {phase:18} {share:.4f} of {counts[1]:,} tokens, {len(metrics)} requests")


def main() -> None:
    """Serve, replay by aiperf, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("aiperf", type=Path)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--out", type=Path, default=Path("agentx"))
    parser.add_argument("--duration", type=int, default=600)
    parser.add_argument("--lanes", type=int, default=6)
    parser.add_argument("--faster", type=float, default=8.0)
    parser.add_argument("--device-blocks", type=int, default=288)
    parser.add_argument("--disk-blocks", type=int, default=512)
    parser.add_argument("--compression", choices=("on", "off"), default="off")
    asked = parser.parse_args()
    out: Path = asked.out
    print(weka_files(asked.trace, out / "weka", asked.faster), "conversations")
    recording = out / "recorded.jsonl"
    command = (
        *("stemma", "serve", "demo", "--port", "{port}", "--block-size", str(BLOCK)),
        *("--max-model-len", str(CONTEXT)),
        *("--kv-cache-memory", str(asked.device_blocks * block_bytes())),
        *("--disk-cache", str(out / "disk"), "--disk-cache-size", str(asked.disk_blocks * block_bytes())),
        *("--tier-compression", asked.compression, "--record-trace", str(recording)),
    )
    with (
        (out / "server.log").open("wb") as log,
        servers.running(servers.Server("stemma", command), log) as server,
    ):
        run_aiperf(asked.aiperf, server.base_url, out / "weka", out / "aiperf", asked)
        with urllib.request.urlopen(f"{server.base_url}/metrics") as metrics:
            (out / "metrics.txt").write_bytes(metrics.read())
    report(out, [asked.device_blocks, asked.disk_blocks])


if __name__ == "__main__":
    main()
