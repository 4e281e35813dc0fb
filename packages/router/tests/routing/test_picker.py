"""What the endpoint picker answers to messages, sound and odd: a gRPC client in Envoy's place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
import pytest

from stemma.told import Told
from stemma_router.cluster.health import Check
from stemma_router.routing.picker.options import PickerOptions
from stemma_router.routing.served_fleet import ServedFleet
from stemma_router.routing.server_list import ServerList

grpc = pytest.importorskip("grpc", reason="the extra `envoy` isn't installed")
core = pytest.importorskip(
    "envoy_data_plane.envoy.config.core.v3", reason="the extra `envoy` isn't installed"
)
ext_proc = pytest.importorskip("envoy_data_plane.envoy.service.ext_proc.v3")
protobuf = pytest.importorskip("envoy_data_plane.google.protobuf")
pytest.importorskip("grpc_health", reason="the extra `envoy` isn't installed")

SERVERS = ["http://127.0.0.1:7001", "http://127.0.0.1:7002", "http://[::1]:7003"]
ENDPOINTS = {"127.0.0.1:7001", "127.0.0.1:7002", "[::1]:7003"}
BODY = orjson.dumps({"prompt": list(range(300)), "stream": True})
MAX_BODY = 10_000
BUFFERED, FULL_DUPLEX = 2, 4


class Asked:
    """A picker, and a call to it for each exchange."""

    def __init__(self, port: int, served: ServedFleet) -> None:
        self.served = served
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self._process = self._channel.stream_stream(
            "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
            request_serializer=bytes,
            response_deserializer=ext_proc.ProcessingResponse.parse,
        )

    async def exchange(self, *messages: Any) -> list[Any]:
        """Send messages; return all answers until the picker has ended the exchange."""

        async def all_messages() -> AsyncIterator[Any]:
            for message in messages:
                yield message

        return [answer async for answer in self._process(all_messages())]

    async def close(self) -> None:
        await self._channel.close()


@pytest.fixture
async def picker() -> AsyncIterator[Asked]:
    from stemma_router.routing.picker.serving import serving_picker

    silent = httpx.AsyncClient(transport=httpx.MockTransport(lambda request: httpx.Response(200)))
    served = ServedFleet(ServerList(SERVERS), "cache-aware", silent)
    options = PickerOptions("127.0.0.1:0")
    async with served.serving(), serving_picker(served, options, MAX_BODY, 20_000) as port:
        asked = Asked(port, served)
        yield asked
        await asked.close()
    assert {served.fleet.load(one).num_requests for one in served.fleet.members} == {0}


def headers(*, mode: int = BUFFERED, end: bool = False, subset: Any = None, **more: str) -> Any:
    pairs = {":path": "/v1/completions", ":method": "POST", "content-type": "application/json", **more}
    given = [core.HeaderValue(key=name, raw_value=value.encode()) for name, value in pairs.items()]
    message = ext_proc.ProcessingRequest(
        request_headers=ext_proc.HttpHeaders(headers=core.HeaderMap(headers=given), end_of_stream=end),
        protocol_config=ext_proc.ProtocolConfiguration(request_body_mode=mode),
    )
    if subset is not None:
        values = protobuf.ListValue(values=[protobuf.Value(string_value=one) for one in subset])
        hint = protobuf.Struct(
            fields={"x-gateway-destination-endpoint-subset": protobuf.Value(list_value=values)}
        )
        message.metadata_context = core.Metadata(filter_metadata={"envoy.lb.subset_hint": hint})
    return message


def body(content: bytes = BODY, *, end: bool = True) -> Any:
    return ext_proc.ProcessingRequest(request_body=ext_proc.HttpBody(body=content, end_of_stream=end))


def answered(status: str, **more: str) -> Any:
    pairs = {":status": status, **more}
    given = [core.HeaderValue(key=name, raw_value=value.encode()) for name, value in pairs.items()]
    told = ext_proc.HttpHeaders(headers=core.HeaderMap(headers=given))
    return ext_proc.ProcessingRequest(response_headers=told)


def answer_body(content: bytes, *, end: bool = True) -> Any:
    return ext_proc.ProcessingRequest(response_body=ext_proc.HttpBody(body=content, end_of_stream=end))


def mutation_of(answer: Any) -> Any:
    return (answer.request_headers or answer.request_body).response.header_mutation


def choice(answer: Any) -> list[str]:
    """Return the endpoints of an answer; header and metadata say the same."""
    option, *_ = mutation_of(answer).set_headers
    assert option.header.key == "x-gateway-destination-endpoint"
    chosen = answer.dynamic_metadata.fields["envoy.lb"].struct_value.fields[option.header.key].string_value
    assert option.header.raw_value.decode() == chosen
    endpoints: list[str] = chosen.split(",")
    return endpoints


async def test_the_best_server_and_those_after_it(picker: Asked) -> None:
    go_on, chosen = await picker.exchange(headers(), body())
    assert go_on.request_headers.response.header_mutation is None
    assert set(choice(chosen)) == ENDPOINTS
    again = await picker.exchange(headers(), body(), answered("200"))
    assert choice(again[1]) == choice(chosen)
    assert again[2].response_headers is not None


async def test_envoy_is_told_how_long_to_wait_for_a_streams_first_byte(picker: Asked) -> None:
    """As long as the proxy itself would; not of answers of unknown length, nor if there is no other."""
    name = "x-envoy-upstream-rq-per-try-timeout-ms"
    _, streamed = await picker.exchange(headers(), body())
    _, limit = mutation_of(streamed).set_headers
    speed = picker.served.fleet.members[0].speed
    assert (limit.header.key, limit.header.raw_value) == (name, b"%d" % round(1000 * speed.limit_s(300)))
    _, whole = await picker.exchange(headers(), body(orjson.dumps({"prompt": "x"})))
    _, alone = await picker.exchange(headers(subset=["[::1]:7003"]), body())
    for answer in (whole, alone):
        assert len(mutation_of(answer).set_headers) == 1
        assert mutation_of(answer).remove_headers == [name]


async def test_envoy_is_told_how_long_to_wait_for_a_whole_answer(picker: Asked) -> None:
    """Once the server told how slow its tokens come, and the request, how many it may have."""
    content = orjson.dumps({"prompt": list(range(300)), "max_tokens": 100, "n": 2})
    _, unknown = await picker.exchange(headers(), body(content))
    assert len(mutation_of(unknown).set_headers) == 1
    for member in picker.served.fleet.members:
        picker.served.fleet.note_check(member.url, Check.SERVES, Told(decode_s_per_token=0.25))
    _, told = await picker.exchange(headers(), body(content))
    _, limit = mutation_of(told).set_headers
    prefill_s = picker.served.fleet.members[0].speed.limit_s(300)
    assert int(limit.header.raw_value) == round(1000 * (30 + prefill_s + 4 * 200 * 0.25))


WHOLE = orjson.dumps({"prompt": list(range(300))})
JSON: dict[str, Any] = {"content-type": "application/json"}


@pytest.mark.parametrize("mode", [BUFFERED, FULL_DUPLEX])
async def test_whole_answers_measure_their_server(picker: Asked, mode: int) -> None:
    """As in the router. Envoy is asked for the body, unless its configuration alone says what is sent."""
    usage = orjson.dumps({"usage": {"completion_tokens": 7}})
    pieces = answer_body(usage[:9], end=False), answer_body(usage[9:])
    for _ in range(10):
        *_, told, first, last = await picker.exchange(
            headers(mode=mode), body(WHOLE), answered("200", **JSON), *pieces
        )
        assert (told.mode_override is None) is (mode == FULL_DUPLEX)
        if mode == FULL_DUPLEX:
            passed = [one.response_body.response.body_mutation.streamed_response for one in (first, last)]
            assert b"".join(one.body for one in passed) == usage
    assert [one.pace.whole.mean_s is None for one in picker.served.fleet.members].count(False) == 1
    assert all(one.pace.prefill.mean_s is None for one in picker.served.fleet.members)


@pytest.mark.parametrize(
    ("status", "content"),
    [("200", b"{"), ("200", b"{}"), ("200", b"[" * 4000), ("500", b'{"usage": {"completion_tokens": 7}}')],
)
async def test_answers_that_say_nothing_measure_nothing(picker: Asked, status: str, content: bytes) -> None:
    for _ in range(10):
        *_, last = await picker.exchange(
            headers(), body(WHOLE), answered(status, **JSON), answer_body(content)
        )
        assert last.response_body is not None
    assert [one.pace.whole.mean_s for one in picker.served.fleet.members] == [None] * 3


@pytest.mark.parametrize("content", [WHOLE, BODY])
async def test_an_answer_of_another_server_than_the_first_measures_nobody(
    picker: Asked, content: bytes
) -> None:
    """Envoy went on to it, and doesn't say when."""
    usage = answer_body(orjson.dumps({"usage": {"completion_tokens": 7}}))
    chosen = choice((await picker.exchange(headers(), body(content)))[-1])
    told = answered("200", **JSON)
    served = protobuf.Struct(
        fields={"x-gateway-destination-endpoint-served": protobuf.Value(string_value=chosen[1])}
    )
    told.metadata_context = core.Metadata(filter_metadata={"envoy.lb": served})
    for _ in range(10):
        await picker.exchange(headers(subset=chosen[:1]), body(content), told, usage)
    members = picker.served.fleet.members
    assert [(one.pace.whole.mean_s, one.pace.prefill.mean_s) for one in members] == [(None, None)] * 3
    assert sum(one.speed.num_samples for one in members) == 0


