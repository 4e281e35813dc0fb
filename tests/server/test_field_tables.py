"""docs/project/compatibility.md names every field of the schemas, and every field of the official clients."""

from __future__ import annotations

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase as ResponseParams

from stemma.server.schemas.base import RequestModel
from stemma.server.schemas.messages import MessagesRequest
from stemma.server.schemas.openai import ChatRequest, CompletionRequest
from stemma.server.schemas.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from stemma.server.schemas.responses import ResponsesRequest
from stemma.server.schemas.shared import StructuredOutputs
from stemma.server.schemas.tgi import TGIParameters, TGIRequest, VLLMGenerateRequest
from stemma.server.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from tests.server.documented import check_fields, section

SECTIONS: list[tuple[str, tuple[type[RequestModel], ...]]] = [
    ("OpenAI's chat and completions", (ChatRequest, CompletionRequest)),
    ("OpenAI's Responses API", (ResponsesRequest,)),
    ("Anthropic's Messages API", (MessagesRequest,)),
    ("Fields of TGI's, MindIE's and Triton's shapes", (TGIRequest, TGIParameters)),
    ("Embeddings, reranking and scores", (EmbeddingRequest, RerankRequest, ScoreRequest)),
    ("Fields of vLLM's /generate", (VLLMGenerateRequest,)),
    ("Fields of the tokenizer's endpoints", (TokenizeRequest, DetokenizeRequest)),
]
VLLM_SHARED = """
model frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed stop stream
stream_options temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking
length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids
allowed_token_ids bad_words echo add_special_tokens structured_outputs priority request_id session_id
return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets mm_payload
return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection
stream_interval thinking_token_budget
"""
VLLM: list[tuple[type[RequestModel], str]] = [
    (
        ChatRequest,
        VLLM_SHARED
        + """messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort include_reasoning
        parallel_tool_calls add_generation_prompt continue_final_message documents chat_template
        chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text""",
    ),
    (CompletionRequest, VLLM_SHARED + "prompt suffix prompt_embeds"),
    (
        ResponsesRequest,
        """background include input instructions max_output_tokens max_tool_calls metadata model logit_bias
        parallel_tool_calls previous_response_id prompt reasoning include_reasoning service_tier store stream
        temperature text tool_choice tools top_logprobs top_p top_k min_p truncation user skip_special_tokens
        include_stop_str_in_output presence_penalty frequency_penalty prompt_cache_key watermarking request_id
        session_id media_io_kwargs mm_processor_kwargs priority mm_payload return_mm_kwargs cache_salt
        enable_response_messages previous_input_messages structured_outputs repetition_penalty seed stop
        stop_token_ids ignore_eos vllm_xargs kv_transfer_params ec_transfer_params chat_template_kwargs""",
    ),
    (
        MessagesRequest,
        """model messages max_tokens metadata output_config thinking stop_sequences stream system temperature
        tool_choice tools top_k top_p mm_payload return_mm_kwargs cache_salt watermarking kv_transfer_params
        ec_transfer_params vllm_xargs chat_template_kwargs""",
    ),
    (
        VLLMGenerateRequest,
        """n presence_penalty frequency_penalty repetition_penalty temperature watermarking top_p top_k min_p
        seed stop stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs
        prompt_logprob_token_ids logprob_token_ids detokenize skip_special_tokens
        spaces_between_special_tokens include_stop_str_in_output structured_outputs logit_bias
        allowed_token_ids extra_args bad_words skip_reading_prefix_cache thinking_token_budget
        repetition_detection""",
    ),
    (
        StructuredOutputs,
        """json regex choice grammar json_object disable_any_whitespace disable_additional_properties
        whitespace_pattern structural_tag""",
    ),
    (DetokenizeRequest, "model tokens"),
]
"""Fields of vLLM 0.32.0's requests that a client can send."""


@pytest.mark.parametrize(("title", "models"), SECTIONS)
def test_every_field_of_the_schemas_is_in_its_table(
    title: str, models: tuple[type[RequestModel], ...]
) -> None:
    check_fields(title, models)


@pytest.mark.parametrize(("title", "models"), SECTIONS)
def test_every_kind_of_the_tables_is_on_the_page(title: str, models: tuple[type[RequestModel], ...]) -> None:
    text = section(title)
    kinds = {
        kind
        for model in models
        for table in model.kinds.values()
        for kind in table.spoken | table.skipped | table.refused
    }
    assert {kind for kind in kinds if f"`{kind}`" not in text} == set()


@pytest.mark.parametrize(
    ("params", "model"),
    [
        (ChatParams, ChatRequest),
        (CompletionParams, CompletionRequest),
        (ResponseParams, ResponsesRequest),
        (EmbeddingCreateParams, EmbeddingRequest),
    ],
)
def test_every_field_of_openais_client_is_known(params: type, model: type[RequestModel]) -> None:
    """A new version of the client with a new field: decide what it does here, and say so."""
    assert set(params.__annotations__) - model.known_names() == set()


def test_every_field_of_anthropics_client_is_known() -> None:
    params = pytest.importorskip("anthropic.types.message_create_params").MessageCreateParamsBase
    assert set(params.__annotations__) - MessagesRequest.known_names() == set()


def test_every_field_of_hugging_faces_client_is_known() -> None:
    types = pytest.importorskip("huggingface_hub")
    parameters = types.TextGenerationInputGenerateParameters.__annotations__
    assert set(parameters) - TGIParameters.known_names() == set()
    assert set(types.ChatCompletionInput.__annotations__) - ChatRequest.known_names() == set()


@pytest.mark.parametrize(("model", "names"), VLLM, ids=lambda value: getattr(value, "__name__", ""))
def test_every_field_of_vllms_server_is_known(model: type[RequestModel], names: str) -> None:
    """A field that is ignored where vLLM obeys it would change answers without a word."""
    assert set(names.split()) - model.known_names() == set()
