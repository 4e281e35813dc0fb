"""All settings, frozen; one model per component. Unknown keys are errors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from stemma.config.base import SettingsModel
from stemma.config.folders import cache_folder
from stemma.config.server_settings import (
    ManagementTLSSettings,
    MetricsTLSSettings,
    PlaneSettings,
    RequestSettings,
    ServerSettings,
    TLSSettings,
)
from stemma.config.sizes import ByteSize
from stemma.config.words import NamedPaths, Words


def _disk_cache(given: Any) -> Any:
    return cache_folder() / "kv" if str(given) == "auto" else given


WritePolicy = Literal["write_back", "write_through", "write_through_selective"]


KVDtype = Literal["auto", "int8", "fp8"]
KVArrangement = Literal["rows", "nz"]


Role = Literal["both", "prefill", "decode"]


class ModelSettings(SettingsModel):
    """Which checkpoint to load, and how."""

    path: Path
    """A checkpoint's directory, a .gguf file, a name on the Hugging Face hub, or `demo`."""
    served_name: str | None = None
    """Name in the API; default: the name of the directory, of the GGUF file, or the one on the hub."""
    revision: str | None = None
    """Branch, tag or commit of a model on the Hugging Face hub; default: its default branch."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """dtype of weights and KV; `auto` is the checkpoint's."""
    device: str = "auto"
    """`auto` is CUDA if there is one, else CPU."""
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint."""
    chat_template: Path | None = None
    """File of a Jinja template that takes the place of the checkpoint's chat template."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Maximum tokens of prompt plus output; default: the limit in the checkpoint's config."""
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads of the step loop; default: all cores."""
    isa: Literal[
        "auto", "portable", "avx2", "avx512", "avx512_bf16", "amx", "neon", "neon_bf16", "amx_emulated"
    ] = "auto"
    """Instruction-set level of the CPU kernels; `auto` is the highest that the processor has. A higher one is
    an error. `amx_emulated` is for tests: the code for AMX, slowly, on a processor without it."""
    quantize: Literal["none", "int8", "int4", "inputs"] = "none"
    """On CPU, round weights to integers as they are loaded, and activations to int8: half or a third of the
    bytes. Output heads become int8 with `int4` too. `inputs` keeps the weights of a quantized checkpoint and
    rounds activations alone, where the checkpoint leaves them as they are."""
    quantize_group_size: Literal[32, 64, 128] | None = None
    """Inputs of a weight that share a scale; half of it, and so on, where it doesn't divide a layer's inputs.
    Default: 128 for `int8`, 32 for `int4`."""
    cuda_graphs: bool = True
    """On CUDA, record decode steps as graphs; off saves their memory."""
    gpu_path: Literal["modules", "fused"] = "modules"
    """What runs a model on CUDA: transformers' modules, or `fused`: kernels of ours for the whole of each
    layer, whose bits no batch changes. No card has run them yet; what they don't compute is refused."""
    pooling: Literal["auto", "last", "mean", "cls"] = "auto"
    """Which hidden states make an embedding: the last token's, the mean of all, or the first token's. `auto`:
    as the checkpoint's modules.json says; without one it makes no embeddings."""
    matryoshka: bool = False
    """Let requests cut embeddings to any `dimensions`: for models that were trained for it, but whose
    config.json doesn't say so."""
    rerank_tokens: Annotated[Words, Field(min_length=2, max_length=2)] = ("yes", "no")
    """Reranking by a model that generates: the token that says that a document answers the query, and the one
    that says that it doesn't."""


class PoolSettings(SettingsModel):
    """The pool tier: blocks shared by machines."""

    flag_prefix: ClassVar[str] = "pool_"

    name: str
    """Backend by name (`memory/tiers/pool/registry.py`)."""
    config: Path | None = None
    """The backend's own file, JSON or TOML, e.g. ``mooncake.json``."""
    async_write: bool = True
    """Write in the background. Off: a step ends only once its blocks are in the pool, or have failed."""
    write: WritePolicy = "write_through"
    """When a block is copied to the pool: committed on the device, used often, or evicted."""
    staging: ByteSize = Field(default=192 * 2**20, gt=0)
    """Memory for blocks in transfer to and from the backend."""
    deadline_s: float = Field(default=1.0, gt=0)
    """Deadline of one backend call (up to 64 blocks); after it, its blocks are misses."""


