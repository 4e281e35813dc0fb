"""Settings of the server around the engine: who may ask, what it logs, its limits, its ports."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from stemma.config.base import PathList, SettingsModel
from stemma.config.sizes import ByteSize
from stemma.config.words import Key, NamedPaths, Words


class ServerSettings(SettingsModel):
    """The HTTP plane."""

    host: str = "127.0.0.1"
    """Address to listen on; the default takes local connections only."""
    port: int = Field(default=8000, ge=0, le=65535)
    """0: any free port."""
    drain_timeout_s: float = Field(default=30.0, ge=0.0)
    """Time for running requests to finish after SIGTERM."""
    api_key: Key | None = Field(default=None, repr=False)
    """If set, every request but `/health` must carry it as a bearer token. A flag shows in the process list:
    take the variable or `api_key_file`."""
    api_key_file: Path | None = None
    """File that holds the API key, instead of `api_key`."""
    api_keys_file: Path | None = None
    """File of hashed API keys, each of a tenant with limits of its own (`stemma keys`), instead of `api_key`.
    Read again when it changes."""
    admin_key: Key | None = Field(default=None, repr=False)
    """Bearer token of `/admin`. Without one, only this machine has access (docs/how-to/server.md)."""
    admin_key_file: Path | None = None
    """File that holds the admin key, instead of `admin_key`."""
    trust_imports: bool = False
    """Accept imported blocks that are unsigned or signed with another secret."""
    public_prefixes: Path | None = None
    """File that keeps the prefixes which all tenants share (`stemma cache publish`). Without one a restart
    drops them."""
    bundle_key_file: Path | None = None
    """File with a secret of at least 32 bytes that signs exported prefixes and verifies imported ones."""
    pool_configs: NamedPaths = Field(default={})
    """Pools that `POST /admin/pool` may attach, by backend: ``redis=redis.json,mooncake=mooncake.json``."""
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """From which level on Stemma and uvicorn log, on standard error."""
    log_format: Literal["text", "json"] = "text"
    """How: as lines for people, or one JSON object a line."""
    log_requests: bool = False
    """Log one line for each request that ends: times, tokens and what the cache gave; never text."""
    otlp_endpoint: str | None = None
    """Send OpenTelemetry traces of requests to this collector, e.g. ``http://127.0.0.1:4318/v1/traces``."""
    metric_aliases: Words = ("vllm",)
    """Whose names `/metrics` shows beside ours, separated by commas: vllm, mindie; `none`."""
    lora_directories: PathList = ()
    """Directories that `POST /v1/load_lora_adapter` may load from, separated by colons; empty: it is off."""
    ledger: str | None = Field(default=None, repr=False)
    """Usage ledger, read by `stemma usage`: a SQLite file, or the URL of a database."""
    allowed_origins: Words = ()
    """Web origins whose pages may call this server (CORS), separated by commas; `*`: all."""
    report_granularity: Literal["token", "block"] = "token"
    """Whether responses count cached tokens exactly, or rounded down to whole blocks."""
    exact_history: Literal["on", "off"] = "on"
    """Give an answer that a conversation brings back the token ids that were generated, instead of tokenizing
    its text again (docs/how-to/requests.md). A request says otherwise with `exact_history`."""
    history_memory: ByteSize = 32 * 2**20
    """Memory of the answers that `exact_history` keeps, and limit of their file in `disk_cache`."""
    prepare_turns: Literal["on", "off"] = "on"
    """Compute, while nothing else is to be done, what the next turn of a conversation will begin with and
    isn't cached: mostly answers whose thinking the chat template leaves out."""
    prepare_max_tokens: int = Field(default=4096, ge=1)
    """Tokens that `prepare_turns` computes after one answer, at most."""
    prepare_tokens_per_minute: int = Field(default=30_000, ge=1)
    """Tokens that it computes in a minute, at most."""
    strip_client_nonces: bool = True
    """Leave out of prompts what clients put there for their vendor alone, and what differs in each session:
    Claude Code's ``x-anthropic-billing-header``. Else two sessions share nothing."""
    trust_request_chat_template: bool = False
    """Render chat templates sent in requests, in a separate process."""
    tool_parser: str = "auto"
    """How the model writes tool calls: a format of docs/project/compatibility.md by name, or `off`;
    `auto`: as its chat template does."""
    reasoning_parser: str = "auto"
    """How the model writes its thinking: a format by name, `on` (the template's, else ``<think>``), or `off`;
    `auto`: as its chat template does."""
    max_body_bytes: ByteSize = 64 * 2**20
    """Largest request body."""
    body_memory: ByteSize = 512 * 2**20
    """Memory of the bodies of all requests under way; a tenant may take half of it."""
    answer_memory: ByteSize = Field(default=2 * 2**30, gt=0)
    """Memory of what the answers of all requests under way may hold beside their text: log-probabilities,
    ids, echoes. A tenant may take half of it."""
    max_responses: int = Field(default=4096, ge=0)
    """Stored responses (`/v1/responses`), and as many conversations; 0: none is stored."""
    max_response_bytes: ByteSize = 128 * 2**20
    """Memory of all stored responses and conversations, half for each."""
    response_ttl_s: float = Field(default=3600.0, gt=0.0)
    """How long a stored response or conversation is kept after its last use."""
    receipts: Path | None = None
    """Private key (Ed25519, PEM) that signs what was computed, for requests with ``stemma.receipt``
    (docs/how-to/receipts.md). `stemma receipts-key` makes one."""
    batch_directory: Path | None = None
    """Directory for `/v1/files` and `/v1/batches`, which outlive a restart. Without it they are off."""
    batch_bytes: ByteSize = 8 * 2**30
    """Disk space of batches: files that clients send, and results; a tenant may take half of it."""
    batch_seats: int = Field(default=8, ge=1)
    """Requests of batches that are answered at one time. None begins while another request waits."""
    max_connections: int = Field(default=1024, ge=1)
    """Open connections. Beyond them the oldest half-sent request, idle connection or unread answer makes
    room for a new one, those without a key first. Fewer if the process may open fewer files."""
    header_timeout_s: float = Field(default=10.0, gt=0.0)
    """Time limit from the connection or the last answer's end until a request's headers are complete."""
    body_timeout_s: float = Field(default=120.0, gt=0.0)
    """Time limit from a request's headers until its body is complete."""
    send_timeout_s: float = Field(default=30.0, gt=0.0)
    """A client that reads less than 32 KiB of its answer in so long, though more waits for it, loses its
    connection, and what runs for it ends."""
    keep_alive_s: float = Field(default=10.0, gt=0.0)
    """How long an idle connection stays open. Clients must give it up first, since what is sent while it is
    being closed is lost: those on httpx, OpenAI's too, do after 5 s."""
    stream_comment_s: float = Field(default=5.0, ge=0.0)
    """A stream that has nothing to tell for so long sends a comment, so that no proxy gives it up meanwhile;
    0: never."""
    tokenize_timeout_s: float = Field(default=30.0, gt=0.0)
    """Time limit for rendering and tokenizing one prompt."""
    request_timeout_s: float | None = Field(default=None, gt=0.0)
    """A request that takes longer ends with an error; default: no limit."""


