"""Random requests made from the OpenAPI document: no response is a server error, and each matches
what the document promises.

500 cases by default; `./test -m scale PATH` sends 20,000.
"""

from __future__ import annotations

import collections
import json
import random
import re
from typing import Any
from urllib.parse import quote

import httpx
import jsonschema
import pytest

from tests.service.harness import ServiceHarness
from tests.service.test_fuzz import NASTY, TEXTS
from tpufleet.stores.base import ChangeSet
from tpufleet.stores.memory import MemoryStore
from tpufleet.stores.open_store import open_store

IDS = ["job-1", "job-2", "s1", "s1/0", "ada", "mel", "mel-1", "lab", "wandb", "0" * 64, "job-1.0"]
STREAMS = {"stream_events", "stream_logs"}
MAX_DEPTH = 6


class CaseGenerator:
    """Requests that are mostly valid, so that they get past the first check."""

    def __init__(self, document: dict[str, Any], seed: int) -> None:
        self.document = document
        self.random = random.Random(seed)
        self.operations = [
            (method, path, operation)
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
        ]

    def request(self) -> tuple[str, str, dict[str, Any], dict[str, Any]]:
        """Method, path, options for httpx, and the operation."""
        method, path, operation = self.random.choice(self.operations)
        params: dict[str, str] = {}
        for parameter in operation["parameters"]:
            value = self._text(parameter["schema"])
            if parameter["in"] == "path":
                path = path.replace(f"{{{parameter['name']}}}", quote(value, safe="") or "x")
            elif self._chance(0.4):
                params[parameter["name"]] = value
        options: dict[str, Any] = {"params": params}
        if "requestBody" in operation:
            content = operation["requestBody"]["content"]
            schema = content.get("application/json", {}).get("schema")
            body = self.random.randbytes(50) if schema is None else self._body(schema)
            options["content"] = body
        if self._chance(0.1):
            header = self.random.choice(
                ["Last-Event-ID", "Content-Type", "X-Tpufleet-Host", "Range"]
            )
            value = self._any_text().encode("utf-8", "replace")[:200]
            options["headers"] = {header: re.sub(rb"[\r\n\0]", b"", value).strip()}
        return method.upper(), path, options, operation

    def _body(self, schema: dict[str, Any]) -> bytes:
        data = json.dumps(self._value(schema)).encode()
        if self._chance(0.05) and data:
            at = self.random.randrange(len(data))
            data = data[:at] + self.random.randbytes(1) + data[at + 1 :]
        return data

    def _value(self, schema: dict[str, Any], depth: int = 0) -> Any:
        if self._chance(0.06):
            return self.random.choice(NASTY)
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            return self._value(self.document["components"]["schemas"][name], depth + 1)
        if "anyOf" in schema:
            return self._value(self.random.choice(schema["anyOf"]), depth + 1)
        if "enum" in schema:
            return self.random.choice(schema["enum"])
        kinds = {
            "object": self._object, "array": self._array, "integer": self._integer,
            "number": lambda schema, depth: self.random.uniform(-10, 1e6),
            "boolean": lambda schema, depth: self._chance(0.5),
            "null": lambda schema, depth: None,
            "string": lambda schema, depth: self._string(schema),
        }  # fmt: skip
        make = kinds.get(str(schema.get("type")))
        return make(schema, depth) if make is not None else self.random.choice(NASTY)

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        required = schema.get("required", ())
        made = {
            name: self._value(inner, depth + 1)
            for name, inner in schema.get("properties", {}).items()
            if name in required or (depth < MAX_DEPTH and self._chance(0.6))
        }
        extra = schema.get("additionalProperties")
        if isinstance(extra, dict) and depth < MAX_DEPTH:
            made |= {
                self._any_text(): self._value(extra, depth + 1)
                for _ in range(self.random.randrange(3))
            }
        return made

    def _array(self, schema: dict[str, Any], depth: int) -> list[Any]:
        if depth >= MAX_DEPTH:
            return []
        inner = schema.get("items") or {}
        return [self._value(inner, depth + 1) for _ in range(self.random.randrange(4))]

    def _integer(self, schema: dict[str, Any], depth: int) -> int:
        return self.random.choice([0, 1, 2, 7, 100, self.random.randrange(-5, 10_000)])

    def _string(self, schema: dict[str, Any]) -> str:
        samples = {
            "date-time": ["2026-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "1970-01-01T00:00:00Z"],
            "duration": ["PT1S", "P1D", "PT0S", "P999999999D", "-PT5S"],
        }
        known = samples.get(str(schema.get("format")))
        return self.random.choice(known) if known else self._any_text()

    def _text(self, schema: dict[str, Any]) -> str:
        if schema.get("type") == "integer" and self._chance(0.7):
            return str(self.random.choice([0, 1, 2, 50, 10_000]))
        return self._any_text().encode("utf-8", "replace").decode()

    def _any_text(self) -> str:
        return self.random.choice(IDS) if self._chance(0.7) else self.random.choice(TEXTS)

    def _chance(self, share: float) -> bool:
        return self.random.random() < share


def fill(service: ServiceHarness) -> None:
    """So that the ids in the requests exist. Deleted users and jobs come back."""
    for job in ("job-1", "job-2"):
        service.submit(job, by="mel")
    service.end_job("job-1")
    service.add_slice("s1", "job-2")
    service.add_attempt("job-2", 0, "s1")


def send(service: ServiceHarness, count: int, seed: int) -> collections.Counter[str]:
    """Returns how many responses there were of each status."""
    with service.http(service.tokens["ada"]) as http:
        document = http.get("/openapi.json").json()
    generator = CaseGenerator(document, seed)
    schemas = {"components": document["components"]}
    statuses: collections.Counter[str] = collections.Counter()
    clients = {
        name: httpx.Client(
            base_url=service.url, headers={"Authorization": f"Bearer {token}"}, trust_env=False,
            timeout=900,
        )
        for name, token in {
            "user": service.tokens["ada"], "slice": service.slice_token("s1"),
        }.items()
    }  # fmt: skip
    for number in range(count):
        method, path, options, operation = generator.request()
        (scheme,) = operation["security"][0]
        what = f"case {number} of seed {seed}: {method} {path[:200]} {str(options)[:1000]}"
        with clients[scheme].stream(method, path, **options) as answer:
            statuses[f"{answer.status_code}"] += 1
            assert answer.status_code < 500, what
            if operation["operationId"] in STREAMS and answer.status_code == 200:
                continue  # it would not end
            answer.read()
        if answer.status_code == 401 and scheme == "user":
            service.add_user("ada", service_role("ada"))  # it was deleted, or its token revoked
        content = operation["responses"].get(str(answer.status_code), {}).get("content", {})
        schema = content.get("application/json", {}).get("schema")
        if schema is not None and method != "HEAD":
            jsonschema.validate(answer.json(), {**schema, **schemas})
    for client in clients.values():
        client.close()
    return statuses


def service_role(name: str):
    from tests.service.harness import USERS

    return USERS[name]


@pytest.mark.parametrize("seed", [1, 2])
def test_random_requests_never_break_the_server(service, seed):
    fill(service)
    statuses = send(service, 250, seed)
    assert statuses["200"] > 20, statuses  # otherwise the requests are too strange to find much


@pytest.mark.scale
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_many_random_requests_never_break_the_server(kind, tmp_path):
    store = MemoryStore() if kind == "memory" else open_store(f"sqlite:///{tmp_path}/fleet.db")
    service = ServiceHarness(store, tmp_path / "state")
    service.start()
    total: collections.Counter[str] = collections.Counter()
    try:
        fill(service)
        for seed in range(10):
            total += send(service, 1_000, seed)
        # Background tasks still work on what was stored.
        service.add_slice("s9", None)
        assert service.send_heartbeat("s9/0").assignment is None
        store.commit(ChangeSet())
    finally:
        print(f"{kind}: {sum(total.values())} requests: {dict(sorted(total.items()))}")
        service.close()
