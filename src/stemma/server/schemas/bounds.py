"""Bounds of everything that a client sends: one name and one place per kind (docs/reference/http.md).

What has no bound here is bounded by the body: its bytes (`--max-body-bytes`) and the number and depth of its
JSON values (`json_input.py`).
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

MAX_JSON_DEPTH = 64
MAX_JSON_CONTAINERS = 50_000
"""Objects and arrays in one body."""
MAX_JSON_VALUES = 1_000_000
"""Values and keys in one body; twice the model's context, if that is more: a prompt may be token ids."""
MAX_FIELDS = 256
"""Keys of one object whose keys the API defines."""

MAX_INT32 = 2**31 - 1
MAX_SEED = 2**63 - 1
MAX_TTL_S = 365 * 86_400.0
"""A year. Larger numbers overflow clocks."""
MAX_TEMPERATURE = 100.0
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
MAX_CHOICES = 8192
"""`n` and `best_of`; `--max-num-seqs` is the lower limit of most servers."""
MAX_PROMPTS = 1024
"""Prompts of one completion request."""
MAX_KEPT = 16
"""Entries of `cache_retention`."""
MAX_MESSAGES = 8192
MAX_PARTS = 8192
"""Parts of one message."""
MAX_TOOLS = 1024
MAX_STOPS = 1024
MAX_STOP_CHARS = 1024
"""Characters of one stop string."""
MAX_STOP_CHARS_TOTAL = 32_768
MAX_NAME_CHARS = 256
"""Model, user, ids."""
MAX_ROLE_CHARS = 64
MAX_SALT_CHARS = 128
MAX_TEMPLATE_KWARGS = 64
MAX_TEMPLATE_CHARS = 65_536
"""A chat template sent by a client, where that is allowed."""
MAX_TEMPLATE_VALUE_CHARS = 1024
MAX_TEMPLATE_NUMBER = 1_000_000
"""Arguments of a template; it may repeat a string as often."""

Int32 = Annotated[int, Field(ge=-MAX_INT32 - 1, le=MAX_INT32)]
Count = Annotated[int, Field(ge=0, le=MAX_INT32)]
"""A number of tokens that may be 0."""
PositiveCount = Annotated[int, Field(ge=1, le=MAX_INT32)]
ThinkingBudget = Annotated[int, Field(ge=-1, le=MAX_INT32)]
"""A number of tokens; -1: no limit."""
Choices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]
TopK = Annotated[int, Field(ge=-1, le=MAX_INT32)]
Seed = Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)]
UnsignedSeed = Annotated[int, Field(ge=0, le=MAX_SEED)]
Temperature = Annotated[float, Field(ge=0.0, le=MAX_TEMPERATURE)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveShare = Annotated[float, Field(gt=0.0, le=1.0)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
RepetitionPenalty = Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
LengthPenalty = Annotated[float, Field(ge=-10.0, le=10.0)]
NumLogprobs = Annotated[int, Field(ge=0, le=20)]
Ttl = Annotated[float, Field(gt=0.0, le=MAX_TTL_S)]
Priority = Annotated[int, Field(ge=0, le=100)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]

Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
Role = Annotated[str, Field(min_length=1, max_length=MAX_ROLE_CHARS)]
Salt = Annotated[str, Field(max_length=MAX_SALT_CHARS)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = StopString | Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOPS)]
TokenBias = Annotated[dict[str, Bias], Field(max_length=MAX_STOPS)]
BadWords = Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOPS)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_STOPS)]
Parts = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_PARTS)]
Messages = Annotated[list[dict[str, Any]], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
Tools = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_TOOLS)]
TemplateKwargs = Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_KWARGS)]