class CacheSettings(SettingsModel):
    """The device tier and its index."""

    enable_prefix_cache: bool = True
    """Reuse what earlier requests computed."""
    block_size: int = Field(default=64, ge=1, le=1024)
    """Tokens per block."""
    kv_cache_memory: ByteSize | None = None
    """Bytes of the device tier; default: what `kv_cache_fraction` says."""
    kv_cache_fraction: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Without `kv_cache_memory`: on CPU, the share of the free memory that KV may take (half). On a GPU, the
    share of the card (nine tenths) that is taken by weights, a largest step, which is measured, and KV."""
    state_interval: int = Field(default=1024, ge=64)
    """Tokens from one kept state of a long prompt of such a model to the next, beside those where prompts
    part and end."""
    free_windows: bool = True
    """For models with sliding windows (Gemma 3, GPT-OSS, Mistral 7B v0.1): keep KV behind a window only
    where prompts part and end. Off: keep all of it, so that prompts share it by the token."""
    kv_cache_dtype: KVDtype = "auto"
    """How KV is stored, in every tier: as the model computes it, or one byte a number with a scale per token
    and KV head, which holds about twice the tokens in the same bytes. `int8` and `fp8` (e4m3) run on CPU."""
    kv_layout: KVArrangement = "rows"
    """How a latent (DeepSeek) lies in a block, in every tier: each token in one run, or `nz`: in pieces of 16
    columns, [columns / 16, token, 16]. Answers are the same; blocks of one are not found with the other."""
    memory_limit: ByteSize | None = Field(default=None, gt=0)
    """On CPU, instead of both: memory limit of the whole process. KV gets what libraries, weights and steps
    leave; a step of the largest size is run at the start to measure its need."""
    share_across_levels: bool = False
    """Let a disk or pool serve KV computed at another instruction-set level or version of the kernels: more
    hits among unlike machines, for answers that may differ in their last bits."""
    index: Literal["radix", "hash"] = "radix"
    """How prefixes are found: a radix tree, or a table of chained hashes."""
    eviction: str = "hazard"
    """Policy by name (`prefix/eviction/registry.py`), options after it: ``hazard:max_ghosts=4096``."""
    eviction_cost: Literal["blocks", "prefill-time"] = "blocks"
    """Value of a device block to `hazard`: all equal, or its recompute time."""
    attention_equal_at: float = Field(default=32_768.0, gt=0.0)
    """For `prefill-time`: the position at which attention costs as much as the weights."""
    record_trace: Path | None = None
    """Append each finished request to this file, as salted hashes without text, for `stemma replay`."""
    kv_events: str | None = None
    """ZMQ address where stored and evicted blocks are published, as by vLLM: ``tcp://127.0.0.1:5557``. Events
    hold the prompts' token ids (docs/how-to/fleet.md)."""
    kv_events_replay: str | None = None
    """ZMQ address where subscribers ask for events they missed."""
    kv_events_topic: str = ""
    """Topic of the events."""
    pool: PoolSettings | None = None
    """None: no pool; one can be attached while the server runs."""

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if self.memory_limit is not None and self.kv_cache_memory is not None:
            raise ValueError("give memory_limit or kv_cache_memory, not both: the limit decides what KV gets")
        return self


