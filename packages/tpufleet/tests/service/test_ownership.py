"""Who may change whose things: every route that writes, against an object of another user."""

from __future__ import annotations

import io
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from tests.service.harness import SPEC, ServiceHarness
from tests.service.test_files import packed
from tpufleet.client.fleet import new_job_id
from tpufleet.errors import Conflict
from tpufleet.model.api_types import NewJob, NewReservation, PurgeRequest
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.job.attempts import AttemptState
from tpufleet.model.job.jobs import JobId, is_generated_id
from tpufleet.model.people.audit import AuditOutcome
from tpufleet.model.people.users import Role
from tpufleet.service.api.routes import ROUTES
from tpufleet.service.transport.routing import SLICE_TOKEN
from tpufleet.stores.base import ChangeSet

OWN = "own"  # it writes something of the caller's own, never of another user
ADMIN = "admin"  # requires the admin role
OWNER = "owner"  # of the object, or an admin
SHARED = "shared"  # any member

# What each route that writes protects. A new route must be added here.
RULES = {
    "POST /jobs": OWN,
    "POST /jobs/check": OWN,
    "PATCH /jobs/{ref}": OWNER,
    "POST /queue/{ref}/move": OWNER,
    "POST /queue/{ref}/hold": OWNER,
    "POST /queue/{ref}/release": OWNER,
    "POST /queue/{ref}/retry": OWNER,
    "POST /reservations": OWN,
    "PATCH /reservations/{id}": OWNER,
    "DELETE /reservations/{id}": OWNER,
    "POST /slices/{id}/release": OWNER,
    "PATCH /inventory/{name}": SHARED,
    "PATCH /preferences": OWN,
    "PUT /notifications/{name}": OWN,
    "DELETE /notifications/{name}": OWN,
    "POST /notifications/{name}/test": OWN,
    "POST /jobs/{ref}/cancel": OWNER,
    "POST /jobs/{ref}/resume": OWNER,
    "POST /jobs/{ref}/rerun": OWNER,
    "POST /archive": OWNER,
    "POST /unarchive": OWNER,
    "POST /purge": OWNER,
    "PUT /snapshots/{digest}": OWN,
    "POST /snapshots": OWN,
    "POST /session": OWN,
    "DELETE /session": OWN,
    "POST /session/link": OWN,
    "POST /jobs/{ref}/links": OWNER,
    "POST /tokens": OWNER,
    "DELETE /tokens/{id}": OWNER,
    "POST /tokens/{id}/rotate": OWNER,
    "PUT /secrets/{name}": OWN,
    "DELETE /secrets/{name}": OWN,
    "POST /users": ADMIN,
    "DELETE /users/{name}": ADMIN,
    "PUT /pools/{name}": ADMIN,
    "DELETE /pools/{name}": ADMIN,
    "POST /slices": ADMIN,
    "DELETE /slices/{id}": ADMIN,
    "POST /slices/{id}/fault": OWNER,
    "POST /slices/{id}/commands": OWNER,
}


@dataclass(frozen=True)
class Call:
    path: str
    body: Any = None


# Each names an object of mo.
CALLS: dict[str, Call] = {
    "POST /jobs/{ref}/links": Call("/jobs/ended/links", {"resource": "logs", "expires_in": "PT1H"}),
    "PATCH /jobs/{ref}": Call("/jobs/ended", {"notes": "mine"}),
    "POST /queue/{ref}/move": Call("/queue/live/move", {"last": True}),
    "POST /queue/{ref}/hold": Call("/queue/live/hold"),
    "POST /queue/{ref}/release": Call("/queue/live/release"),
    "POST /queue/{ref}/retry": Call("/queue/live/retry"),
    "PATCH /reservations/{id}": Call("/reservations/r1", {"extend_by": "PT5M"}),
    "DELETE /reservations/{id}": Call("/reservations/r1?reason=deadline"),
    "POST /slices/{id}/release": Call("/slices/s2/release"),
    "POST /jobs/{ref}/cancel": Call("/jobs/live/cancel"),
    "POST /jobs/{ref}/resume": Call("/jobs/ended/resume", {"id": "again"}),
    "POST /jobs/{ref}/rerun": Call("/jobs/ended/rerun", {"id": "again"}),
    "POST /archive": Call("/archive", {"jobs": ["ended"]}),
    "POST /unarchive": Call("/unarchive", {"jobs": ["ended"]}),
    "POST /purge": Call("/purge", {"jobs": ["ended"]}),
    "POST /tokens": Call("/tokens", {"user": "mo"}),
    "DELETE /tokens/{id}": Call("/tokens/mo-1"),
    "POST /tokens/{id}/rotate": Call("/tokens/mo-1/rotate", {}),
    "POST /slices/{id}/fault": Call("/slices/s1/fault", {"fault": "preempt"}),
    "POST /slices/{id}/commands": Call("/slices/s1/commands", {"id": "c1", "command": ["date"]}),
}


