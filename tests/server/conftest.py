"""A byte-level tokenizer without downloads, a scripted engine, and clients in process or over a socket."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stemma.config.server_settings import ServerSettings
from stemma.config.settings import EngineSettings, ModelSettings, Settings
from stemma.model.text.tokenizer import Tokenizer
from stemma.server.app import create_app
from tests.server.scripted_engine import ScriptedEngine

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    "{% if tools %}<|tools|>{{ tools | length }}\n{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate(alphabet)}
    raw = RawTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(str(path))
    return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_path: Path) -> Tokenizer:
    return Tokenizer(tokenizer_path)


@pytest.fixture
def engine(tokenizer: Tokenizer) -> ScriptedEngine:
    return ScriptedEngine(tokenizer)


@pytest.fixture
def settings() -> Settings:
    return Settings(
        engine=EngineSettings(model=ModelSettings(path=Path("scripted"))),
        server=ServerSettings(port=0, max_body_bytes=200_000),
    )


@pytest.fixture
async def client(engine: ScriptedEngine, settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """Talks to the app in this process, without sockets."""
    transport = httpx.ASGITransport(app=create_app(engine, settings), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        yield http


@pytest.fixture
def live_url(engine: ScriptedEngine, settings: Settings) -> Iterator[str]:
    """The app behind a real socket, in a thread."""
    server = uvicorn.Server(
        uvicorn.Config(create_app(engine, settings), host="127.0.0.1", port=0, log_level="warning")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(5)