async def test_a_streamed_body_is_held_and_goes_on_whole(picker: Asked) -> None:
    pieces = [body(BODY[:100], end=False), body(BODY[100:200], end=False), body(BODY[200:])]
    chosen, *passed = await picker.exchange(headers(mode=FULL_DUPLEX), *pieces)
    assert set(choice(chosen)) == ENDPOINTS
    streamed = [one.request_body.response.body_mutation.streamed_response for one in passed]
    assert b"".join(one.body for one in streamed) == BODY
    assert [one.end_of_stream for one in streamed] == [False] * (len(streamed) - 1) + [True]


async def test_a_request_without_a_body_is_placed_at_once(picker: Asked) -> None:
    [chosen] = await picker.exchange(headers(end=True))
    assert set(choice(chosen)) == ENDPOINTS
    [unread] = await picker.exchange(headers(mode=0))
    assert set(choice(unread)) == ENDPOINTS


async def test_a_subset_is_kept_to(picker: Asked) -> None:
    _, chosen = await picker.exchange(headers(subset=["[::1]:7003", "10.0.0.1:1"]), body())
    assert choice(chosen) == ["[::1]:7003"]
    for nobody in ([], ["10.0.0.1:1"]):
        *_, refusal = await picker.exchange(headers(subset=nobody), body())
        assert refusal.immediate_response.status.code == 503