class TierSettings(SettingsModel):
    """The tiers below the device, on this machine (docs/how-to/tiers.md)."""

    host_cache: ByteSize | None = None
    """DRAM for blocks that left the device, allocated at the start."""
    host_write: WritePolicy = "write_back"
    """When a block is copied to the host tier: evicted from the device, committed there, or used often."""
    host_exclusive: bool = False
    """A block promoted from the host tier is removed there. By default a copy stays while there is room."""
    disk_cache: Annotated[Path, BeforeValidator(_disk_cache)] | None = None
    """Directory of the disk tier; blocks in it outlive the server. `auto`: in the user's cache folder."""
    disk_cache_size: ByteSize = 10 * 10**9
    """Limit of all blocks in that directory; `history_memory` bounds the file beside them."""
    disk_cache_ttl_s: float | None = Field(default=None, gt=0.0)
    """Blocks on disk that were unused for this time are dropped."""
    disk_write: WritePolicy = "write_through"
    """As `host_write`, for the disk. With write-back, a crash loses the blocks that are only in memory."""
    write_through_uses: int = Field(default=2, ge=1)
    """For `write_through_selective`: copy a block down on this use; computing it is the first."""
    prefetch: Literal["best_effort", "timeout", "wait_complete"] = "timeout"
    """Whether a request waits for blocks in slow tiers: never, up to `load_timeout_s`, or without limit."""
    load_ahead_bandwidth: ByteSize = 0
    """Bytes a second that idle time may load to the device before the next turn of a conversation is likely
    to come; 0: loads begin with the turn."""
    load_when: Literal["faster", "always"] = "faster"
    """Load a hit only if measurements predict that it is faster than computing, or always."""
    load_timeout_s: float = Field(default=2.0, gt=0.0)
    """Time limit of a load, or as long as computing would take if that is longer; the rest is computed."""
    load_failure: Literal["recompute", "fail"] = "recompute"
    """When a tier can't deliver what it holds: compute the tokens, or fail the request."""
    tier_compression: Literal["auto", "on", "off"] = "auto"
    """Keep blocks of bf16 KV in host, disk and pool in two thirds of their bytes, equal to the bit. `auto`:
    where a CPU computes."""
    transfer_buffer: ByteSize | None = None
    """Host memory for blocks in transfer to slow tiers; None: what two of the largest steps commit."""


MAX_SEATS = 256
"""Sequences that run at once, at most, where no setting says: each takes a row of logits in a step."""


class SchedulerSettings(SettingsModel):
    """How waiting requests become steps."""

    max_batch_tokens: int = Field(default=2048, ge=1)
    """Maximum tokens per step: decodes first, then prefill chunks."""
    max_num_seqs: int | None = Field(default=None, ge=1)
    """Maximum number of sequences running at once; default: what memory and measured step times allow, up to
    256 (64 with `memory_limit`, which counts a row of logits for each)."""
    max_waiting: int = Field(default=1024, ge=1)
    """Requests in the queue before new ones are refused as Overloaded."""
    grammar_memory: ByteSize = 256 * 2**20
    """Memory of compiled grammars, those that requests use and the latest that they used; a tenant may take
    half of it."""
    order: Literal["fcfs", "longest-prefix"] = "longest-prefix"
    """Which waiting request starts next: first come first served, or the one with most cached tokens."""
    ageing_s: float = Field(default=5.0, gt=0.0)
    """A request is overtaken only by requests that arrived less than this time after it."""
    log_hits: bool = False
    """Log MindIE's two `Prefix Cache Reporter` lines for each step that starts prompts."""
    stream_interval_ms: float | None = Field(default=None, ge=0.0, le=1000.0)
    """A server holds streamed tokens for up to this long, so that those of quick steps leave together; never
    an answer's first or last. 0: each leaves at once. Default: 67 where the model's threads fill all cores,
    else 0."""
    overlap_schedule: Literal["auto", "on", "off"] = "auto"
    """Launch the next step before the tokens of the running one are known. `auto`: on CUDA without drafts."""

    @property
    def seats(self) -> int:
        """The largest number of sequences that may ever run at once."""
        return self.max_num_seqs or MAX_SEATS


class SpeculationSettings(SettingsModel):
    """Drafts: tokens proposed at little cost and verified in the next step. They never change the text."""

    flag_prefix: ClassVar[str] = "speculation_"

    mode: Literal["off", "auto", "prompt_lookup", "tree", "la", "mtp"] = "auto"
    """Where drafts come from. `prompt_lookup`: the request itself; `tree`: other requests of its namespace in
    the prefix cache; `auto`: both; `mtp`: both, and the layer for multi-token prediction of a DeepSeek-V3, R1
    or V3.1 checkpoint; `la`: lookahead, the model's own earlier guesses."""
    max_draft_tokens: int = Field(default=16, ge=1, le=64)
    """Longest draft."""
    adaptive: bool = True
    """Choose the draft length, maybe 0, by measured cost and acceptance; False: always the longest."""
    mtp_tokens: int = Field(default=1, ge=1, le=5)
    """Most tokens that the layer for multi-token prediction guesses before a step."""
    la_level: int = Field(default=4, ge=2, le=16)
    """Length of lookahead's n-grams."""
    la_window: int = Field(default=5, ge=1, le=16)
    """Positions that lookahead iterates."""
    la_guess_set_size: int = Field(default=5, ge=1, le=16)
    """n-grams kept for each first token."""


