"""The description of the HTTP interface (OpenAPI 3.1), made from the schemas that bodies are checked against."""

from __future__ import annotations

from typing import Any

from shardwise.serving.http.bodies import CHAT, COMPLETION, ERROR, REFUSALS
from shardwise.serving.http.schema import Schema


def description(version: str, guarded: tuple[str, ...] = ()) -> dict[str, Any]:
    """The whole description. guarded: beginnings of paths that need a key."""
    key = "/v1/" in guarded
    paths: dict[str, Any] = {
        "/v1/models": {"get": _reading("the served model", key)},
        "/v1/models/{model}": {"get": _reading("the served model, by its name", key, {"404": "no such model"})},
        "/v1/completions": {"post": _asking("continue prompts", COMPLETION, key)},
        "/v1/chat/completions": {"post": _asking("answer a conversation", CHAT, key)},
        "/health": {"get": _reading("whether requests are taken", False, {"503": REFUSALS["503"]})},
        "/metrics": {"get": _reading("counters, gauges and histograms", "/metrics" in guarded, kind="text/plain")},
        "/openapi.json": {"get": _reading("this description", False)},
    }
    paths["/v1/models/{model}"]["get"]["parameters"] = [
        {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    ]
    components: dict[str, Any] = {
        "schemas": {COMPLETION["title"]: COMPLETION, CHAT["title"]: CHAT, "Error": ERROR},
    }
    if key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "shardwise", "version": version, "description": "A part of OpenAI's interface."},
        "paths": paths,
        "components": components,
    }


def _reading(
    summary: str, guarded: bool, refusals: dict[str, str] | None = None, kind: str = "application/json"
) -> dict[str, Any]:
    return _operation(summary, guarded, {kind: {"schema": {}}}, refusals or {})


def _asking(summary: str, body: Schema, guarded: bool) -> dict[str, Any]:
    content = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {"type": "string"}}}
    schema = {"$ref": f"#/components/schemas/{body['title']}"}
    asked = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    return _operation(summary, guarded, content, REFUSALS) | asked


def _operation(summary: str, guarded: bool, content: dict[str, Any], refusals: dict[str, str]) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    if guarded:
        refusals = {"401": "the key is missing or wrong", **refusals}
    responses = {status: {"description": what, "content": error} for status, what in refusals.items()}
    return {
        "summary": summary,
        "responses": {"200": {"description": "the answer", "content": content}, **responses},
        **({"security": [{"key": []}]} if guarded else {}),
    }
