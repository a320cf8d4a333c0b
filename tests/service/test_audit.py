"""The audit log: who changed access, from where, when, and what was refused."""

from __future__ import annotations

import pytest

from tpufleet.errors import FleetError, Forbidden
from tpufleet.model.audit import AuditAction, AuditOutcome
from tpufleet.model.encoding import to_json
from tpufleet.model.host_commands import HostCommandKind, HostCommandRequest
from tpufleet.model.users import Role
from tpufleet.service.api.routes import ROUTES
from tpufleet.service.routing import SLICE_TOKEN

# Routes that write and change nobody's access: events of jobs and slices explain them, or they
# concern what a user sees.
EXPLAINED_BY_EVENTS = {
    "PATCH /jobs/{ref}", "POST /queue/{ref}/move", "POST /queue/{ref}/hold",
    "POST /queue/{ref}/release", "POST /reservations", "PATCH /reservations/{id}",
    "DELETE /reservations/{id}", "POST /slices/{id}/release", "PATCH /inventory/{name}",
    "PATCH /preferences",
    "POST /jobs", "POST /jobs/{ref}/cancel", "POST /jobs/{ref}/resume", "POST /jobs/{ref}/rerun",
    "DELETE /jobs/{ref}/files", "POST /archive", "POST /unarchive", "POST /purge",
    "PUT /snapshots/{digest}", "POST /notifications/{name}/test",
}  # fmt: skip
CANARY = "a-secret-value"


def test_every_route_that_changes_access_is_audited():
    writes = {
        f"{route.method} {route.path}": route.audit is not None
        for route in ROUTES
        if route.method not in ("GET", "HEAD") and route.role != SLICE_TOKEN
    }
    assert {name for name, audited in writes.items() if not audited} == EXPLAINED_BY_EVENTS


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
        http.post("/slices/s1/errands", content=to_json(command)).raise_for_status()
    ada.delete_user("vic")
    entries = ada.audit()[::-1]
    assert [(entry.action, entry.target, entry.detail) for entry in entries] == [
        (AuditAction.PUT_USER, "vic", "role member (was viewer)"),
        (AuditAction.CREATE_TOKEN, "vic", "scope full; does not expire; note: laptop"),
        (AuditAction.REVOKE_TOKEN, token.id, ""),
        (AuditAction.PUT_SECRET, "hf", "shared"),
        (AuditAction.DELETE_SECRET, "hf", "shared"),
        (AuditAction.EXEC, "s1", "host 1: ls -l '/a b'"),
        (AuditAction.DELETE_USER, "vic", ""),
    ]
    assert {(entry.actor, entry.token_id, entry.address, entry.at) for entry in entries} == {
        ("ada", "ada-1", "127.0.0.1", service.clock.now())
    }
    assert CANARY not in repr(entries) and token.token not in repr(entries)


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
