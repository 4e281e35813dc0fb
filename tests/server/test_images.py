"""Images through every front over a real engine: what is reused, what is told, what is refused."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from stemma.config.settings import EngineSettings, ImageSettings, Settings
from stemma.engine.async_engine import AsyncEngine
from stemma.engine.llm import engine_settings
from stemma.native.library import load_kernels
from stemma.server.app import create_app
from tests.vision_checkpoints import IMAGE_TOKENS, make_vision_checkpoint, picture

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="needs a C++ compiler")

Client = httpx.AsyncClient
LIMITS = ImageSettings(max_bytes=100_000, max_pixels=100_000, max_number=3)


@pytest.fixture(scope="module", params=["qwen2.5-vl", "gemma3"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_checkpoint(family, tmp_path_factory.mktemp("vision") / "tiny")


@pytest.fixture
def settings(checkpoint: Path) -> EngineSettings:
    found = engine_settings(
        checkpoint, block_size=16, kv_cache_memory="4MB", num_threads=1, free_windows=False
    )
    return found.model_copy(update={"images": LIMITS})


@pytest.fixture
async def client(settings: EngineSettings) -> AsyncIterator[Client]:
    engine = AsyncEngine.from_settings(settings)
    app = create_app(engine, Settings(engine=settings))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=30) as http:
        yield http
    await engine.check()
    engine.close()


def file_of(image: Image.Image, kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind)
    return stream.getvalue()


def base64_of(image: Image.Image, kind: str = "PNG") -> str:
    return base64.b64encode(file_of(image, kind)).decode()


def data_url(image: Image.Image, kind: str = "PNG") -> str:
    return f"data:image/{kind.lower()};base64,{base64_of(image, kind)}"


def openai(image: Image.Image, question: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": data_url(image)}}, {"type": "text", "text": question}]
    message = {"role": "user", "content": parts}
    return "/v1/chat/completions", {"messages": [message], "max_tokens": 5, "temperature": 0, **fields}


def anthropic(image: Image.Image, question: str) -> tuple[str, dict[str, Any]]:
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(image)}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": question}]
    return "/v1/messages", {
        "messages": [{"role": "user", "content": blocks}],
        "max_tokens": 5,
        "temperature": 0,
    }


def responses(image: Image.Image, question: str) -> tuple[str, dict[str, Any]]:
    parts = [{"type": "input_image", "image_url": data_url(image)}, {"type": "input_text", "text": question}]
    given = [{"role": "user", "content": parts}]
    return "/v1/responses", {"input": given, "max_output_tokens": 5, "temperature": 0}


Front = Callable[[Image.Image, str], tuple[str, dict[str, Any]]]


async def post(client: Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post(path, json=body, headers={"x-stemma-explain": "1"})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def refused(client: Client, path: str, body: dict[str, Any]) -> str:
    answer = await client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    message: str = answer.json()["error"]["message"]
    return message


async def metric(client: Client, name: str) -> float:
    lines = (await client.get("/metrics")).text.splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])


def told(answer: dict[str, Any]) -> tuple[int, str, str]:
    """Cached tokens, and why not the others."""
    why = answer["usage"]["stemma"]["explanation"]
    return why["cached_tokens"], why["reason"], why["detail"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("front", [openai, anthropic, responses])
async def test_another_question_about_the_same_image(client: Client, front: Front) -> None:
    first, second = picture(1, 140, 84), picture(2, 140, 84)
    assert told(await post(client, *front(first, "What is this?")))[0] == 0
    cached, reason, detail = told(await post(client, *front(first, "Who was that?")))
    assert cached > 15
    assert (reason, "differs" in detail) == ("diverged", False)
    assert await metric(client, "stemma_images_encoded_total") == 1
    cached, reason, detail = told(await post(client, *front(second, "Who was that?")))
    assert 0 < cached < 10
    assert reason == "diverged"
    assert detail.endswith(f"at position {cached}: image 1 of message 1 differs.")
    assert await metric(client, "stemma_images_encoded_total") == 2
    assert await metric(client, "stemma_image_cache_bytes") > 0


async def test_all_fronts_make_the_same_prompt(client: Client) -> None:
    image = picture(1, 140, 84)
    first = await post(client, *openai(image, "What is this?"))
    for front in (anthropic, responses):
        assert told(await post(client, *front(image, "What is this?")))[1] == "last_token"
    tokenized = await post(client, "/tokenize", openai(image, "What is this?")[1])
    assert tokenized["count"] == first["usage"]["prompt_tokens"]
    with_ids = await post(client, *openai(image, "What is this?", return_token_ids=True))
    assert with_ids["prompt_token_ids"] == tokenized["tokens"]
    assert max(tokenized["tokens"]) < 520
    [path, body] = anthropic(image, "What is this?")
    counted = await post(client, f"{path}/count_tokens", {"messages": body["messages"]})
    assert counted["input_tokens"] == tokenized["count"]


async def test_an_image_in_another_place_is_not_encoded_again(client: Client) -> None:
    image = picture(1, 140, 84)
    await post(client, *openai(image, "What is this?"))
    path, body = openai(image, "What is this?")
    body["messages"].insert(0, {"role": "system", "content": "Be short."})
    assert told(await post(client, path, body))[0] < 10
    assert await metric(client, "stemma_images_encoded_total") == 1
    assert await metric(client, "stemma_images_reused_total") == 1


async def test_an_image_of_another_salt_is_encoded_again(client: Client) -> None:
    """Else a faster answer tells that somebody sent it."""
    for number, salt in ((1, "ada"), (1, "ada"), (2, "bob")):
        path, body = openai(picture(8), "What is this?", cache_salt=salt)
        body["messages"].insert(0, {"role": "system", "content": f"{number} {salt}"})
        await post(client, path, body)
        assert await metric(client, "stemma_images_encoded_total") == number


async def test_explanations_show_images_and_name_them(client: Client, family: str) -> None:
    await post(client, *openai(picture(1, 140, 84), "What is this?"))
    path, body = openai(picture(2, 140, 84), "What is this?")
    told_why = (await post(client, path, body))["usage"]["stemma"]["explanation"]
    assert told_why["detail"].endswith("image 1 of message 1 differs.")
    opening = "<start_of_image>" if family == "gemma3" else "<|vision_start|>"
    assert f"{opening}<image>" in told_why["parts_at"]["yours"]


async def test_a_conversation_goes_on_and_streams(client: Client) -> None:
    path, body = responses(picture(1, 140, 84), "What is this?")
    first = await post(client, path, body)
    then = {"input": "And why?", "previous_response_id": first["id"], "max_output_tokens": 5}
    cached, _, _ = told(await post(client, path, then))
    assert cached > 15
    path, body = openai(picture(1, 140, 84), "What is this?", stream=True, n=2)
    answer = await client.post(path, json=body)
    assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n")


async def test_marks_of_anthropic_and_results_of_tools_with_images(client: Client) -> None:
    path, body = anthropic(picture(1, 140, 84), "What is this?")
    body["messages"][0]["content"][0]["cache_control"] = {"type": "ephemeral"}
    [image, _] = body["messages"][0]["content"]
    image_alone = {key: value for key, value in image.items() if key != "cache_control"}
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    body["messages"] += [
        {"role": "assistant", "content": [call]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [image_alone]}],
        },
    ]
    answer = await post(client, path, body)
    assert answer["usage"]["cache_creation_input_tokens"] > 0


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
async def test_formats(client: Client, kind: str) -> None:
    path, body = openai(picture(1, 140, 84), "What is this?")
    body["messages"][0]["content"][0]["image_url"]["url"] = data_url(picture(1, 140, 84), kind)
    await post(client, path, body)


async def test_what_is_refused(client: Client, family: str) -> None:
    path, body = openai(picture(1), "What is this?")
    part = body["messages"][0]["content"][0]["image_url"]

    async def with_url(url: object) -> str:
        part["url"] = url
        return await refused(client, path, body)

    assert "image 1 of message 1 isn't base64" in await with_url("data:image/png;base64,*")
    assert "no image in PNG, JPEG, WebP or GIF" in await with_url("data:text/plain,hello")
    assert "a comma" in await with_url("data:image/png;base64")
    assert "no image" in await with_url(data_url(picture(1), "BMP"))
    large = Image.new("RGB", (1000, 101))
    assert "1000 x 101 pixels; at most 100000" in await with_url(data_url(large))
    noise = Image.effect_noise((300, 300), 100)
    assert "more than 100000 bytes" in await with_url(data_url(noise.convert("RGB")))
    cut = base64.b64encode(file_of(picture(1, 140, 84))[:-300]).decode()
    assert "can't be decoded" in await with_url(f"data:image/png;base64,{cut}")
    assert "--image-urls" in await with_url("https://example.com/a.png")
    assert "needs a url" in await with_url("")
    part["url"] = data_url(picture(1))
    four = {**body, "messages": 4 * body["messages"]}
    assert "hold 4 images, and at most 3" in await refused(client, path, four)
    assert "stands for an image" in await refused(
        client, *openai(picture(1), f"a {IMAGE_TOKENS[family]} too")
    )
    cut_short = {**body, "truncate_prompt_tokens": 5}
    assert "isn't cut" in await refused(client, path, cut_short)
    audio = [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]
    assert "parts of type 'input_audio' are not supported" in await refused(
        client, path, {**body, "messages": audio}
    )
    url_source = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/a.png"}}
    message = {"messages": [{"role": "user", "content": [url_source]}], "max_tokens": 4}
    assert "--image-urls" in await refused(client, "/v1/messages", message)
    by_file = [{"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}]
    assert "not a file" in await refused(client, "/v1/responses", {"input": by_file})


async def test_a_text_alone_may_hold_the_placeholder(client: Client) -> None:
    body = {"messages": [{"role": "user", "content": "what is <|image_pad|>?"}], "max_tokens": 3}
    await post(client, "/v1/chat/completions", body)


async def test_ids_of_images_are_not_for_clients(client: Client) -> None:
    body = {"prompt": [5, (1 << 30) + 7], "max_tokens": 3}
    assert "token ids must be in" in await refused(client, "/v1/completions", body)


async def test_decoded_images_are_a_budget(settings: EngineSettings) -> None:
    small = settings.model_copy(update={"images": ImageSettings(memory=50_000)})
    engine = AsyncEngine.from_settings(small)
    app = create_app(engine, Settings(engine=small))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=30) as http:
        path, body = openai(picture(1, 300, 300), "What is this?")
        answer = await http.post(path, json=body)
        assert answer.status_code == 400
        assert "--image-memory" in answer.json()["error"]["message"]
        held = next(
            line
            for line in (await http.get("/metrics")).text.splitlines()
            if line.startswith('stemma_budget_held{budget="image_bytes"}')
        )
        assert held.endswith(" 0.0")
    engine.close()
