"""Flags of vLLM, SGLang and llama.cpp: which of ours means the same, or what to do instead.

One that means ours becomes ours, with a line that names it. One that changes nothing here is dropped, with a
line that says why. One that asks for what another setting or file gives is an error that says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MappingProxyType

from stemma.errors import ConfigError

Note = Callable[[str], object]
"""Takes a line for the user."""
_MODEL = ("--model", "--model-path", "-m", "-hf", "-hfr", "--hf-repo")
"""The model, which is an argument here."""
_SAME = {
    "--served-name": ("--served-model-name", "-a"),
    "--max-model-len": ("--context-length", "-c", "--ctx-size"),
    "--kv-cache-fraction": ("--gpu-memory-utilization", "--mem-fraction-static"),
    "--max-num-seqs": ("--max-running-requests", "-np", "--parallel"),
    "--max-batch-tokens": (
        *("--max-num-batched-tokens", "--chunked-prefill-size", "--max-prefill-tokens"),
        *("-b", "--batch-size", "-ub", "--ubatch-size"),
    ),
    "--max-waiting": ("--max-queued-requests",),
    "--num-threads": ("-t", "--threads", "-tb", "--threads-batch"),
    "--tensor-parallel-size": ("-tp", "--tp", "--tp-size"),
    "--expert-parallel-size": ("--ep", "--ep-size"),
    "--context-parallel-size": ("-dcp", "--decode-context-parallel-size"),
    "--replicas": ("--data-parallel-size", "-dp", "--dp", "--dp-size"),
    "--block-size": ("--page-size",),
    "--lora": ("--lora-modules", "--lora-paths"),
    "--max-loras": ("--max-loras-per-batch",),
    "--tool-parser": ("--tool-call-parser",),
    "--tls-key": ("--ssl-keyfile", "--ssl-key-file"),
    "--tls-cert": ("--ssl-certfile", "--ssl-cert-file"),
    "--tls-ca": ("--ssl-ca-certs",),
    "--chat-template": ("--chat-template-file",),
    "--log-level": ("--uvicorn-log-level", "--log-level-http"),
    "--disk-cache": ("--slot-save-path", "--file-storage-path"),
    "--otlp-endpoint": ("--otlp-traces-endpoint",),
    "--pool": ("--hicache-storage-backend",),
    "--drain-timeout-s": ("--shutdown-timeout",),
    "--kv-cache-memory": ("--kv-cache-memory-bytes",),
}
_SWITCHES = {
    "--enforce-eager": "--no-cuda-graphs",
    "--disable-cuda-graph": "--no-cuda-graphs",
    "--enable-prefix-caching": "--enable-prefix-cache",
    "--no-enable-prefix-caching": "--no-enable-prefix-cache",
    "--disable-radix-cache": "--no-enable-prefix-cache",
    "--enable-log-requests": "--log-requests",
    "--disable-overlap-schedule": "--overlap-schedule=off",
    "--no-async-scheduling": "--overlap-schedule=off",
    "-v": "--log-level=debug",
    "--verbose": "--log-level=debug",
}
_UNITS = {
    "--swap-space": ("--host-cache", "GiB"),
    "--hicache-size": ("--host-cache", "GB"),
    "--kv-offloading-size": ("--host-cache", "GiB"),
    "-cram": ("--host-cache", "MiB"),
    "--cache-ram": ("--host-cache", "MiB"),
    "--mm-processor-cache-gb": ("--image-cache", "GiB"),
}
"""Numbers whose unit their flag implies."""
_ALWAYS = "it is always on here"
_BY_CHECKPOINT = "the checkpoint says it"
_CHOSEN = "the fastest that gives the same bits is chosen"
_DROPPED = {
    _ALWAYS: (
        *(
            "--enable-auto-tool-choice",
            "--jinja",
            "--enable-chunked-prefill",
            "--enable-metrics",
            "--metrics",
        ),
        *("--slots", "--cont-batching", "-cb", "--cache-prompt", "--enable-cache-report", "--embeddings"),
        *("--enable-prompt-tokens-details", "--enable-mixed-chunk", "--kv-unified", "-kvu", "--swa-full"),
        *("--enable-hierarchical-cache", "--enable-lora", "--skip-server-warmup", "--warmup", "--no-warmup"),
        *(
            "--enable-server-load-tracking",
            "--async-scheduling",
            "--enable-force-include-usage",
            "--embedding",
        ),
        *("--return-token-ids", "--enable-multimodal", "--is-embedding", "--context-shift", "--reranking"),
    ),
    "there is nothing to turn off": (
        *("--disable-log-requests", "--disable-log-stats", "--no-context-shift", "--no-webui", "--no-slots"),
        *("--disable-uvicorn-access-log", "--log-disable", "--no-mmap", "--mlock", "--no-perf", "--no-jinja"),
    ),
}
"""Switches that change nothing, by the reason."""
_DROPPED_WITH_VALUE = {
    _BY_CHECKPOINT: (
        "--quantization",
        "-q",
        "--load-format",
        "--tokenizer-mode",
        "--config-format",
        "--task",
    ),
    _CHOSEN: (
        *("--attention-backend", "--sampling-backend", "--grammar-backend", "--guided-decoding-backend"),
        *(
            "--structured-outputs-config",
            "-fa",
            "--flash-attn",
            "--mm-attention-backend",
            "--schedule-policy",
        ),
        *(
            "--distributed-executor-backend",
            "--scheduling-policy",
            "--threads-http",
            "--prefix-caching-hash-algo",
        ),
    ),
    "layers are on one device": ("-ngl", "--gpu-layers", "--n-gpu-layers", "-sm", "--split-mode"),
    "any prefix is reused, by the token": ("--cache-reuse", "-sps", "--slot-prompt-similarity", "--keep"),
    "requests say it": (
        "-n",
        "--predict",
        "--n-predict",
        "--temp",
        "--top-k",
        "--top-p",
        "--min-p",
        "--seed",
    ),
}
_INSTEAD = {
    "set HF_HOME": ("--download-dir",),
    "give --lora NAME=DIRECTORY": ("--lora-scaled",),
    "take --speculation auto, which drafts from the tree of all texts": (
        *(
            "--speculative-config",
            "--speculative-algorithm",
            "-md",
            "--model-draft",
            "--draft-max",
            "--draft",
        ),
        *("--speculative-draft-model-path", "--speculative-num-draft-tokens", "--speculative-num-steps"),
    ),
    "give the length that the model is trained for, --max-model-len": (
        *("--rope-scaling", "--rope-scale", "--rope-freq-base", "--rope-freq-scale", "--yarn-orig-ctx"),
        *("--hf-overrides", "--json-model-override-args"),
    ),
    "take --kv-cache-dtype int8 or fp8": ("-ctk", "--cache-type-k", "-ctv", "--cache-type-v"),
    "give --kv-cache-memory, in bytes": ("--num-gpu-blocks-override", "--max-total-tokens"),
    "KV leaves the device for --host-cache and --disk-cache, weights don't": (
        *("--cpu-offload-gb", "--offload-group-size", "-ot", "--override-tensor"),
    ),
    "the tokenizer is the checkpoint's: put its files there": ("--tokenizer", "--tokenizer-path"),
    "put a proxy in front that cuts the prefix off": ("--root-path", "--api-prefix"),
    "it is in /v1/embeddings: --pooling": ("--override-pooler-config", "--pooler-config"),
    "leave it out, or give a file: --chat-template FILE": ("--chat-template-content-format",),
    "layers aren't cut over machines: --tensor-parallel-size, --context-parallel-size": (
        *("--pipeline-parallel-size", "-pp", "--pp-size", "--nnodes", "--dist-init-addr"),
    ),
}
"""What gives the same in another way."""


@dataclass(frozen=True, slots=True)
class _Meaning:
    flag: str = ""
    """Of ours, perhaps with its value behind ``=``; empty: none."""
    unit: str = ""
    takes_value: bool = True
    dropped: str = ""
    """Why it changes nothing."""
    instead: str = ""


def _meanings() -> Iterator[tuple[str, _Meaning]]:
    for name in _MODEL:
        yield name, _Meaning("MODEL")
    for flag, names in _SAME.items():
        for name in names:
            yield name, _Meaning(flag)
    for name, flag in _SWITCHES.items():
        yield name, _Meaning(flag, takes_value=False)
    for name, (flag, unit) in _UNITS.items():
        yield name, _Meaning(flag, unit)
    for reason, names in _DROPPED.items():
        for name in names:
            yield name, _Meaning(dropped=reason, takes_value=False)
    for reason, names in _DROPPED_WITH_VALUE.items():
        for name in names:
            yield name, _Meaning(dropped=reason)
    for advice, names in _INSTEAD.items():
        for name in names:
            yield name, _Meaning(instead=advice)


SYNONYMS = MappingProxyType(dict(_meanings()))
"""By the other server's flag."""


