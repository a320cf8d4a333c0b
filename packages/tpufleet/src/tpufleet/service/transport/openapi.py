"""The OpenAPI 3.1 document, generated from the routes and their types."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import msgspec

import tpufleet
from tpufleet.model.api_types import ErrorResponse
from tpufleet.model.values.encoding import to_json
from tpufleet.service.transport.routing import API_PREFIX, SLICE_TOKEN, MediaType, Route

_REF = "#/components/schemas/{name}"
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_ERRORS = {
    "400": "Invalid request",
    "401": "Missing or unknown token",
    "403": "Permission denied",
    "404": "Not found",
    "408": "The request body arrives too slowly",
    "409": "Conflict with the current state",
    "413": "Request body too large",
    "429": "Too many requests; retry after the number of seconds in Retry-After",
    "503": "The database does not respond, or the disk is full; retry after Retry-After seconds",
}


class OpenApiDocument:
    """Made when it is first asked for: that takes a tenth of a second."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = routes

    @functools.cached_property
    def content(self) -> bytes:
        return document(self._routes)


def document(routes: Sequence[Route]) -> bytes:
    typed = [kind for route in routes for kind in (route.body, route.response) if _is_model(kind)]
    wanted = list(dict.fromkeys([*typed, ErrorResponse]))
    schemas, components = msgspec.json.schema_components(wanted, ref_template=_REF)
    by_type = dict(zip(wanted, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operation = _operation(route, by_type)
        paths.setdefault(API_PREFIX + route.path, {})[route.method.lower()] = operation
    return to_json(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "tpufleet",
                "version": tpufleet.__version__,
                "description": tpufleet.__doc__,
            },
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {
                    "user": {"type": "http", "scheme": "bearer"},
                    "slice": {
                        "type": "http",
                        "scheme": "bearer",
                        "description": "The token that the agents of one slice share",
                    },
                },
            },
        }
    )


def _operation(route: Route, by_type: dict[Any, Any]) -> dict[str, Any]:
    scheme = "slice" if route.role == SLICE_TOKEN else "user"
    needs = "a slice token" if route.role == SLICE_TOKEN else f"the {route.role} role"
    operation: dict[str, Any] = {
        "operationId": route.operation_id,
        "summary": route.summary,
        "description": f"Requires {needs}.",
        "security": [{scheme: []}],
        "parameters": _parameters(route),
        "responses": {
            "200": {"description": "Success", **_content(route, by_type)},
            **{
                status: {
                    "description": description,
                    "content": {MediaType.JSON.value: {"schema": by_type[ErrorResponse]}},
                }
                for status, description in _ERRORS.items()
            },
        },
    }
    if route.body is bytes:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/octet-stream": {"schema": {}}},
        }
    elif route.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {MediaType.JSON.value: {"schema": by_type[route.body]}},
        }
    return operation


def _parameters(route: Route) -> list[dict[str, Any]]:
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PLACEHOLDER.findall(route.path)
    ]
    in_query = [
        {
            "name": param.name,
            "in": "query",
            "description": param.description,
            "schema": {"type": "integer" if param.number else "string"},
        }
        for param in route.params
    ]
    return in_path + in_query


def _content(route: Route, by_type: dict[Any, Any]) -> dict[str, Any]:
    if route.response is None and route.media_type is not MediaType.ARCHIVE:
        return {}
    schema = by_type.get(route.response)
    if schema is None:
        schema = {"type": "object"} if route.response is dict else {"type": "string"}
    return {"content": {route.media_type.value.partition(";")[0]: {"schema": schema}}}


def _is_model(kind: Any) -> bool:
    return kind not in (None, bytes, str, dict)
