"""The exception tree.

StemmaError
 +-- InvalidRequest            the caller's fault: HTTP 400 (422 in the TGI shape)
 |    +-- PromptTooLong        longer than the model or the KV cache can ever hold
 |    +-- UnknownModel         HTTP 404
 |    +-- NotFound             HTTP 404
 |    +-- BodyTooLarge         HTTP 413
 |    +-- Unauthorized         HTTP 401
 |    +-- Forbidden            HTTP 403
 |    +-- WrongMediaType       HTTP 415
 |    +-- TookTooLong          HTTP 408
 +-- ClientDisconnected        nobody waits for the answer any more
 +-- GenerationFailed          the engine failed on a request it had accepted: HTTP 500 (424 in the TGI shape)
 +-- EngineFailed              a thread of the engine failed; the server stops: HTTP 503
 |    +-- DeviceLost           the device answers every call with an error: only a new process can use it
 +-- OverBudget                too much is asked for at once; worth a retry: HTTP status with Retry-After
 |    +-- Overloaded           the server's budget is used up, or its queue is full: HTTP 503
 |    +-- RateLimited          a tenant's is: HTTP 429
 +-- ShuttingDown              the server drains: HTTP 503
 +-- ConfigError               a setting is unknown, malformed or contradicts another
 +-- ModelError                a checkpoint can't be loaded
 |    +-- UnsupportedModel     its architecture has no per-token KV that we can cache
 |    +-- AdapterError         an adapter (LoRA) can't be read, or the model can't serve it: HTTP 400
 +-- OutOfBlocks               no block is free and none can be evicted (internal: the scheduler preempts)
 +-- StorageError              a tier can't be opened or used
 |    +-- StorageLocked        another server owns the directory
 |    +-- StorageMismatch      the directory belongs to another model, dtype, block size or format
 |    +-- UntrustedFile        blocks in a file that nobody signed (HTTP 403)
 +-- TraceError                a trace line can't be read; carries its number and the reason
 +-- IntegrityError            an invariant is broken; raised by `check()` alone
"""

from __future__ import annotations


class StemmaError(Exception):
    """Base of every error that Stemma raises on purpose."""


class InvalidRequest(StemmaError):
    """A request can't be served as it stands; the message says what to change."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        """Name of the offending request field, where one is to blame."""


class PromptTooLong(InvalidRequest):
    """The prompt (plus one token) exceeds the model's context or the whole KV cache."""

    @classmethod
    def of(
        cls, amount: str, limit: int, *, param: str | None = None, counts: str = "output included"
    ) -> PromptTooLong:
        """Return the error for a prompt of `amount` (``900 tokens``) where `limit` tokens fit.

        `counts`: what the limit is of.

        Clients that shorten a conversation and try again know it by "maximum context length is" (LiteLLM, as
        OpenAI words it) and by "prompt is too long" (langchain-anthropic): the message has both.
        """
        return cls(
            f"prompt is too long: this model's maximum context length is {limit} tokens, {counts}, and the "
            f"prompt has {amount}",
            param=param,
        )


class UnknownModel(InvalidRequest):
    """The request names a model that this server doesn't serve."""


class NotFound(InvalidRequest):
    """The request names something stored that isn't there."""


class BodyTooLarge(InvalidRequest):
    """The request body exceeds `ServerSettings.max_body_bytes`."""


class Unauthorized(InvalidRequest):
    """The API key is missing or wrong."""


class Forbidden(InvalidRequest):
    """Who asks, or from which web page, may not do this."""


class WrongMediaType(InvalidRequest):
    """The request body is declared as something that the path doesn't take."""


class TookTooLong(InvalidRequest):
    """The request exceeded a time limit of this server."""


class ClientDisconnected(StemmaError):
    """The client closed its connection before the answer was complete."""


class GenerationFailed(StemmaError):
    """The engine reported an error on a request that it had accepted."""


class EngineFailed(StemmaError):
    """A thread of the engine failed: it serves nothing any more, and the server stops."""


class DeviceLost(EngineFailed):
    """The device answers every call with an error; only a new process can use it again."""


class OverBudget(StemmaError):
    """More is asked for than may be held or computed at once; ask again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Overloaded(OverBudget):
    """The places that all clients share are taken, such as those of the waiting queue."""


class RateLimited(OverBudget):
    """A tenant asks for more than its own limits allow."""


class ShuttingDown(StemmaError):
    """The engine drains and takes no new request."""


class ConfigError(StemmaError):
    """A setting is unknown, malformed, or contradicts another."""


class ModelError(StemmaError):
    """A checkpoint can't be loaded."""


class UnsupportedModel(ModelError):
    """The architecture keeps state that isn't per-token KV, or bypasses the attention interface."""


class AdapterError(ModelError):
    """An adapter can't be read, or has parts that can't be served; the message says which."""


class OutOfBlocks(StemmaError):
    """No block is free and none can be evicted."""


class StorageError(StemmaError):
    """A tier can't be opened or used."""


class StorageLocked(StorageError):
    """Another process owns the storage."""


class StorageMismatch(StorageError):
    """The storage was written for another model, dtype, block size or format version."""


class UntrustedFile(StorageError):
    """A file of blocks that none of our servers signed, and that the operator doesn't vouch for."""


class TraceError(StemmaError):
    """A trace line can't be read."""

    def __init__(self, message: str, *, line_number: int) -> None:
        super().__init__(f"line {line_number}: {message}")
        self.line_number = line_number


class IntegrityError(StemmaError):
    """An invariant of a data structure is broken (a bug); raised by `check()`."""