class RequestSettings(SettingsModel):
    """Limits of requests in addition to the model's own, and the form of answers."""

    max_input_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens of a prompt; `truncation` says what happens to a longer one."""
    truncation: Literal["error", "left", "right"] = "error"
    """A longer prompt is refused, or loses its first (`left`) or its last (`right`) tokens."""
    max_output_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens of an answer; overrides the request."""
    max_n: int | None = Field(default=None, ge=1)
    """Largest `n` and `best_of`; default: as many as can run at once."""
    max_logprobs: int = Field(default=20, ge=0, le=20)
    """Most log-probabilities that a request may ask for of each token, of its answer or its prompt."""
    max_answer_bytes: ByteSize = Field(default=2**30, gt=0)
    """Memory that one answer may take, reckoned before it begins as if each token were the longest one."""
    dialect: Literal["stemma", "mindie"] = "stemma"
    """Whose clients to follow where those of one API differ, e.g. in a list of ids in an event."""


class PlaneSettings(SettingsModel):
    """Separate ports for management and metrics; without them one port serves everything."""

    management_host: str | None = None
    """Address of both; default: `host`."""
    management_port: int | None = Field(default=None, ge=0, le=65535)
    """Health, configuration, administration. 0: any free port."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Prometheus metrics. 0: any free port."""


class TLSSettings(SettingsModel):
    """HTTPS, read again on SIGHUP."""

    flag_prefix: ClassVar[str] = "tls_"

    cert: Path | None = None
    """Certificate of the server, PEM, with intermediate certificates. Enables HTTPS."""
    key: Path | None = None
    """Its private key, PEM."""
    key_password_file: Path | None = None
    """File with the passphrase of the key, if it is encrypted."""
    ca: PathList | None = None
    """CA certificates, PEM, separated by colons. If set, clients must present a certificate."""
    crl: PathList | None = None
    """Certificate revocation lists, PEM, separated by colons."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.cert is None and any((self.key, self.key_password_file, self.ca, self.crl)):
            raise ValueError("TLS needs a certificate: tls_cert")
        if self.cert is not None and self.key is None:
            raise ValueError("tls_cert needs its key: tls_key")
        if self.crl and not self.ca:
            raise ValueError("tls_crl needs tls_ca: without it, clients present no certificates")
        return self


class ManagementTLSSettings(TLSSettings):
    """HTTPS of the management port; default: that of the main port."""

    flag_prefix: ClassVar[str] = "management_tls_"


class MetricsTLSSettings(TLSSettings):
    """HTTPS of the metrics port; default: that of the main port."""

    flag_prefix: ClassVar[str] = "metrics_tls_"
