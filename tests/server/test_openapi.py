"""The schema at /openapi.json is true: whatever it allows and forbids is tried on a real server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from localllm.server.app import create_app
from localllm.server.auth import load_keys
from localllm.server.service import Service
from tests.helpers import FIXTURES
from tests.server.real import real_server

TINY = FIXTURES / "architectures" / "llama-format-q4_1.gguf"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
)
EXAMPLES = os.environ.get("LOCALLLM_SCHEMATHESIS_EXAMPLES", "15")


def test_schemathesis_finds_nothing(tmp_path: Path) -> None:
    pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    with real_server(TINY, "--backend", "reference", "--ctx-size", "64") as server:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"),
                *("--phases", "coverage,fuzzing", "--max-examples", EXAMPLES),
                *("--checks", ",".join(CHECKS), "--seed", "1", "--no-color"),
                # that random grammars are mostly no grammars is no fault of the schema
                *("--warnings", "missing_auth,missing_test_data,unsupported_regex"),
                *("--request-timeout", "60", "--suppress-health-check", "all"),
            ],
            cwd=tmp_path,  # where it keeps a database
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert server.health()["status"] == "ok"
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr
    assert "No issues found" in done.stdout
    assert "Traceback" not in "".join(server.log)


def operations(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(path, op) for path, methods in schema["paths"].items() for op in methods.values()]


@pytest.mark.anyio
async def test_what_every_operation_says(app: FastAPI) -> None:
    schema = app.openapi()
    assert len(operations(schema)) >= 10
    for path, operation in operations(schema):
        responses = operation["responses"]
        assert "422" not in responses, path
        assert all("x-request-id" in response["headers"] for response in responses.values())
        assert "security" not in operation
    assert "HTTPValidationError" not in schema["components"]["schemas"]
    chat = schema["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert {"200", "400", "413", "429", "503", "504"} <= chat.keys()
    assert chat["200"]["content"].keys() == {"application/json", "text/event-stream"}


@pytest.mark.anyio
async def test_keys_are_wanted_where_they_are(service: Service) -> None:
    app = create_app(service, keys=load_keys(["secret"]))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.get("/openapi.json", headers={"x-api-key": "secret"})
    schema = answer.raise_for_status().json()
    assert schema["components"]["securitySchemes"].keys() == {"bearer", "x-api-key"}
    wanted = {path: "security" in operation for path, operation in operations(schema)}
    assert not wanted.pop("/health")
    assert all(wanted.values())
