"""API keys: where they come from, who they let in, and what goes with them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path

import httpx
import pytest

from localllm.errors import LocalLLMError
from localllm.server import auth
from localllm.server.app import create_app
from localllm.server.auth import ANYBODY, CLASSES, KeyRing, Tenant, load_keys
from localllm.server.service import Service
from tests.server.fakes import FakeEngine

KEYS = """
[[key]]
name = "alice"
key = "alice's secret"
class = "interactive"
requests_per_minute = 2

[[key]]
name = "bob"
sha256 = "{digest}"
class = "nightly"
max_concurrent = 1

[classes]
nightly = 30
"""
HELLO = {"prompt": "Hello"}


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS.format(digest=sha256(b"bob's secret").hexdigest()), "utf-8")
    return path


@pytest.fixture
async def guarded(service: Service, key_file: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server that wants keys."""
    app = create_app(service, keys=load_keys(["plain"], key_file))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_key_file(key_file: Path) -> None:
    keys = load_keys(["plain"], key_file)
    assert keys.find(b"plain") == Tenant("key-1")
    assert keys.find(b"alice's secret") == Tenant("alice", "interactive", 0, 2, None)
    assert keys.find(b"bob's secret") == Tenant("bob", "nightly", 30, None, 1)
    for wrong in (b"", b"alice", b"alice's secret ", b"\xff", b"x" * 10_000):
        assert keys.find(wrong) is None


def test_every_known_key_is_compared(monkeypatch: pytest.MonkeyPatch, key_file: Path) -> None:
    """The first as the last: the time tells nothing about which one was right."""
    compared: list[bytes] = []

    def compare(known: bytes, digest: bytes) -> bool:
        compared.append(known)
        return known == digest

    monkeypatch.setattr(auth, "compare_digest", compare)
    keys = load_keys(["plain"], key_file)
    for key in (b"plain", b"bob's secret", b"nobody's"):
        compared.clear()
        keys.find(key)
        assert len(compared) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[key]", "not TOML"),
        ("", r"no \[\[key\]\] table"),
        ("[[key]]\nkey='x'", "key 1: name"),
        ("[[key]]\nname='a b'\nkey='x'", "key 1: name"),
        ("[[key]]\nname='a'", r"key 1 \(a\): give either key or sha256"),
        ("[[key]]\nname='a'\nkey='x'\nsha256='00'", "either"),
        ("[[key]]\nname='a'\nkey=''", "not empty"),
        ("[[key]]\nname='a'\nsha256='00'", "64 hexadecimal"),
        ("[[key]]\nname='a'\nkey='x'\nclass='vip'", "class must be one of interactive, default"),
        ("[[key]]\nname='a'\nkey='x'\nmax_concurrent=0", "max_concurrent must be"),
        ("[[key]]\nname='a'\nkey='x'\nrequests_per_minute=true", "requests_per_minute must be"),
        ("[[key]]\nname='a'\nkey='x'\nspeed=9", "unknown field 'speed'"),
        ("[other]\nx=1", "unknown table 'other'"),
        ("[[key]]\nname='a'\nkey='x'\n[classes]\nslow='very'", "priority of class 'slow'"),
        ("[[key]]\nname='a'\nkey='x'\n[[key]]\nname='a'\nkey='y'", "two keys have the name 'a'"),
    ],
)
def test_a_broken_key_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(LocalLLMError, match=message) as caught:
        load_keys(file=path)
    assert "\n" not in str(caught.value)


def test_other_bad_keys(tmp_path: Path) -> None:
    with pytest.raises(LocalLLMError, match="No such file"):
        load_keys(file=tmp_path / "missing")
    with pytest.raises(LocalLLMError, match="empty"):
        load_keys([" "])
    with pytest.raises(LocalLLMError, match="twice"):
        load_keys(["x", "x"])
    assert not KeyRing()
    assert not load_keys()
    assert CLASSES[ANYBODY.traffic_class] == ANYBODY.priority


@pytest.mark.anyio
@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("wrong"),
        bearer(""),
        {"authorization": "Basic plain"},
        {"authorization": "plain"},
        {"x-api-key": "Plain"},
        {"x-api-key": "plain\xff"},
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/openapi.json", "/nowhere"])
async def test_who_has_no_key_learns_nothing(
    guarded: httpx.AsyncClient, path: str, headers: dict[str, str]
) -> None:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    answer = await guarded.get(path, headers=raw)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["x-request-id"]


@pytest.mark.anyio
async def test_keys_open(guarded: httpx.AsyncClient, engine: FakeEngine) -> None:
    for headers in (bearer("plain"), {"authorization": "bearer plain"}, {"x-api-key": "plain"}):
        assert (await guarded.get("/v1/models", headers=headers)).status_code == 200
    for path in ("/health", "/"):
        assert (await guarded.get(path)).status_code == 200
    for key, salt, priority in (("plain", "key-1", 10), ("bob's secret", "bob", 30)):
        answer = await guarded.post("/v1/completions", json=HELLO, headers=bearer(key))
        assert answer.status_code == 200
        assert engine.submitted[-1].cache_salt.startswith(f"{salt}\n")
        assert engine.submitted[-1].priority == priority


@pytest.mark.anyio
async def test_requests_per_minute(guarded: httpx.AsyncClient, engine: FakeEngine) -> None:
    headers = bearer("alice's secret")
    answers = [await guarded.post("/v1/completions", json=HELLO, headers=headers) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[2].json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(answers[2].headers["retry-after"]) <= 30
    assert len(engine.submitted) == 2
    assert (await guarded.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.anyio
async def test_keys_stand_in_no_log(
    guarded: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "localllm")
    await guarded.post("/v1/completions", json=HELLO, headers=bearer("alice's secret"))
    await guarded.post("/v1/completions", json=HELLO, headers=bearer("wrong secret"))
    assert "/v1/completions: 401" in caplog.text
    assert "secret" not in caplog.text