def test_every_route_that_writes_has_a_rule():
    writes = {
        f"{route.method} {route.path}": route
        for route in ROUTES
        if route.method not in ("GET", "HEAD") and route.role != SLICE_TOKEN
    }
    assert set(writes) == set(RULES)
    admins = {name for name, route in writes.items() if route.role is Role.ADMIN}
    assert admins == {name for name, rule in RULES.items() if rule == ADMIN}
    assert set(CALLS) == {name for name, rule in RULES.items() if rule == OWNER}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("caller", ["vic", "mel", "mo", "ada"])
def test_only_the_owner_or_an_admin_changes_an_object(service, name, caller):
    service.submit("live", by="mo")
    service.submit("ended", by="mo", checkpoint="gs://lab/run")
    service.add_attempt("ended", 0, state=AttemptState.ENDED)
    service.end_job("ended")
    service.add_slice("s1", "live", provider="tpu-vm")
    soon = service.clock.now() + timedelta(minutes=5)
    lab = Pool(name="lab", provider="local", accelerator="v5litepod-16", largest=1)
    service.store.commit(ChangeSet(pools=[lab]))
    service.add_slice("s2", None, pool="lab", reserved_for="mo", reserved_until=soon)
    service.client("mo").reserve(NewReservation(id="r1", pool="lab"))
    if name == "POST /queue/{ref}/release":
        service.client("mo").hold_in_queue("live")
    call = CALLS[name]
    with service.http(service.tokens[caller]) as http:
        status = http.request(name.partition(" ")[0], call.path, json=call.body).status_code
    entries = service.client("ada").audit(user=caller)
    if caller in ("mo", "ada"):
        assert status == 200
        # An admin who acts on what belongs to a member leaves a trace.
        assert caller == "mo" or [entry.outcome for entry in entries] == [AuditOutcome.REQUESTED]
    else:
        assert status in (403, 404)
        assert entries[0].outcome is AuditOutcome.REFUSED


def test_code_stays_while_a_job_of_another_user_refers_to_it(
    service: ServiceHarness, tmp_path_factory
):
    """Naming the digest of somebody else's code in a job gives no right to delete it."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "train.py").write_text("pass")
    digest, data = packed(folder)
    mo, mel = service.client("mo"), service.client("mel")
    mo.put_snapshot(digest, io.BytesIO(data))
    mo.submit([NewJob(id=JobId("original"), spec=SPEC, snapshot=digest)])
    service.end_job("original")
    mel.submit([NewJob(id=JobId("copy"), spec=SPEC, snapshot=digest)])
    service.end_job("copy")
    mel.purge(PurgeRequest(jobs=("copy",)))
    assert mo.has_snapshot(digest)
    assert mo.resume("original").id


# A member chooses the ids of their jobs; they must not lead others to these jobs by mistake.


def test_an_id_of_another_user_does_not_hide_a_name(service):
    service.submit("precious", by="mo", name="bait")
    mine = service.submit("job-1", by="mel", name="precious")
    assert service.client("mel").job("precious").job.id == mine
    assert service.client("mo").job("precious").job.id == "precious"
    for other in ("ada", "vic"):
        with pytest.raises(Conflict, match="mel/precious, @precious"):
            service.client(other).job("precious")
    assert service.client("ada").job("mel/precious").job.id == mine


def test_an_id_of_another_user_does_not_hide_a_default_name(service):
    service.submit("train", by="mo", name="bait")
    mine = service.submit("k3f7xq2m7abc", by="mel", name="train-k3f7")
    assert service.client("mel").job("train").job.id == mine


def test_an_id_that_is_the_name_of_another_users_job_is_refused(service):
    service.submit("job-1", by="mel", name="precious")
    with pytest.raises(Conflict, match="name of another user's job"):
        service.submit("precious", by="mo")
    service.end_job("job-1")
    with pytest.raises(Conflict, match="name of another user's job"):
        service.client("mo").submit([NewJob(id=JobId("precious"), spec=SPEC)])
    service.submit("precious", by="mel")  # their own


def test_a_retried_submit_is_accepted_after_another_user_took_the_id_as_a_name(service):
    service.submit("hello-1", by="mo")
    service.submit("job-1", by="mel", name="hello-1")
    assert service.submit("hello-1", by="mo") == "hello-1"


def test_a_name_does_not_hide_a_generated_id(service):
    """Else a member could name a job so that others no longer reach the job with that id."""
    service.submit("k3f7xq2m7abc", by="mel")
    service.submit("job-1", by="mo", name="k3f7xq2m7abc")
    for other in ("mel", "ada", "vic"):
        assert service.client(other).job("k3f7xq2m7abc").job.id == "k3f7xq2m7abc"


def test_generated_ids_are_recognised():
    assert all(is_generated_id(new_job_id()) for _ in range(100))
    assert not any(map(is_generated_id, ("train", "hello-1", "precious", "tiny-lm")))
