"""What the server notes of requests: records, the log line, the requests under way."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from stemma.config.settings import Settings
from stemma.engine.api import CacheReport, GenerationRequest, RequestOutput, SequenceDelta
from stemma.engine.core.tally import reporter_lines
from stemma.prefix.keys import Namespace
from stemma.server.app import create_app
from stemma.server.observe.collected import Collected
from stemma.server.observe.metrics import ServerMetrics
from stemma.server.observe.request_log import log_request, request_line
from stemma.server.observe.watches import MAX_RECORDS, RequestRecord, Watches
from stemma.types import FinishReason, Tier
from tests.server.scripted_engine import ScriptedEngine


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


REPORT = CacheReport(40, {Tier.DEVICE: 16, Tier.DISK: 8}, "diverged", "the secret is in here")


def followed(clock: Clock, watches: Watches, outcome: str = "ok", name: str = "r 1\n") -> RequestRecord:
    request = GenerationRequest(name, np.arange(40, dtype=np.int32), namespace=Namespace("s", owner="ada"))
    watch = watches.watch(request, "chat")
    assert list(watches.running) == [name]
    answer = Collected.nothing(40)
    if outcome != "refused":
        clock.now += 0.5
        answer.cache = answer.exact = REPORT
        answer.take(RequestOutput(name, (SequenceDelta(0, (1,), "x"),), REPORT, False, 1, 0.3, 0.1))
        watch.began(answer)
        watch.spoke(answer)
        clock.now += 1.0
        end = SequenceDelta(0, (2,), "y", finish_reason=FinishReason.LENGTH)
        answer.take(RequestOutput(name, (end,), REPORT, True, 2, 0.3, 0.1))
    watch.ended(answer, outcome)
    assert not watches.running
    return watches.records[-1]


def test_a_record_has_the_times_and_observers_get_it():
    clock = Clock()
    watches = Watches(ServerMetrics(clock), wall=lambda: 7.0)
    seen: list[Any] = []
    watches.observers.append(seen.append)
    record = followed(clock, watches)
    assert seen == [record]
    assert (record.queue_s, record.load_s, record.first_token_s, record.total_s) == (0.3, 0.1, 0.5, 1.5)
    assert (record.tenant, record.arrived_at, record.finish_reason) == ("ada", 7.0, FinishReason.LENGTH)
    refused = followed(clock, watches, "refused")
    assert (refused.number, refused.cache, refused.first_token_s) == (2, None, None)


def test_the_line_of_a_request_has_no_text_and_no_control_characters():
    clock = Clock()
    line = request_line(followed(clock, Watches(ServerMetrics(clock))))
    assert line == (
        "request=r?1? api=chat outcome=ok tenant=ada prompt_tokens=40 cached_tokens=24 from_device=16 "
        "from_disk=8 miss=diverged generated_tokens=2 queue_ms=300.0 load_ms=100.0 first_token_ms=500.0 "
        "total_ms=1500.0 finish=length"
    )
    assert "secret" not in line
    refused = request_line(followed(clock, Watches(ServerMetrics(clock)), "refused"))
    assert "outcome=refused" in refused
    assert "cached_tokens" not in refused


def test_records_are_bounded():
    clock = Clock()
    watches = Watches(ServerMetrics(clock))
    for _ in range(MAX_RECORDS + 5):
        followed(clock, watches, "refused")
    assert len(watches.records) == MAX_RECORDS
    assert watches.records[0].number == 6


def test_requests_are_logged_only_if_wanted(engine: ScriptedEngine, settings: Settings):
    assert create_app(engine, settings).state.instruments.watches.observers == []
    server = settings.server.model_copy(update={"log_requests": True})
    app = create_app(engine, settings.model_copy(update={"server": server}))
    assert app.state.instruments.watches.observers == [log_request]


def test_the_line_goes_to_the_log(caplog: pytest.LogCaptureFixture):
    clock = Clock()
    watches = Watches(ServerMetrics(clock))
    watches.observers.append(log_request)
    with caplog.at_level(logging.INFO, "stemma.requests"):
        followed(clock, watches)
    assert "first_token_ms=500.0" in caplog.text


def test_mindies_two_lines():
    batch = [REPORT, CacheReport(60, {Tier.HOST: 16})]
    lines = reporter_lines(batch, 1000, {Tier.DEVICE: 250, Tier.HOST: 125, Tier.DISK: 125})
    assert lines == (
        "Prefix Cache Reporter: #batchsize: 2, #batched-tokens: 100, #local cached-tokens: 16, "
        "#local cached hit rate: 16.00%, #remote cached-tokens: 24, #remote cached hit rate: 24.00%, "
        "#cached hit rate: 40.00%",
        "Prefix Cache Global Reporter: #total prefill tokens: 1000, #total local matched tokens: 250, "
        "#total local cached hit rate: 25.00%, #total remote matched tokens: 250, "
        "#total remote cached hit rate: 25.00%, #total cached hit rate: 50.00%",
    )
