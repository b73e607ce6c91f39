"""A service over a fake engine, with the real tokenizer of GPT-2 and ChatML."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest
from fastapi import FastAPI

from localllm.config import HttpConfig
from localllm.server.app import create_app
from localllm.server.served_model import ServedModel, load_served_model
from localllm.server.service import Service
from tests.helpers import tokenizer_cases
from tests.server.fakes import MAX_BODY_BYTES, FakeEngine


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def gpt2() -> ServedModel:
    (case,) = tokenizer_cases("gpt-2")
    return replace(load_served_model(case.gguf), id="gpt2", created=1)


@pytest.fixture
def engine(gpt2: ServedModel) -> FakeEngine:
    return FakeEngine(gpt2.tokenizer, "Grüße! 日本語 and 👩‍👩‍👧 too.")


@pytest.fixture
async def service(engine: FakeEngine, gpt2: ServedModel) -> AsyncIterator[Service]:
    service = Service(engine, lambda: gpt2)
    await service.load()
    yield service
    await service.close()


@pytest.fixture
def app(service: Service) -> FastAPI:
    return create_app(service, HttpConfig(max_body_size=MAX_BODY_BYTES))


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client
