"""Host names, origins and exposure: who can reach a server on a desktop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx
import pytest

from localllm.config import HttpConfig
from localllm.errors import LocalLLMError
from localllm.server.app import create_app
from localllm.server.listen import bind, check_exposure
from localllm.server.service import Service

pytestmark = pytest.mark.anyio

PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type, x-stainless-os",
}
HELLO = {"prompt": "Hello"}


@asynccontextmanager
async def client_of(
    service: Service, *, origins: Sequence[str] = (), hosts: Sequence[str] = (), host: str = "::1"
) -> AsyncIterator[httpx.AsyncClient]:
    config = HttpConfig(host=host, cors_origins=tuple(origins), allowed_hosts=tuple(hosts))
    transport = httpx.ASGITransport(create_app(service, config))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


async def preflight(client: httpx.AsyncClient, origin: str, **more: str) -> httpx.Response:
    headers = {**PREFLIGHT, "origin": origin, **more}
    return await client.options("/v1/chat/completions", headers=headers)


LOCAL = ["http://localhost", "http://localhost:3000", "http://127.0.0.1:5173", "http://[::1]:80"]
FOREIGN = [
    *("https://evil.example", "http://localhost.evil.example", "http://127.0.0.1.evil.example"),
    *("null", "file://", "http://192.168.1.2", "chrome-extension://abc", "http://evil@localhost"),
    *("http://localhost:x", "http://localhost/path?x", "https://[", ""),
]


@pytest.mark.parametrize("origin", LOCAL)
async def test_fault_30_cors_is_open_to_pages_of_this_machine(
    service: Service, origin: str
) -> None:
    async with client_of(service) as client:
        asked = await preflight(client, origin)
        answer = await client.post("/v1/completions", json=HELLO, headers={"origin": origin})
    assert asked.status_code == 204
    assert asked.headers["access-control-allow-origin"] == origin
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert "x-stainless-os" in asked.headers["access-control-allow-headers"]
    assert "Origin" in asked.headers["vary"]
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == origin
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert "Origin" in answer.headers["vary"]


@pytest.mark.parametrize("origin", FOREIGN)
async def test_fault_30_cors_is_closed_beyond_it(service: Service, origin: str) -> None:
    async with client_of(service) as client:
        asked = await preflight(client, origin)
        answer = await client.get("/v1/models", headers={"origin": origin})
    assert asked.status_code == 403
    assert asked.json()["error"]["code"] == "origin_not_allowed"
    for response in (asked, answer):
        assert not [name for name in response.headers if name.startswith("access-control")]
        assert "Origin" in response.headers["vary"]


async def test_fault_30_cors_opens_to_named_origins(service: Service) -> None:
    origin = "https://chat.example"
    async with client_of(service, origins=[f"{origin}/"]) as client:
        assert (await preflight(client, origin)).status_code == 204
        assert (await preflight(client, "https://chat.example.org")).status_code == 403
    async with client_of(service, origins=["*"]) as client:
        assert (await preflight(client, origin)).headers["access-control-allow-origin"] == origin
        refused = await client.post("/v1/completions", json={}, headers={"origin": origin})
        assert refused.status_code == 400  # and the page can read why
        assert refused.headers["access-control-allow-origin"] == origin


async def test_a_page_may_reach_into_the_private_network_when_it_may_at_all(
    service: Service,
) -> None:
    asks = {"access-control-request-private-network": "true"}
    async with client_of(service, origins=["https://chat.example"]) as client:
        allowed = await preflight(client, "https://chat.example", **asks)
        refused = await preflight(client, "https://evil.example", **asks)
    assert allowed.headers["access-control-allow-private-network"] == "true"
    assert "access-control-allow-private-network" not in refused.headers


async def test_options_without_a_preflight_is_no_method_of_ours(service: Service) -> None:
    async with client_of(service) as client:
        assert (await client.options("/v1/models")).status_code == 405


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:8080", "127.0.0.1:80", "127.1.2.3", "[::1]:8080", "a.localhost"],
)
async def test_names_of_this_machine(service: Service, host: str) -> None:
    async with client_of(service) as client:
        assert (await client.get("/v1/models", headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8080", "localhost.evil.example", "0.0.0.0", "192.168.1.2"),
        *("127.0.0.1.evil.example", "localhost:x", "localhost@evil.example", "[::1", "a b", ""),
    ],
)
async def test_a_name_from_elsewhere_is_dns_rebinding(service: Service, host: str) -> None:
    async with client_of(service) as client:
        for path in ("/", "/health", "/v1/models"):
            answer = await client.get(path, headers={"host": host})
            assert answer.status_code == 403
            assert answer.json()["error"]["code"] == "host_not_allowed"


async def test_names_that_are_let_in(service: Service) -> None:
    host = {"host": "Box.Example:8080"}
    async with client_of(service, hosts=["box.example"]) as client:
        assert (await client.get("/health", headers=host)).status_code == 200
    async with client_of(service, hosts=["*"]) as client:
        assert (await client.get("/health", headers=host)).status_code == 200
    async with client_of(service, host="0.0.0.0") as client:  # reached by whatever name
        assert (await client.get("/health", headers=host)).status_code == 200


def test_no_listening_beyond_this_machine_without_a_key() -> None:
    with bind("0.0.0.0", 0) as listener:
        with pytest.raises(LocalLLMError, match=r"LOCALLLM_API_KEY.*--insecure"):
            check_exposure(listener, has_keys=False, insecure=False)
        check_exposure(listener, has_keys=True, insecure=False)
        check_exposure(listener, has_keys=False, insecure=True)
    with bind("localhost", 0) as listener:
        check_exposure(listener, has_keys=False, insecure=False)
