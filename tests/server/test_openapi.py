"""The OpenAPI document is served, and true to the bodies."""

from __future__ import annotations

import httpx

from stemma.server.schemas.bounds import MAX_SALT_CHARS, MAX_STOPS

WITHOUT_BODY = ("/admin/cache/flush", "/v1/batches/{batch_id}/cancel")


async def test_the_document_names_every_body(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    for path, methods in document["paths"].items():
        operation = methods.get("post")
        if operation is not None and path not in WITHOUT_BODY:
            assert operation["requestBody"]["content"], path
    chat = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert chat["schema"] == {"$ref": "#/components/schemas/ChatRequest"}
    fields = schemas["ChatRequest"]["properties"]
    assert fields["cache_salt"]["anyOf"][0]["maxLength"] == MAX_SALT_CHARS
    assert fields["stop"]["anyOf"][1]["maxItems"] == MAX_STOPS
    for name in ("Message", "StreamOptions", "TGIParameters", "VLLMGenerateRequest", "PrefixRequest"):
        assert name in schemas


async def test_every_reference_leads_somewhere(client: httpx.AsyncClient) -> None:
    response = await client.get("/openapi.json")
    schemas = response.json()["components"]["schemas"]
    for reference in set(response.text.split('"$ref":"')[1:]):
        assert reference.split('"')[0].removeprefix("#/components/schemas/") in schemas
