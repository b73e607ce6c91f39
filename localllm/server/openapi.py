"""/openapi.json, as the server really behaves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI

_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_REQUEST_ID = {
    "x-request-id": {
        "description": "Stands in the server's log too; the client's own where it sent one",
        "schema": {"type": "string"},
    }
}
_OPEN = frozenset({"/health"})


def describe_truly(app: FastAPI, *, with_keys: bool) -> None:
    """Makes `app.openapi` say what FastAPI does not know: a wrong body is 400 here and never 422,
    every answer has a request id, and keys are wanted where they are."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        schema = generate()
        for path, operation in _operations(schema):
            operation["responses"].pop("422", None)
            for response in operation["responses"].values():
                response["headers"] = _REQUEST_ID
            if with_keys and path not in _OPEN:
                operation["security"] = [{name: []} for name in _SCHEMES]
        components = schema["components"]
        for name in ("HTTPValidationError", "ValidationError"):
            components["schemas"].pop(name, None)
        if with_keys:
            components["securitySchemes"] = _SCHEMES
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


def _operations(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in schema["paths"].items():
        for operation in methods.values():
            yield path, operation
