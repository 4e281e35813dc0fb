"""A small OpenAI-compatible front of OpenVINO GenAI, which ships no server: streamed completions alone.

``python -m benchmarks.peers.openvino_front MODEL_DIR --port 8000`` in an environment of its own with
``openvino-genai``, ``fastapi`` and ``uvicorn``. `MODEL_DIR` is an export of ``optimum-cli export openvino``.
One thread owns the pipeline: it adds requests, steps, and hands new tokens to the event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import openvino_genai as ov
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from openvino_genai.py_openvino_genai import GenerationStatus


@dataclass
class _Job:
    prompt: str
    config: Any
    loop: asyncio.AbstractEventLoop
    tokens: asyncio.Queue[list[int] | None] = field(default_factory=asyncio.Queue)
    handle: Any = None

    def put(self, item: list[int] | None) -> None:
        self.loop.call_soon_threadsafe(self.tokens.put_nowait, item)


class Pipeline:
    """OpenVINO's continuous batching with prefix caching, stepped on a thread of its own."""

    def __init__(self, model: str, cache_gb: int, threads: int) -> None:
        scheduler = ov.SchedulerConfig()
        scheduler.cache_size = cache_gb
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        properties = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": threads}
        self._pipeline = ov.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self.tokenizer = self._pipeline.get_tokenizer()
        self._waiting: queue.Queue[_Job] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, job: _Job) -> None:
        """Queue a request; its tokens arrive in `job.tokens`, None at the end."""
        self._waiting.put(job)

    def _run(self) -> None:
        running: list[_Job] = []
        number = 0
        while True:
            while not running or not self._waiting.empty():
                job = self._waiting.get()
                job.handle = self._pipeline.add_request(number, job.prompt, job.config)
                number += 1
                running.append(job)
            self._pipeline.step()
            for job in list(running):
                ended = job.handle.get_status() != GenerationStatus.RUNNING
                while job.handle.can_read():
                    for output in job.handle.read().values():
                        job.put(list(output.generated_ids))
                if ended:
                    job.put(None)
                    running.remove(job)


def make_app(pipeline: Pipeline, model: str) -> FastAPI:
    app = FastAPI()

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": model, "object": "model"}]}

    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request) -> StreamingResponse | JSONResponse:
        body = await request.json()
        if not isinstance(body.get("prompt"), str) or not body.get("stream"):
            return JSONResponse({"error": {"message": "one prompt of text, streamed"}}, 400)
        if (body.get("n") or 1) != 1 or body.get("use_beam_search"):
            return JSONResponse({"error": {"message": "n and beam search are not offered here"}}, 400)
        config = ov.GenerationConfig()
        config.max_new_tokens = body.get("max_tokens") or 16
        config.ignore_eos = bool(body.get("ignore_eos"))
        config.do_sample = False
        job = _Job(body["prompt"], config, asyncio.get_running_loop())
        pipeline.submit(job)
        return StreamingResponse(_events(pipeline, job, model), media_type="text/event-stream")

    return app


async def _events(pipeline: Pipeline, job: _Job, model: str) -> AsyncIterator[bytes]:
    ids: list[int] = []
    shown = ""
    while (new := await job.tokens.get()) is not None:
        ids.extend(new)
        text = pipeline.tokenizer.decode(ids)
        piece, shown = text[len(shown) :] or " ", text
        yield _event({"model": model, "choices": [{"index": 0, "text": piece, "finish_reason": None}]})
    last = {"index": 0, "text": "", "finish_reason": "length"}
    yield _event({"model": model, "choices": [last], "usage": {"completion_tokens": len(ids)}})
    yield b"data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--name", default="bench")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache-gb", type=int, default=2)
    options = parser.parse_args()
    made = Pipeline(options.model, options.cache_gb, options.threads)
    uvicorn.run(make_app(made, options.name), host="127.0.0.1", port=options.port, log_level="warning")
