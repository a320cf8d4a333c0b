"""A request whose body arrives slowly acts with the rights that its caller has at the end of it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.service.harness import SECRET, SPEC, USERS, ServiceHarness
from tpufleet.errors import Conflict
from tpufleet.model.api_types import NewJob, NewToken, SubmitRequest
from tpufleet.model.job.attempts import AttemptId, AttemptState
from tpufleet.model.job.jobs import JobId
from tpufleet.model.people.audit import AuditOutcome
from tpufleet.model.people.users import Role
from tpufleet.model.values.encoding import to_json
from tpufleet.service.api.routes import ROUTES
from tpufleet.service.transport import auth, signed_links
from tpufleet.service.transport.auth import Caller
from tpufleet.service.transport.routing import API_PREFIX, SLICE_TOKEN
from tpufleet.stores.memory import MemoryStore

# Also those that take no body: one that is sent is read all the same.
BY_USERS = {f"{route.method} {route.path}": route for route in ROUTES if route.role != SLICE_TOKEN}
NOT_FOR_VIEWERS = {
    name: route for name, route in BY_USERS.items() if route.role in (Role.MEMBER, Role.ADMIN)
}
SUBMISSION = to_json(SubmitRequest(jobs=(NewJob(id=JobId("slow-1"), spec=SPEC),)))
NEW_TOKEN = to_json(NewToken(user="ada", note="slow"))


@pytest.fixture
def slow_service(shared_service) -> ServiceHarness:
    """Its users may have been changed by another test."""
    for name, role in USERS.items():
        shared_service.add_user(name, role)
    return shared_service


def request(
    service: ServiceHarness,
    token: str,
    method: str,
    path: str,
    body: bytes = b"{}",
    *,
    meanwhile: Callable[[], None] = lambda: None,
    seconds: float = 5,
    parts: int = 2,
) -> int:
    """The status of a request during whose body `meanwhile` happens, and so many seconds pass."""
    path, _, query = path.partition("?")
    headers = [(b"content-length", str(len(body)).encode())]
    if token:
        headers.append((b"authorization", f"Bearer {token}".encode()))
    scope = {
        "type": "http", "method": method, "path": API_PREFIX + path, "headers": headers,
        "query_string": query.encode(), "client": ("127.0.0.1", 1234),
    }  # fmt: skip
    waiting = [body[:1], body[1:]] if parts == 2 else [body]
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        if not waiting:
            return {"type": "http.disconnect"}
        if len(waiting) == 1:
            meanwhile()
            service.clock.advance(timedelta(seconds=seconds))
        part = waiting.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(waiting)}

    async def send(message: Any) -> None:
        statuses.extend([message["status"]] if "status" in message else [])

    asyncio.run(service.app(scope, receive, send))
    return statuses[0]


def example_path(path: str) -> str:
    return re.sub(r"\{\w+\}", "anything", path.replace("{digest}", "0" * 64))


@pytest.mark.parametrize("parts", [1, 2], ids=["late", "in-two-parts"])
@pytest.mark.parametrize("name", BY_USERS)
def test_a_token_that_is_revoked_while_the_body_arrives_is_refused(slow_service, name, parts):
    service, route = slow_service, BY_USERS[name]
    revoke = lambda: service.store.delete_token("ada-1")
    path = example_path(route.path)
    token = service.tokens["ada"]
    status = request(service, token, route.method, path, meanwhile=revoke, parts=parts)
    assert status == 401


@pytest.mark.parametrize("name", NOT_FOR_VIEWERS)
def test_a_user_who_is_demoted_while_the_body_arrives_is_refused_and_entered(slow_service, name):
    service, route = slow_service, NOT_FOR_VIEWERS[name]
    demote = lambda: service.add_user("ada", Role.VIEWER)
    path = example_path(route.path)
    status = request(service, service.tokens["ada"], route.method, path, meanwhile=demote)
    assert status == 403
    if route.method not in ("GET", "HEAD"):
        service.add_user("ada", Role.ADMIN)
        entry = service.client("ada").audit(user="ada", limit=1)[0]
        assert (entry.outcome, entry.at) == (AuditOutcome.REFUSED, service.clock.now())


def test_nothing_is_done_for_a_user_who_is_deleted_while_the_body_arrives(service):
    def delete() -> None:
        service.store.delete_user("mel")

    status = request(service, service.tokens["mel"], "POST", "/jobs", SUBMISSION, meanwhile=delete)
    assert (status, service.store.job(JobId("slow-1"))) == (401, None)


def test_the_token_of_an_attempt_that_ends_while_the_body_arrives_is_refused(service):
    service.submit("job-1")
    attempt = service.add_attempt("job-1", 0)
    end = lambda: service.add_attempt("job-1", 0, state=AttemptState.ENDED)
    token = auth.job_token(SECRET, AttemptId(attempt.id))
    assert request(service, token, "PATCH", "/jobs/job-1", b'{"note": "x"}') == 200
    assert request(service, token, "PATCH", "/jobs/job-1", b'{"note": "x"}', meanwhile=end) == 401


def test_what_a_slow_request_does_has_the_time_when_it_was_done(service):
    began = service.clock.now()
    assert request(service, service.tokens["ada"], "POST", "/tokens", NEW_TOKEN) == 200
    (token,) = [token for token in service.store.tokens("ada") if token.note == "slow"]
    entry = service.client("ada").audit(user="ada", limit=1)[0]
    assert token.created_at == entry.at == began + timedelta(seconds=5)


def test_the_time_that_passed_is_not_that_of_a_clock_that_was_set_back(service):
    def revoke() -> None:
        service.clock.step(-timedelta(hours=1))
        service.store.delete_token("ada-1")

    token = service.tokens["ada"]
    assert request(service, token, "POST", "/tokens", NEW_TOKEN, meanwhile=revoke) == 401


def test_a_slow_request_with_a_signed_link_is_authenticated_by_its_link(service):
    service.submit("job-1")
    caller = Caller(name="mel", role=Role.MEMBER, token_id="mel-1")
    path = f"{API_PREFIX}/jobs/job-1/logs"
    link = signed_links.sign(path, caller, service.clock.now() + timedelta(days=1), SECRET)
    link = link.removeprefix(API_PREFIX)
    revoke = lambda: service.store.delete_token("mel-1")
    assert request(service, "", "GET", link) == 200
    assert request(service, "", "GET", link, meanwhile=revoke) == 401


class CountingStore(MemoryStore):
    authentications = 0

    def token_and_user(self, digest: str) -> Any:
        self.authentications += 1
        return super().token_and_user(digest)


@pytest.mark.parametrize("seconds, times", [(0.5, 1), (5, 2)], ids=["at-once", "slow"])
def test_only_slow_requests_are_authenticated_twice(tmp_path, seconds, times):
    store = CountingStore()
    service = ServiceHarness(store, tmp_path)
    service.start()
    try:
        token = service.tokens["ada"]
        assert request(service, token, "POST", "/tokens", NEW_TOKEN, seconds=seconds) == 200
        assert store.authentications == times
    finally:
        service.close()


class StoreThatDeletesTheUser(MemoryStore):
    """Before jobs are written, and after all that was checked."""

    def commit(self, change: Any, **more: Any) -> None:
        if change.new_jobs:
            self.delete_user("mel")
        super().commit(change, **more)


def test_a_submission_that_is_outrun_by_the_deletion_of_its_user_is_refused(tmp_path):
    store = StoreThatDeletesTheUser()
    service = ServiceHarness(store, tmp_path)
    service.start()
    try:
        with pytest.raises(Conflict, match="mel was deleted"):
            service.submit("job-1", by="mel")
        assert store.job(JobId("job-1")) is None
    finally:
        service.close()