@pytest.mark.parametrize(
    ("content", "status"), [(b"{", 400), (b"[" * 5000, 400), (b"x" * (MAX_BODY + 1), 413), (b"[]", None)]
)
async def test_bodies_that_cannot_be_read(picker: Asked, content: bytes, status: int | None) -> None:
    *_, last = await picker.exchange(headers(), body(content))
    if status is None:
        assert set(choice(last)) == ENDPOINTS
    else:
        assert last.immediate_response.status.code == status


COMPRESSED: dict[str, Any] = {"content-encoding": "gzip"}


async def test_a_compressed_body_is_placed_unread(picker: Asked) -> None:
    """The servers say whether they take it."""
    _, chosen = await picker.exchange(headers(**COMPRESSED), body(b"\x1f\x8b\x08"))
    assert set(choice(chosen)) == ENDPOINTS


async def test_a_body_is_taken_up_to_the_servers_own_limit() -> None:
    """gRPC's is 4 MiB."""
    from stemma_router.routing.picker.serving import serving_picker

    silent = httpx.AsyncClient(transport=httpx.MockTransport(lambda request: httpx.Response(200)))
    served = ServedFleet(ServerList(SERVERS), "cache-aware", silent)
    limit = 20 * 2**20
    async with (
        served.serving(),
        serving_picker(served, PickerOptions("127.0.0.1:0"), limit, 2 * limit) as port,
    ):
        asked = Asked(port, served)
        content = orjson.dumps({"prompt": "x" * (limit - 100)})
        _, chosen = await asked.exchange(headers(), body(content))
        assert set(choice(chosen)) == ENDPOINTS
        *_, refusal = await asked.exchange(headers(), body(content + b" " * 200))
        assert refusal.immediate_response.status.code == 413
        await asked.close()


async def test_a_prompt_that_takes_long_to_read_asks_envoy_for_more_time(
    picker: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stemma_router.routing.picker.exchange.SOON_S", 0.01)
    ask = picker.served.ask

    async def slow(*args: Any) -> Any:
        await asyncio.sleep(0.2)
        return await ask(*args)

    monkeypatch.setattr(picker.served, "ask", slow)
    _, waits, chosen = await picker.exchange(headers(), body())
    assert waits.override_message_timeout.total_seconds() == 10
    assert set(choice(chosen)) == ENDPOINTS


async def test_odd_messages_end_in_answers(picker: Asked) -> None:
    """Whatever comes in whatever order, nothing is raised, and no load stays."""
    empty = ext_proc.ProcessingRequest()
    trailers = ext_proc.ProcessingRequest(request_trailers=ext_proc.HttpTrailers())
    for odd in (
        (body(),),
        (answered("200"),),
        (empty,),
        (trailers,),
        (headers(), answered("999"), answered("x")),
        (headers(), body(), body(), body()),
        (headers(end=True), headers(end=True)),
        (headers(), body(), answered("500"), answered("200")),
        (headers(mode=FULL_DUPLEX), trailers),
        (),
    ):
        for answer in await picker.exchange(*odd):
            assert isinstance(answer, ext_proc.ProcessingResponse)


async def test_how_requests_end_counts_for_servers(picker: Asked) -> None:
    fleet = picker.served.fleet
    for _ in range(3):
        _, chosen, _ = await picker.exchange(headers(), body(), answered("500"))
    sick = choice(chosen)[0]
    _, other = await picker.exchange(headers(), body())
    assert sick not in choice(other)
    assert sum(one.health.num_ejections for one in fleet.members) == 1