def translate(arguments: list[str], known: frozenset[str], note: Note) -> list[str]:
    """Return `arguments` with flags of other servers as ours; `note` is told a line for each.

    `known`: flags that the command has itself, which keep their meaning. Raises ConfigError for a flag that
    has no meaning here, with what to do instead.
    """
    ours: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            return [*ours, argument, *rest]
        name, has_value, value = argument.partition("=")
        meaning = None if name in known else SYNONYMS.get(name)
        if meaning is None:
            ours.append(argument)
            continue
        if meaning.instead:
            raise ConfigError(f"{name} has no meaning here: {meaning.instead}")
        if meaning.takes_value and not has_value:
            if (found := next(rest, None)) is None:
                raise ConfigError(f"{name} needs a value")
            value = found
        ours += _as_ours(name, value, meaning, note)
    return ours


def _as_ours(name: str, value: str, meaning: _Meaning, note: Note) -> list[str]:
    if meaning.dropped:
        note(f"{name} is left out: {meaning.dropped}")
        return []
    if meaning.flag == "MODEL":
        note(f"{name} {value}: the model stands without a flag here, stemma serve {value}")
        return [value]
    note(f"{name} is {meaning.flag} here")
    return [f"{meaning.flag}={value}{meaning.unit}" if meaning.takes_value else meaning.flag]
