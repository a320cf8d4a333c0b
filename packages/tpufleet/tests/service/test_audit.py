"""The audit log: who changed access, from where, when, and what was refused."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest

from tpufleet.client.fleet import FleetClient
from tpufleet.errors import FleetError, Forbidden, NotFound
from tpufleet.model.fleet.host_commands import HostCommandKind, HostCommandRequest
from tpufleet.model.people.audit import AuditAction, AuditOutcome
from tpufleet.model.people.users import Role, TokenScope
from tpufleet.model.values.encoding import to_json
from tpufleet.policy.accounting import rate_limits
from tpufleet.service.api.routes import ROUTES
from tpufleet.service.transport.routing import SLICE_TOKEN

# Routes that write only what belongs to the caller, or what any member may write.
OWN_OR_SHARED = {
    "PATCH /inventory/{name}", "POST /jobs/check", "POST /snapshots", "PUT /snapshots/{digest}",
    "POST /notifications/{name}/test",
}  # fmt: skip
CANARY = "a-secret-value"
ALLOWED_TO_READERS = {"rotate_token", "create_session", "delete_session", "create_login_link"}


WRITES = {
    f"{route.method} {route.path}": route
    for route in ROUTES
    if route.method not in ("GET", "HEAD") and route.role != SLICE_TOKEN
}


def test_every_route_that_changes_access_or_what_belongs_to_others_is_audited():
    silent = {
        name for name, route in WRITES.items() if route.audit is None and route.foreign is None
    }
    assert silent == OWN_OR_SHARED


@pytest.mark.parametrize("name", WRITES)
def test_a_change_that_the_role_does_not_permit_is_entered(shared_service, name):
    """Whatever the body is: it is refused before it is read."""
    route, service = WRITES[name], shared_service
    caller = {Role.ADMIN: "mel", Role.MEMBER: "vic"}.get(route.role)
    if caller is None:
        token = service.client("vic").create_token("vic", scope=TokenScope.READ)
        caller, service.tokens["reader"] = "reader", token.token
    user = "vic" if caller == "reader" else caller
    before = len(service.client("ada").audit(user=user, limit=1000))
    path = re.sub(r"\{\w+\}", "anything", route.path)
    with service.http(service.tokens[caller]) as http:
        status = http.request(route.method, path, content=b"{}").status_code
    if status == 403:
        entry, *rest = service.client("ada").audit(user=user, limit=1000)
        assert len(rest) == before and entry.outcome is AuditOutcome.REFUSED
    else:
        assert route.operation_id in ALLOWED_TO_READERS


def test_a_refused_request_for_the_admin_role_is_entered_with_what_it_asked_for(service):
    with pytest.raises(Forbidden):
        service.client("mel").put_user("mel", Role.ADMIN)
    (entry,) = service.client("ada").audit(user="mel")
    assert (entry.action, entry.target, entry.outcome) == (
        AuditAction.PUT_USER,
        "mel",
        AuditOutcome.REFUSED,
    )
    assert "requires the admin role" in entry.detail


def test_an_admin_who_reads_or_changes_preferences_of_a_member_is_entered(service):
    with service.http(service.tokens["ada"]) as http:
        http.get("/preferences").raise_for_status()
        http.patch("/preferences", json={}).raise_for_status()
        assert service.client("ada").audit() == ()
        http.get("/preferences", params={"user": "mel"}).raise_for_status()
        http.patch("/preferences", params={"user": "mel"}, json={}).raise_for_status()
    assert [(each.action, each.target) for each in service.client("ada").audit()] == [
        (AuditAction.CHANGE_PREFERENCES, "preferences of mel"),
        (AuditAction.READ_PREFERENCES, "preferences of mel"),
    ]
    with service.http(service.tokens["mo"]) as http:
        assert http.get("/preferences", params={"user": "mel"}).status_code == 403
    (entry,) = service.client("ada").audit(user="mo")
    assert entry.outcome is AuditOutcome.REFUSED and entry.target == "mel"


MANY_JOBS = tuple(f"job-{number}" for number in range(1, 9))


@pytest.mark.parametrize("caller", ["mo", "vic"], ids=["not the owner", "a viewer"])
@pytest.mark.parametrize(
    ("path", "body", "target"),
    [
        ("/archive", {"jobs": ["job-1"]}, "job-1"),
        ("/unarchive", {"jobs": ["job-2", "job-1"]}, "job-2, job-1"),
        ("/purge", {"jobs": ["job-1", "job-2"], "checkpoints": True}, "job-1, job-2"),
        ("/purge", {"jobs": MANY_JOBS}, "job-1, job-2, job-3, job-4, job-5 and 3 more"),
    ],
)
def test_a_refused_archive_or_purge_names_the_jobs(shared_service, caller, path, body, target):
    service = shared_service
    for name in MANY_JOBS:
        if service.store.job(name) is None:
            service.submit(name, by="mel")
            service.end_job(name)
    with service.http(service.tokens[caller]) as http:
        assert http.post(path, json=body).status_code == 403
    entry = service.client("ada").audit(user=caller, limit=1)[0]
    assert (entry.target, entry.outcome) == (target, AuditOutcome.REFUSED)


def test_a_refused_body_that_cannot_be_read_is_entered_without_a_target(service):
    with service.http(service.tokens["vic"]) as http:
        assert http.post("/purge", content=b'{"jobs": 7}').status_code == 403
    (entry,) = service.client("ada").audit(user="vic")
    assert (entry.action, entry.target) == (AuditAction.PURGE_JOBS, "")


def test_the_entries_of_a_token_are_for_its_user_and_for_admins(service):
    token = service.client("mel").create_token(note="laptop")
    service.tokens["laptop"] = token.token
    service.client("laptop").put_secret("wandb", CANARY)
    service.client("mel").rotate_token(token.id, timedelta(hours=1))
    with pytest.raises(NotFound):
        service.client("mo").revoke_token(token.id)
    entries = service.client("mel").audit(token=token.id)
    assert [(each.actor, each.action, each.outcome) for each in entries] == [
        ("mo", AuditAction.REVOKE_TOKEN, AuditOutcome.REFUSED),
        ("mo", AuditAction.REVOKE_TOKEN, AuditOutcome.REQUESTED),
        ("mel", AuditAction.ROTATE_TOKEN, AuditOutcome.REQUESTED),
        ("mel", AuditAction.PUT_SECRET, AuditOutcome.REQUESTED),
    ]
    with pytest.raises(NotFound):
        service.client("mo").audit(token=token.id)
    service.client("mel").revoke_token(token.id)
    assert len(service.client("ada").audit(token=token.id)) == 5


def test_what_users_do_to_their_own_jobs_is_not_entered(service):
    service.submit("job-1", by="mel")
    service.client("mel").cancel("job-1")
    assert service.client("ada").audit() == ()


def test_the_log_says_who_did_what_from_where_and_when(service):
    ada = service.client("ada")
    ada.put_user("vic", Role.MEMBER)
    token = ada.create_token(user="vic", note="laptop")
    ada.revoke_token(token.id)
    ada.put_secret("hf", CANARY, shared=True)
    ada.delete_secret("hf", shared=True)
    service.add_slice("s1", None)
    command = HostCommandRequest(
        id="c1", kind=HostCommandKind.COMMAND, command=("ls", "-l", "/a b"), host=1
    )
    with service.http(service.tokens["ada"]) as http:
        http.post("/slices/s1/commands", content=to_json(command)).raise_for_status()
    ada.delete_user("vic")
    entries = ada.audit()[::-1]
    assert [(entry.action, entry.target, entry.detail) for entry in entries] == [
        (AuditAction.PUT_USER, "vic", "role member (was viewer)"),
        (AuditAction.CREATE_TOKEN, "vic", "scope full; does not expire; note: laptop"),
        (AuditAction.REVOKE_TOKEN, token.id, ""),
        (AuditAction.PUT_SECRET, "hf", "shared"),
        (AuditAction.DELETE_SECRET, "hf", "shared"),
        (AuditAction.EXEC, "s1", "host 1: ls -l '/a b'"),
        (AuditAction.DELETE_USER, "vic", "with 0 jobs, 1 token, 0 secrets, 0 reservations"),
    ]
    assert {(entry.actor, entry.token_id, entry.address, entry.at) for entry in entries} == {
        ("ada", "ada-1", "127.0.0.1", service.clock.now())
    }
    assert CANARY not in repr(entries) and token.token not in repr(entries)


def test_a_token_is_entered_with_the_expiry_that_it_gets_by_default(service):
    ada = service.client("ada")
    ada.put_user("ci", Role.MEMBER, service=True)
    ada.create_token(user="ci", scope=TokenScope.SUBMIT)
    short = ada.create_token(expires_in=timedelta(hours=1))
    with FleetClient(service.url, short.token) as brief:
        brief.create_token()
    own, requested, of_service, *_ = ada.audit()
    assert of_service.detail == "scope submit; expires in 90 days, 0:00:00"
    assert requested.detail == own.detail == "scope full; expires in 1:00:00"


def test_a_refused_request_is_entered_with_the_reason(service):
    with pytest.raises(Forbidden):
        service.client("mel").create_token(user="ada")
    refused, requested = service.client("ada").audit(user="mel")
    assert requested.outcome is AuditOutcome.REQUESTED
    assert refused.outcome is AuditOutcome.REFUSED and "requires the admin role" in refused.detail


def test_nothing_happens_without_an_entry(service):
    def fail(entry):
        raise OSError("disk full")

    service.store.append_audit = fail  # the edge: the disk
    with pytest.raises(FleetError):
        service.client("ada").put_user("eve", Role.ADMIN)
    assert service.store.user("eve") is None


def test_the_log_is_read_in_pages_and_by_admins_only(service):
    for number in range(5):
        service.client("ada").put_user(f"user-{number}", Role.VIEWER)
    first = service.client("ada").audit(limit=2)
    assert [entry.target for entry in first] == ["user-4", "user-3"]
    rest = service.client("ada").audit(limit=10, before=first[-1].seq)
    assert [entry.target for entry in rest] == ["user-2", "user-1", "user-0"]
    with pytest.raises(Forbidden):
        service.client("mel").audit()


def test_a_user_cannot_fill_the_audit_log(service):
    """Its entries are kept forever."""
    service.submit("job-1", by="mo")
    log = service.app.state.audit_log
    for _ in range(rate_limits.AUDITED_PER_USER.burst):
        log.check_limit("mel")
    with service.http(service.tokens["mel"]) as http:
        forbidden = http.post("/jobs/job-1/cancel")
        of_admins = http.put("/pools/lab", content=b"{}")
        own = http.post("/session")
        allowed = http.get("/jobs/job-1")
    assert [each.status_code for each in (forbidden, of_admins, own)] == [429] * 3
    assert allowed.status_code == 200
    assert not service.store.audit(actor="mel")
    assert service.client("ada").cancel("job-1"), "others are not affected"
    assert service.store.audit(actor="ada")
