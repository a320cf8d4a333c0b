"""Calls of the REST API: the method that a verb and a path mean."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tpufleet_testbed.compute_engine.api_errors import invalid_field, required

Body = dict[str, Any]

_PATH = re.compile(
    r"compute/v1/projects/(?P<project>[^/]+)"
    r"(?:/(?P<scope>global|aggregated|(?:zones|regions)/[^/]+(?=/)))?"
    r"(?:/(?P<kind>\w+)(?:/(?P<name>[^/]+)(?:/(?P<verb>[^/]+)(?:/(?P<rest>.+))?)?)?)?"
)


@dataclass(slots=True)
class Call:
    method: str  # instances.insert
    project: str
    scope: str  # global, zones/Z, regions/R, aggregated or empty
    kind: str
    name: str
    rest: str
    query: Mapping[str, str]
    body: Body

    @property
    def place(self) -> str:
        """The zone or region."""
        return self.scope.partition("/")[2]

    def target(self, name: str = "") -> str:
        """The resource, or another of its kind and scope, as errors name it."""
        return f"projects/{self.project}/{self.scope}/{self.kind}/{name or self.name}".rstrip("/")

    def number(self, name: str) -> int:
        text = self.query.get(name, "")
        if not text.isdecimal():
            raise invalid_field(name, text) if text else required(name)
        return int(text)


def parse_call(http: str, path: str, query: Mapping[str, str], body: Body) -> Call | None:
    """None: not a path of this API."""
    match = _PATH.fullmatch(path)
    if match is None:
        return None
    scope, kind, name = match["scope"] or "", match["kind"] or "", match["name"] or ""
    verb, rest = match["verb"] or "", match["rest"] or ""
    if not kind and scope == "":
        method = "projects.get"
    elif not scope and kind in ("zones", "regions"):
        method = f"{kind}.{'get' if name else 'list'}"
    elif kind == "images" and name == "family":
        name, method = verb, "images.getFromFamily"
    elif scope == "aggregated":
        method = f"{kind}.aggregatedList"
    elif kind == "instances" and name == "bulkInsert":
        method = "instances.bulkInsert"
    elif verb:
        method = f"{kind}.{verb}"
    elif name:
        verbs = {"GET": "get", "DELETE": "delete"}
        method = f"{kind}.{verbs.get(http, 'patch')}"
    else:
        method = f"{kind}.{'insert' if http == 'POST' else 'list'}"
    return Call(
        method=method, project=match["project"], scope=scope, kind=kind, name=name, rest=rest,
        query=query, body=body,
    )  # fmt: skip
