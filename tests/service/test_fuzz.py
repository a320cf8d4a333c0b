"""Whatever is sent, the server answers in words and never breaks."""

from __future__ import annotations

import json
import random
import re

import pytest

from tests.service.harness import SPEC
from tpufleet.model.encoding import to_json
from tpufleet.service.api.routes import ROUTES
from tpufleet.service.routing import SLICE_TOKEN

WITH_BODY = [route for route in ROUTES if route.body is not None]
SEED = random.Random(3)
STRANGE = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"0",
    b'"text"',
    b"{}",
    b'{"jobs": null}',
    b'{"jobs": []}',
    b'{"jobs": [{}]}',
    b'{"jobs": [{"id": "a", "spec": null}]}',
    b'{"jobs": [{"id": "a", "spec": []}]}',
    b'{"jobs": [{"id": "a", "spec": {"command": 1, "accelerator": {}, "env": 3}}]}',
    b'{"jobs": [{"id": "a", "spec": {}, "snapshot": "../../x"}]}',
    b'{"id": "../x", "changes": {"name": 7}}',
    b'{"changes": {"zzz": 1, "slices": 1e400}}',
    b'{"name": "\\u0000", "role": "admin"}',
    b'{"name": "\\ud800", "role": "admin"}',
    b'{"user": "\\u0000", "note": "\\u0000"}',
    b'{"value": 5}',
    b'{"fault": null, "host": -1}',
    b"\xff\xfe\x00",
    b"[" * 5000,
    b'{"a":' * 2000,
    bytes(SEED.randrange(256) for _ in range(2000)),
]


@pytest.fixture(autouse=True, scope="module")
def something_there(shared_service):
    shared_service.submit("job-1")
    shared_service.end_job("job-1")
    shared_service.add_slice("s1", "job-1")


def mutations(body: bytes) -> list[bytes]:
    """The same body with some bytes changed, cut or doubled."""
    found = []
    for _ in range(25):
        data = bytearray(body)
        for _ in range(SEED.randrange(1, 4)):
            at = SEED.randrange(len(data))
            match SEED.randrange(3):
                case 0:
                    data[at] = SEED.randrange(256)
                case 1:
                    del data[at : at + SEED.randrange(1, 9)]
                case _:
                    data[at:at] = data[at : at + SEED.randrange(1, 9)]
            if not data:
                break
        found.append(bytes(data))
    return found


def check(answer, what: bytes) -> None:
    assert answer.status_code < 500, (answer.text, what)
    if answer.status_code >= 400:
        fault = answer.json()["error"]
        assert fault["message"], what


@pytest.mark.parametrize("route", WITH_BODY, ids=lambda route: f"{route.method} {route.path}")
def test_a_strange_body_never_breaks_a_route(shared_service, route):
    token = (
        shared_service.slice_token("s1")
        if route.role == SLICE_TOKEN
        else shared_service.tokens["ada"]
    )
    path = re.sub(r"\{\w+\}", "job-1", route.path)
    with shared_service.http(token) as http:
        for body in STRANGE:
            check(http.request(route.method, path, content=body), body)


def test_damaged_submissions_never_break_the_server(shared_service):
    spec = {
        **SPEC,
        "env": {"A": "b"},
        "retries": {"failure": 2},
        "timeout": "2h",
        "tags": ["a"],
        "capacity": ["spot"],
        "zones": ["us-central1-a"],
        "checkpoint": "gs://bucket/x",
    }
    body = json.dumps({"jobs": [{"id": "job-9", "spec": spec}]}).encode()
    with shared_service.http(shared_service.tokens["mel"]) as http:
        for damaged in mutations(body) * 4:
            check(http.post("/jobs", content=damaged), damaged)


def test_damaged_beats_never_break_the_server(shared_service):
    body = to_json(shared_service.make_heartbeat("s1/0"))
    with shared_service.http(shared_service.slice_token("s1")) as http:
        for damaged in mutations(body) * 4:
            check(http.post("/agent/beat", content=damaged), damaged)


@pytest.mark.parametrize(
    "query",
    [
        "limit=0", "limit=-1", "limit=99999999999999999999", "limit=x", "limit=1.5", "limit=%00",
        "before=../x", "state=%00", "owner=%00", "after=x", "name=%ff%fe", "tag=" + "x" * 5000,
    ],
)  # fmt: skip
def test_a_strange_parameter_never_breaks_a_listing(shared_service, query):
    with shared_service.http(shared_service.tokens["vic"]) as http:
        for path in ("/jobs", "/events", "/slices", "/jobs/job-1/logs", "/jobs/job-1/events"):
            check(http.get(f"{path}?{query}"), query.encode())


@pytest.mark.parametrize("header", ["x", "-1", "1:2:3", "9" * 40, "0:1.2.3.4.5.6", "999999:"])
def test_a_strange_last_event_id_never_breaks_a_stream(shared_service, header):
    with shared_service.http(shared_service.tokens["vic"]) as http:
        for path in ("/stream", "/jobs/job-1/logs/stream"):
            headers = {"Last-Event-ID": header}
            with http.stream("GET", path, headers=headers) as answer:
                assert answer.status_code in (200, 400, 404)
