"""How to turn logits into tokens, and when to stop; validated once, at the door."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stemma.engine.sampling.calls import CallRules
from stemma.engine.sampling.grammar import GrammarSpec
from stemma.engine.sampling.thinking import ThinkingTokens
from stemma.errors import InvalidRequest

MAX_N = 8192
MAX_LOGPROBS = 20
MAX_BEAM_WIDTH = MAX_LOGPROBS // 2
"""Beam search looks at the 2 x width likeliest tokens of each beam."""
MAX_LENGTH_PENALTY = 10.0


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Beam search instead of sampling (`engine/beam_search.py`)."""

    width: int
    """Beams kept; at least as many as are returned."""
    length_penalty: float = 1.0
    """Scores are divided by length ** this: above 0 favours long answers, below 0 short ones."""

    def __post_init__(self) -> None:
        """Raise InvalidRequest naming the first field out of range."""
        if not 1 <= self.width <= MAX_BEAM_WIDTH:
            raise InvalidRequest(
                f"the beam width (n, or best_of where given) must be between 1 and {MAX_BEAM_WIDTH}, "
                f"got {self.width}",
                param="n",
            )
        if not (math.isfinite(self.length_penalty) and abs(self.length_penalty) <= MAX_LENGTH_PENALTY):
            raise InvalidRequest(
                f"length_penalty must be between -{MAX_LENGTH_PENALTY} and {MAX_LENGTH_PENALTY}, "
                f"got {self.length_penalty}",
                param="length_penalty",
            )


_MIN_DIVISOR = 1e-4


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one request; names and defaults as in OpenAI's and vLLM's APIs."""

    n: int = 1
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 or -1: off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    max_tokens: int | None = 16
    """None: as many as the context allows. 0, only with `prompt_logprobs`: the prompt alone is wanted."""
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    """Number of most likely tokens to report besides the chosen one; None: no log-probabilities."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens to report for each token of the prompt besides that one; None: no
    log-probabilities of the prompt. The whole prompt is then computed, whatever is cached of it."""
    skip_special_tokens: bool = True
    grammar: GrammarSpec | None = None
    """Rule that the output must follow. It ends where the grammar does, whatever `ignore_eos` says."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit) pairs."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only ids that may be drawn; empty: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that may not appear in the output."""
    max_thinking_tokens: int | None = None
    """Tokens of thinking at which its end is forced; None: no limit. Nothing without `thinking`."""
    thinking: ThinkingTokens | None = None
    """How the model begins and ends its thinking; None: it doesn't think, or in a way that isn't known."""
    calls: CallRules | None = None
    """Grammars of what follows the beginnings of calls, for an answer without a `grammar`; None: no rule."""

    def __post_init__(self) -> None:
        """Raise InvalidRequest naming the first field out of range."""
        checks = (
            ("n", 1 <= self.n <= MAX_N, f"between 1 and {MAX_N}"),
            ("temperature", self.temperature >= 0.0, ">= 0"),
            ("top_k", self.top_k >= -1, ">= 1, or 0 or -1 for off"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "in [0, 1]"),
            ("repetition_penalty", self.repetition_penalty > 0.0, "> 0"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "in [-2, 2]"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "in [-2, 2]"),
            (
                "max_tokens",
                self.max_tokens is None or self.max_tokens >= (0 if self.prompt_logprobs is not None else 1),
                ">= 1, or 0 with prompt_logprobs",
            ),
            (
                "min_tokens",
                self.min_tokens >= 0 and (self.max_tokens is None or self.min_tokens <= self.max_tokens),
                "between 0 and max_tokens",
            ),
            (
                "logprobs",
                self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
                f"between 0 and {MAX_LOGPROBS}",
            ),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MAX_LOGPROBS,
                f"between 0 and {MAX_LOGPROBS}",
            ),
            ("stop", all(self.stop), "non-empty strings"),
            (
                "allowed_token_ids",
                not (self.allowed_token_ids and self.grammar),
                "left out where the output is structured",
            ),
            ("bad_words", all(self.bad_words), "non-empty"),
            (
                "max_thinking_tokens",
                self.max_thinking_tokens is None or self.max_thinking_tokens >= 0,
                ">= 0",
            ),
        )
        for name, ok, expected in checks:
            if not ok:
                raise InvalidRequest(f"{name} must be {expected}, got {getattr(self, name)!r}", param=name)

    @property
    def constrained(self) -> bool:
        """Whether something forbids tokens or changes logits, apart from penalties and `min_tokens`."""
        rules = (self.grammar, self.calls, self.logit_bias, self.allowed_token_ids, self.bad_words)
        return any(rules) or self.limits_thinking

    @property
    def limits_thinking(self) -> bool:
        """Whether there is a budget of thinking."""
        return self.max_thinking_tokens is not None and self.thinking is not None

    @property
    def divisor(self) -> float:
        """What logits are divided by before a draw: the temperature, unless they would overflow."""
        return max(self.temperature, _MIN_DIVISOR)

    @property
    def greedy(self) -> bool:
        """Whether each step takes the most likely token."""
        return self.temperature == 0.0