class ParallelSettings(SettingsModel):
    """One model on several processes of this machine (docs/how-to/ranks.md)."""

    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    """Ranks: processes that each hold a part of every layer and of every block's KV."""
    expert_parallel_size: int = Field(default=1, ge=1, le=64)
    """Groups of ranks that the experts of a mixture are divided over. 1: all ranks split each expert."""
    context_parallel_size: int = Field(default=1, ge=1, le=64)
    """Groups of `tensor_parallel_size` processes that each hold some tokens of every block, and compute their
    rows: one prompt's KV may exceed the memory of one of them. It divides `block_size`."""

    @property
    def num_ranks(self) -> int:
        """Processes that run one model together."""
        return self.tensor_parallel_size * self.context_parallel_size

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.tensor_parallel_size % self.expert_parallel_size:
            raise ValueError(
                f"expert_parallel_size {self.expert_parallel_size} doesn't divide tensor_parallel_size "
                f"{self.tensor_parallel_size}"
            )
        return self


class LoraSettings(SettingsModel):
    """Adapters (LoRA) served beside the model (docs/how-to/adapters.md)."""

    adapters: NamedPaths = Field(default={})
    """Adapters loaded at the start, by the name that requests select them with: ``NAME=DIR``."""
    max_loras: int = Field(default=8, ge=1)
    """Adapters that one step may mix, and that are kept ready to compute with; others wait their turn."""
    max_cpu_loras: int = Field(default=64, ge=1)
    """Adapters that may be loaded."""
    max_lora_rank: int = Field(default=64, ge=1, le=1024)
    """Largest rank of an adapter."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.max_cpu_loras < self.max_loras:
            raise ValueError("max_cpu_loras must be at least max_loras: those in use are loaded too")
        if len(self.adapters) > self.max_cpu_loras:
            raise ValueError(
                f"{len(self.adapters)} adapters are more than max_cpu_loras, {self.max_cpu_loras}"
            )
        return self


class ImageSettings(SettingsModel):
    """Images in prompts, for models that read them."""

    flag_prefix: ClassVar[str] = "image_"

    cache: ByteSize = Field(default=256 * 2**20, ge=0)
    """Memory of what the vision encoder made of the images used last, by their hash."""
    memory: ByteSize = Field(default=2**30, gt=0)
    """Images of all open requests together, in bytes: 20 a pixel while one is read, then what is kept of it.
    A tenant may hold half of it."""
    max_bytes: ByteSize = Field(default=20 * 2**20, gt=0)
    """The largest file of an image."""
    max_pixels: int = Field(default=25_000_000, ge=1)
    """The largest image: width times height."""
    max_number: int = Field(default=32, ge=1)
    """Images in one request, at most."""
    urls: bool = False
    """Fetch images that requests name by http and https URLs. Never from private addresses."""
    url_timeout_s: float = Field(default=10.0, gt=0.0)
    """Longest time that one image may take to be fetched, redirects included."""


class EngineSettings(SettingsModel):
    """Everything the engine needs."""

    model: ModelSettings
    role: Role = "both"
    """`prefill` computes prompts and writes their KV to the pool; `decode` reads it from there."""
    cache: CacheSettings = CacheSettings()
    tiers: TierSettings = TierSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    speculation: SpeculationSettings = SpeculationSettings()
    lora: LoraSettings = LoraSettings()
    parallel: ParallelSettings = ParallelSettings()
    images: ImageSettings = ImageSettings()


class Settings(SettingsModel):
    """A whole server."""

    engine: EngineSettings
    server: ServerSettings = ServerSettings()
    requests: RequestSettings = RequestSettings()
    planes: PlaneSettings = PlaneSettings()
    tls: TLSSettings = TLSSettings()
    management_tls: ManagementTLSSettings = ManagementTLSSettings()
    metrics_tls: MetricsTLSSettings = MetricsTLSSettings()
