"""Whatever is sent, the server answers in words and never breaks."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from datetime import datetime, timedelta
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest

from tests.service.harness import SPEC
from tpufleet.model.values.encoding import to_json
from tpufleet.policy.accounting import rate_limits
from tpufleet.policy.accounting.rate_limits import RateLimit
from tpufleet.service.api.routes import ROUTES
from tpufleet.service.transport.routing import SLICE_TOKEN

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
def no_limit_hides_a_route():
    with pytest.MonkeyPatch.context() as patch:
        unlimited = RateLimit(per_second=1_000_000, burst=1_000_000)
        for name in ("PER_USER", "AUDITED_PER_USER", "PER_SLICE_TOKEN", "PER_STRANGER"):
            patch.setattr(rate_limits, name, unlimited)
        yield


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
    assert answer.status_code < 500 and answer.status_code != 429, (answer.text, what)
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
            check(http.post("/agent/heartbeat", content=damaged), damaged)


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


@pytest.mark.parametrize(
    "header",
    [
        "x", "-1", "1:2:3", "9" * 40, "²", "0:²", "٣", "0" * 5000, "NaN", "../..", "1e3", "0x10",
        "1_000", "+1", "1.0",
    ],
)  # fmt: skip
def test_a_malformed_last_event_id_is_answered_with_what_it_must_be(service, header):
    service.submit("job-1")
    paths = {"/stream": "number of an event", "/jobs/job-1/logs/stream": "position of a log"}
    with service.http(service.tokens["vic"]) as http:
        for path, expected in paths.items():
            headers = {"Last-Event-ID": header.encode()}
            with http.stream("GET", path, headers=headers) as answer:
                assert answer.status_code == 400
                assert expected in answer.read().decode()


@pytest.mark.parametrize("header", ["0:1.2.3.4.5.6", "999999:"])
def test_a_strange_log_position_never_breaks_a_stream(shared_service, header):
    with shared_service.http(shared_service.tokens["vic"]) as http:
        headers = {"Last-Event-ID": header}
        with http.stream("GET", "/jobs/job-1/logs/stream", headers=headers) as answer:
            assert answer.status_code in (200, 400, 404)


# Every route, with every parameter and every field of its body, and values at the edges of what
# numbers, durations, dates, names and Python itself can hold.

TEXTS = [
    "", " ", "0", "-0", "-1", "00", "0" * 5000, "9" * 19, "9" * 40, "9" * 5000, "-" + "9" * 5000,
    "1e400", "nan", "inf", "0x10", "1_000", "²", "٣", "½", "\u0000", "\ud83d", "é" * 500,
    "x" * 5000,
    "../../etc/passwd", "%00", "s1/0", "s1/" + "9" * 5000, "job-1.0", "job-1." + "9" * 5000,
    "P999999999D", "-P999999999D", "PT1E400S", "9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z",
    "9999-12-31T23:59:59-23:59", "2026-01-01T00:00:00", "none", "null", "true", "[", "{}", "'; --",
]  # fmt: skip
NUMBERS = [0, -1, 2**31, 2**53 + 1, 2**63, -(2**63) - 1, 10**40, 1e300, -1e300, 0.5]
OTHERS: list[Any] = [None, True, [], {}, [None], [[]], {"a": {}}, [0] * 2000]
NASTY = [*TEXTS, *NUMBERS, *OTHERS]


def name_of(route) -> str:
    return f"{route.method} {route.path}"


def token_for(service, route) -> str:
    return service.slice_token("s1") if route.role == SLICE_TOKEN else service.tokens["ada"]


def ask(http, route, path: str, **request) -> None:
    what = f"{route.method} {path[:100]} {str(request)[:200]}"
    with http.stream(route.method, path, **request) as answer:
        assert answer.status_code < 500 and answer.status_code != 429, what
        if answer.status_code >= 400 and route.method != "HEAD":
            answer.read()
            assert answer.json()["error"]["message"], what


@pytest.mark.parametrize("route", ROUTES, ids=name_of)
def test_no_value_of_a_query_parameter_breaks_a_route(shared_service, route):
    path = re.sub(r"\{\w+\}", "job-1", route.path)
    with shared_service.http(token_for(shared_service, route)) as http:
        for param in route.params:
            for text in TEXTS:
                value = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
                ask(http, route, path, params={"host": "s1/0", param.name: value})


@pytest.mark.parametrize("route", [r for r in ROUTES if "{" in r.path], ids=name_of)
def test_no_value_in_a_path_breaks_a_route(shared_service, route):
    with shared_service.http(token_for(shared_service, route)) as http:
        for text in TEXTS:
            value = "".join(f"%{byte:02x}" for byte in text.encode("utf-8", "surrogatepass"))
            ask(http, route, re.sub(r"\{\w+\}", value or "x", route.path))


def sample(kind: Any) -> Any:
    """A valid value of this type, as JSON."""
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return {field.name: sample(hints[field.name]) for field in dataclasses.fields(kind)}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind)
        return {name: sample(hints[name]) for name in kind.__struct_fields__}
    arguments = [each for each in get_args(kind) if each not in (type(None), Ellipsis)]
    origin = get_origin(kind)
    if origin in (tuple, list, set, frozenset):
        return [sample(arguments[0])] if arguments else []
    if origin is dict:
        return {"a": sample(arguments[1])}
    if arguments:
        return sample(arguments[0])
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next(iter(kind)).value
    supertype = getattr(kind, "__supertype__", kind)
    samples = {
        str: "job-1", int: 0, float: 0.5, bool: False, timedelta: "PT1S",
        datetime: "2026-01-01T00:00:00Z",
    }  # fmt: skip
    return samples.get(supertype)


def variations(document: Any) -> list[Any]:
    """The document with one value replaced at a time, at any depth."""
    if isinstance(document, dict):
        return [
            {**document, name: value}
            for name, item in document.items()
            for value in [*NASTY, *variations(item)]
        ]
    if isinstance(document, list):
        return [[value] for item in document for value in [*NASTY, *variations(item)]]
    return []


@pytest.mark.parametrize(
    "route",
    [route for route in WITH_BODY if dataclasses.is_dataclass(route.body)],
    ids=name_of,
)
@pytest.mark.parametrize("most", [150, pytest.param(800, marks=pytest.mark.slow)])
def test_no_value_in_a_body_breaks_a_route(shared_service, route, most):
    path = re.sub(r"\{\w+\}", "s1" if "/slices/" in route.path else "job-1", route.path)
    document = sample(route.body)
    if "host_id" in document:
        document["host_id"] = "s1/0"
    bodies = variations(document)
    if len(bodies) > most:
        bodies = SEED.sample(bodies, most)
    with shared_service.http(token_for(shared_service, route)) as http:
        for body in bodies:
            content = json.dumps(body).encode()
            ask(http, route, path, content=content)


@pytest.mark.parametrize("field", [*SPEC, "timeout", "grace", "hung_after", "retries"])
def test_no_value_in_a_job_breaks_its_submission(shared_service, field):
    route = next(route for route in ROUTES if name_of(route) == "POST /jobs")
    with shared_service.http(shared_service.tokens["mel"]) as http:
        for value in NASTY:
            spec = {**SPEC, field: value}
            body = json.dumps({"jobs": [{"id": "job-9", "spec": spec}]}).encode()
            ask(http, route, "/jobs", content=body)


def test_background_work_survives_all_of_that(shared_service):
    """What was stored above is read again by tasks that run forever, such as host commands."""
    shared_service.add_slice("s9", None)
    with shared_service.http(shared_service.tokens["ada"]) as http:
        request = {"id": "after", "command": ["true"]}
        assert http.post("/slices/s9/commands", json=request).status_code == 200
    reply = shared_service.send_heartbeat("s9/0")
    assert [command.id for command in reply.host_commands] == ["after"]


@pytest.mark.parametrize(
    "at", ["9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z", "2026-01-01T00:00:00"]
)
def test_a_date_in_progress_never_overflows(shared_service, at):
    heartbeat = json.loads(to_json(shared_service.make_heartbeat("s1/1", attempt_id="job-1.0")))
    with shared_service.http(shared_service.slice_token("s1")) as http:
        for sent_at in (heartbeat["at"], at):
            body = {**heartbeat, "at": sent_at, "progress": {"step": 1, "at": at}}
            assert http.post("/agent/heartbeat", json=body).status_code == 200
