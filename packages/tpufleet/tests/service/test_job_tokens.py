"""The token of an attempt: what its processes may do, and for how long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.service.harness import SECRET, ServiceHarness
from tests.service.test_auth import ask, name_of
from tpufleet.client.fleet import FleetClient
from tpufleet.errors import Forbidden, Unauthorized
from tpufleet.model.api_types import JobChanges
from tpufleet.model.fleet.hosts import Phase
from tpufleet.model.inbox import InboxMessageKind
from tpufleet.model.job.attempts import AttemptId, AttemptState
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.service.api.routes import ROUTES
from tpufleet.service.transport import auth
from tpufleet.stores.base import ChangeSet

OWN_JOB = {
    "GET /me", "GET /openapi.json", "GET /jobs/{ref}", "GET /jobs/{ref}/why", "PATCH /jobs/{ref}",
    "GET /jobs/{ref}/metrics", "GET /jobs/{ref}/events", "GET /jobs/{ref}/logs",
    "GET /jobs/{ref}/logs/stream", "GET /jobs/{ref}/result", "GET /jobs/{ref}/cost",
    "POST /jobs/{ref}/cancel",
}  # fmt: skip


@pytest.fixture
def running(service: ServiceHarness) -> ServiceHarness:
    """A job of mel's that runs, and one of mo's."""
    for job, owner, name in (("job-1", "mel", "slice-1"), ("job-2", "mo", "slice-2")):
        service.submit(job, by=owner)
        service.add_slice(name, job)
        service.add_attempt(job, 0, name)
    return service


def client(service: ServiceHarness, token: str) -> FleetClient:
    service.tokens["job"] = token
    return service.client("job")


def assigned_token(service: ServiceHarness, host: str = "slice-1/0") -> str:
    assignment = service.send_heartbeat(host).assignment
    assert assignment is not None
    return assignment.token


def test_an_agent_gets_the_token_of_the_attempt_until_it_reports_it(running):
    assert assigned_token(running).startswith("tpj_job-1.0.")
    assert assigned_token(running, "slice-1/1") == assigned_token(running)
    assert assigned_token(running, "slice-2/0") != assigned_token(running)
    reply = running.send_heartbeat(
        "slice-1/0", attempt_id=AttemptId("job-1.0"), phase=Phase.RUNNING
    )
    assert reply.assignment is not None
    assert reply.assignment.token == ""


def test_the_processes_of_a_job_read_edit_and_cancel_it(running):
    own = client(running, assigned_token(running))
    assert own.job("job-1").row.owner == "mel"
    assert own.job("train").row.id == own.job("@job-1").row.id == "job-1"
    assert own.change_job("job-1", JobChanges(add_tags=("diverged",), notes="loss is NaN"))
    assert own.why("job-1") is not None
    own.cancel("job-1")
    assert any(each.kind is InboxMessageKind.CANCEL for each in running.store.inbox(0, 10))


def test_they_reach_no_other_job(running):
    running.submit("job-3", by="mel")  # of the same owner
    own = client(running, assigned_token(running))
    for other in ("job-2", "job-3", "mo/train", "no-such-job", "@last"):
        for call in (own.job, own.cancel, own.why):
            with pytest.raises(Forbidden, match="limited to job job-1"):
                call(other)


def test_they_reach_no_other_route(running):
    """Also as the owner of the job is an admin."""
    running.submit("job-9", by="ada")
    running.add_slice("slice-9", "job-9")
    running.add_attempt("job-9", 0, "slice-9")
    token = assigned_token(running, "slice-9/0")
    for route in ROUTES:
        own = replace(route, path=route.path.replace("{ref}", "job-9"))
        status = ask(running, own, token)
        if name_of(route) in OWN_JOB:
            assert status not in (401, 403), name_of(route)
        else:
            assert status in (401, 403), name_of(route)


def test_they_cannot_change_the_priority_of_their_job(running):
    with pytest.raises(Forbidden, match="priority"):
        client(running, assigned_token(running)).change_job("job-1", JobChanges(priority=9))


def test_the_token_ends_with_its_attempt_also_if_the_job_goes_on(running):
    token = assigned_token(running)
    attempt = running.store.attempt(AttemptId("job-1.0"))
    assert attempt is not None
    ended = replace(
        attempt,
        state=AttemptState.ENDED,
        ended_at=running.clock.now(),
        end_reason=EndReason.PREEMPTED,
    )
    running.store.commit(ChangeSet(attempts=[ended]))
    running.add_attempt("job-1", 1, "slice-1")
    with pytest.raises(Unauthorized, match=r"attempt job-1\.0 has ended"):
        client(running, token).job("job-1")
    assert client(running, assigned_token(running)).job("job-1").row.id == "job-1"


def test_the_token_ends_with_its_owner(running):
    token = assigned_token(running)
    running.store.delete_user("mel")
    with pytest.raises(Unauthorized, match="its user was deleted"):
        client(running, token).job("job-1")


@pytest.mark.parametrize(
    "token",
    [
        "tpj_",
        "tpj_job-1.0",
        "tpj_job-1.0.",
        "tpj_job-1.0." + "A" * 43,
        auth.job_token(b"another secret", AttemptId("job-1.0")),
        auth.job_token(SECRET, AttemptId("job-1.0")).replace("job-1", "job-2"),
        auth.job_token(SECRET, AttemptId("job-1.7")),
        auth.job_token(SECRET, AttemptId("")),
    ],
)
def test_a_token_that_the_server_did_not_issue_is_refused(running, token):
    with pytest.raises(Unauthorized):
        client(running, token).me()


def test_it_is_not_the_token_of_the_slice(running):
    """The agent acts for the slice, the processes for their job: neither can act as the other."""
    token = assigned_token(running)
    with running.http(token) as http:
        answer = http.post(
            "/agent/logs", params={"attempt": "job-1.0", "host": "slice-1/0", "offset": 0}
        )
        assert answer.status_code == 401
    with pytest.raises(Unauthorized):
        client(running, running.slice_token("slice-1")).job("job-1")
