"""The proxy before prefill and decode servers, over upstream servers that do as they are told."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
import uvicorn
from packages.router.tests.upstream import BINARY, Upstream

from stemma.errors import ConfigError
from stemma_router.cluster.fleet import Fleet
from stemma_router.cluster.routers import Rendezvous, RoutedRequest
from stemma_router.routing.asking import number_of
from stemma_router.routing.prompts import head_of, one_token_body
from stemma_router.routing.relay import RouteOptions
from stemma_router.routing.route import create_route_app

REQUEST = {"prompt": "x", "max_tokens": 9, "temperature": 0, "n": 2}


@pytest.fixture
def servers() -> Iterator[dict[str, Upstream]]:
    """Two of each kind; `p0` and `d0` are those that come first for `REQUEST`."""
    made: dict[str, Upstream] = {}
    for kind in "pd":
        pair = {one.url: one for one in (Upstream(""), Upstream(""))}
        fleet = Fleet(Rendezvous(), pair)
        ask = RoutedRequest((), 1, 1, number_of(head_of(REQUEST)))
        for number, member in enumerate(fleet.order(ask)):
            pair[member.url].name = f"{kind}{number}"
            made[f"{kind}{number}"] = pair[member.url]
    yield made
    for server in made.values():
        server.stop()


@pytest.fixture
async def proxy(servers: dict[str, Upstream]) -> AsyncIterator[httpx.AsyncClient]:
    app = create_route_app(
        [servers["p0"].url, servers["p1"].url + "/"],
        [servers["d0"].url, servers["d1"].url],
        options=RouteOptions(max_body_bytes=100_000, admin_key="s3cret"),
    )
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        client.headers["authorization"] = "Bearer s3cret"
        yield client


async def test_a_request_is_prefilled_on_one_server_and_decoded_on_another(
    servers: dict[str, Upstream], proxy: httpx.AsyncClient
) -> None:
    answer = await proxy.post("/v1/completions", json=REQUEST, headers={"authorization": "Bearer k"})
    assert answer.json() == {"served_by": "d0"}
    assert servers["p0"].bodies == [
        {"prompt": "x", "max_tokens": 1, "temperature": 0, "n": 1, "stream": False}
    ]
    assert servers["d0"].bodies == [REQUEST]
    assert (
        servers["p0"].headers[0]["authorization"] == servers["d0"].headers[0]["authorization"] == "Bearer k"
    )
    assert (await proxy.post("/v1/completions", json=REQUEST)).json() == {"served_by": "d0"}
    assert len(servers["p0"].bodies) == 2


@pytest.mark.parametrize("streams", [False, True])
async def test_prefill_servers_that_make_prompts_slower_are_left_within_ten_requests(
    servers: dict[str, Upstream], proxy: httpx.AsyncClient, streams: bool
) -> None:
    for name in ("p0", "p1"):
        servers[name].pause_s = 0.3
    for _ in range(14):
        assert (await proxy.post("/v1/completions", json=REQUEST | {"stream": streams})).status_code == 200
    assert len(servers["p0"].bodies) + len(servers["p1"].bodies) <= 10
    assert (await proxy.get("/health")).json()["num_alone"] >= 4


async def test_conversations_stay_where_they_are_and_spread(
    servers: dict[str, Upstream], proxy: httpx.AsyncClient
) -> None:
    opening = "You are a helpful assistant of customer {}. " + "Be brief. " * 200
    for customer in range(20):
        where = set()
        for turn in range(3):
            body = {"prompt": opening.format(customer) + "And then? " * turn}
            where.add((await proxy.post("/v1/completions", json=body)).json()["served_by"])
        assert len(where) == 1
    for server in servers.values():
        assert 6 <= len(server.bodies) <= 54


async def test_a_stream_counts_until_its_end(servers: dict[str, Upstream], proxy: httpx.AsyncClient) -> None:
    for break_after in (None, 1):
        servers["d0"].break_after = break_after
        await proxy.post("/v1/completions", json=REQUEST | {"stream": True})
    under_way = (await proxy.get("/health")).json()["under_way"]
    assert under_way == {server.url: 0 for server in servers.values()}


async def test_a_stream_passes_through(servers: dict[str, Upstream], proxy: httpx.AsyncClient) -> None:
    answer = await proxy.post("/v1/completions", json=REQUEST | {"stream": True})
    assert answer.text == "data: d0 0\n\ndata: d0 1\n\ndata: d0 2\n\n"
    assert answer.headers["content-type"].startswith("text/event-stream")


async def test_without_prefill_servers_the_decode_server_does_it_all(
    servers: dict[str, Upstream], proxy: httpx.AsyncClient
) -> None:
    servers["p0"].stop()
    servers["p1"].status = 503
    assert (await proxy.post("/v1/completions", json=REQUEST)).json() == {"served_by": "d0"}
    failures = (await proxy.get("/health")).json()["num_prefill_failures"]
    assert failures in (1, 2)  # a server that checks found to be down isn't asked


@pytest.mark.parametrize("stream", [False, True])
async def test_a_decode_server_that_dies_before_its_first_byte_is_replaced(
    servers: dict[str, Upstream], proxy: httpx.AsyncClient, stream: bool
) -> None:
    servers["d0"].break_after = 0
    answer = await proxy.post("/v1/completions", json=REQUEST | {"stream": stream})
    assert answer.status_code == 200
    assert "d1" in answer.text


async def test_a_whole_answer_that_breaks_off_is_computed_elsewhere(
    servers: dict[str, Upstream], proxy: httpx.AsyncClient
) -> None:
    servers["d0"].break_after = 1
    assert (await proxy.post("/v1/completions", json=REQUEST)).json() == {"served_by": "d1"}


async def test_a_stream_that_breaks_off_ends_with_an_error(
    servers: dict[str, Upstream], proxy: httpx.AsyncClient
) -> None:
    servers["d0"].break_after = 2
    answer = await proxy.post("/v1/completions", json=REQUEST | {"stream": True})
    events = [line for line in answer.text.splitlines() if line]
    assert events[:2] == ["data: d0 0", "data: d0 1"]
    assert json.loads(events[2].removeprefix("data: "))["error"]["code"] == "stream_broken"
    assert len(events) == 3
    assert (await proxy.get("/health")).json()["num_broken_streams"] == 1


async def test_prefill_servers_answer_if_no_decode_server_does(
    servers: dict[str, Upstream], proxy: httpx.AsyncClient
) -> None:
    servers["d0"].stop()
    servers["d1"].stop()
    assert (await proxy.post("/v1/completions", json=REQUEST)).json() == {"served_by": "p0"}
    health = (await proxy.get("/health")).json()
    assert (health["num_fallbacks"], health["num_decode_failures"]) == (1, 2)


async def test_nobody_answers(servers: dict[str, Upstream], proxy: httpx.AsyncClient) -> None:
    for server in servers.values():
        server.stop()
    answer = await proxy.post("/v1/completions", json=REQUEST)
    assert answer.status_code == 503
    assert "no server answers" in answer.json()["error"]["message"]
    async with asyncio.timeout(10):
        while (await proxy.get("/health")).status_code != 503:  # until checks have found it
            await asyncio.sleep(0.05)
    assert (await proxy.get("/v1/models")).status_code == 503


async def test_errors_of_a_request_come_from_the_decode_server(
    servers: dict[str, Upstream], proxy: httpx.AsyncClient
) -> None:
    for server in servers.values():
        server.status = 400
    assert (await proxy.post("/v1/completions", json=REQUEST)).status_code == 400
    broken = await proxy.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert broken.status_code >= 400


async def test_other_paths_go_to_a_decode_server(
    servers: dict[str, Upstream], proxy: httpx.AsyncClient
) -> None:
    answer = await proxy.get("/v1/models?x=1")
    assert answer.json() == {"served_by": "d0", "query": "x=1"}


def test_bodies_for_prefill() -> None:
    chat = {
        "messages": [],
        "max_completion_tokens": 50,
        "stream": True,
        "stream_options": {},
        "logprobs": True,
    }
    assert one_token_body("/v1/chat/completions", chat) == {
        "messages": [],
        "max_completion_tokens": 1,
        "n": 1,
        "stream": False,
    }
    tgi = {"inputs": "x", "parameters": {"max_new_tokens": 20, "details": True, "seed": 1}, "stream": True}
    assert one_token_body("/generate", tgi) == {
        "inputs": "x",
        "parameters": {"max_new_tokens": 1, "seed": 1},
        "stream": False,
    }
    conversation = {"input": "x", "max_output_tokens": 90, "stream": True}
    stored = {"input": "x", "max_output_tokens": 1, "stream": False, "store": False}
    assert one_token_body("/v1/responses", conversation) == stored
    anthropic = {"messages": [], "system": "s", "max_tokens": 9}
    assert one_token_body("/v1/messages", anthropic) == {**anthropic, "max_tokens": 1, "stream": False}
    triton = {"text_input": "x", "parameters": {"max_new_tokens": 9}}
    assert one_token_body("/v2/models/m/generate", triton) == {
        **triton,
        "parameters": {"max_new_tokens": 1},
        "stream": False,
    }


async def test_binary_tensors_are_not_read_and_go_to_a_decode_server(
    servers: dict[str, Upstream], proxy: httpx.AsyncClient
) -> None:
    """Their JSON ends where a header says; the prompt behind it is for the server to read."""
    headers = {BINARY: "2", "content-type": "application/octet-stream"}
    answer = await proxy.post("/v2/models/m/infer", content=b"{}\x00\x01", headers=headers)
    assert answer.json()["served_by"] in ("d0", "d1")
    assert (servers["p0"].bodies, servers["p1"].bodies) == ([], [])


def test_both_kinds_of_servers_are_needed() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        create_route_app([], ["http://x"])


async def test_a_prefill_server_that_dies_while_it_computes_is_replaced(
    servers: dict[str, Upstream], proxy: httpx.AsyncClient
) -> None:
    servers["p0"].break_after = 0
    assert (await proxy.post("/v1/completions", json=REQUEST)).json() == {"served_by": "d0"}
    assert len(servers["p0"].bodies) == len(servers["p1"].bodies) == 1
    assert (await proxy.get("/health")).json()["num_prefill_failures"] == 1


@pytest.mark.parametrize(("path", "prefill_path"), [("/generate_stream", "/generate"), ("/", "/")])
async def test_tgi_streams_are_prefilled_and_pass_as_streams(
    servers: dict[str, Upstream], proxy: httpx.AsyncClient, path: str, prefill_path: str
) -> None:
    answer = await proxy.post(path, json={"inputs": "x", "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.count("data: ") == 3
    [prefill] = [one for name, one in servers.items() if name.startswith("p") and one.bodies]
    assert prefill.paths == [prefill_path]
    assert prefill.bodies[0]["parameters"] == {"max_new_tokens": 1}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("parameters", [[1], "x", 5])
async def test_parameters_that_are_no_object(proxy: httpx.AsyncClient, parameters: object) -> None:
    answer = await proxy.post("/generate", json={"inputs": "x", "parameters": parameters})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "parameters")


async def test_bodies_are_bounded(servers: dict[str, Upstream], proxy: httpx.AsyncClient) -> None:
    assert (await proxy.post("/v1/completions", json={"prompt": "x" * 200_000})).status_code == 413
    assert (await proxy.post("/v1/other", json={"prompt": "x" * 200_000})).status_code == 413
    assert (await proxy.post("/v1/completions", content=b"[" * 90_000)).status_code == 400
    assert not any(server.bodies for server in servers.values())


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "path",
    [
        "/admin/stats",
        "/ADMIN/cache/tree",
        "/..%2f..%2fadmin/stats",
        "/v1/%2e%2e/admin/stats",
        "/v1/..%5cadmin",
        "/%2561dmin/stats",
        "//admin/stats",
        "/v1//models",
        "/stopService",
        "/v1/%00",
    ],
)
async def test_paths_of_operators_are_not_passed_on(
    servers: dict[str, Upstream], proxy: httpx.AsyncClient, path: str
) -> None:
    raw = httpx.URL("http://localhost").copy_with(raw_path=path.encode())
    for method in ("GET", "POST"):
        assert (await proxy.request(method, raw)).status_code == 400


@pytest.mark.parametrize("hanging", ["p0", "d0"])
async def test_a_client_that_leaves_ends_the_work(servers: dict[str, Upstream], hanging: str) -> None:
    """Over sockets: the proxy closes its own connection, so the server behind notices."""
    servers[hanging].hangs = True
    prefills, decodes = ([servers[f"{kind}{n}"].url for n in range(2)] for kind in "pd")
    app = create_route_app(prefills, decodes)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.TimeoutException):
            await client.post(f"http://127.0.0.1:{port}/v1/completions", json=REQUEST, timeout=1.0)
    for _ in range(500):
        if servers[hanging].num_left:
            break
        await asyncio.sleep(0.01)
    assert servers[hanging].num_left == 1
    server.should_exit = True
    thread.join(5)


async def test_health_shows_servers_to_who_has_the_key(
    servers: dict[str, Upstream], proxy: httpx.AsyncClient
) -> None:
    assert servers["p0"].url in (await proxy.get("/health")).text
    without = await proxy.get("/health", headers={"authorization": "Bearer wrong"})
    assert without.json() == {"status": "ok"}


async def test_pages_of_other_sites_are_refused(
    servers: dict[str, Upstream], proxy: httpx.AsyncClient
) -> None:
    del proxy.headers["authorization"]
    for headers in ({"origin": "http://evil.example"}, {"host": "evil.example"}):
        assert (await proxy.post("/v1/completions", json=REQUEST, headers=headers)).status_code == 403
    as_form = {"content-type": "text/plain"}
    assert (await proxy.post("/v1/completions", content=b"{}", headers=as_form)).status_code == 415
    assert (await proxy.post("/v1/completions", json=REQUEST)).status_code == 200


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["x", "y"]}),
        ("/rerank", {"query": "x", "documents": ["y"]}),
        ("/score", {"text_1": "x", "text_2": "y"}),
    ],
)
async def test_what_decodes_nothing_goes_to_a_prefill_server_alone(
    path: str, body: dict[str, object], servers: dict[str, Upstream], proxy: httpx.AsyncClient
) -> None:
    first = (await proxy.post(path, json=body)).json()["served_by"]
    assert first.startswith("p")
    assert (await proxy.post(path, json=body | {"user": "other"})).json()["served_by"] == first
    assert [server.bodies for name, server in servers.items() if name != first] == [[], [], []]
    for name in ("p0", "p1"):
        servers[name].stop()
    assert (await proxy.post(path, json=body)).json()["served_by"].startswith("d")
