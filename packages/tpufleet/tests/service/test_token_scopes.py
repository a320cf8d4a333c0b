"""Limited tokens, service accounts and rotation."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import httpx
import pytest

from tests.service.harness import ServiceHarness
from tests.service.test_auth import ask, name_of
from tpufleet.client.fleet import FleetClient
from tpufleet.errors import BadInput, Conflict, Forbidden, NotFound, Unauthorized
from tpufleet.model.api_types import NewJob
from tpufleet.model.job.jobs import JobId
from tpufleet.model.people.audit import AuditAction
from tpufleet.model.people.users import Role, TokenScope
from tpufleet.service.api.routes import ROUTES
from tpufleet.service.transport import auth
from tpufleet.service.transport.routing import SLICE_TOKEN

DAY = timedelta(days=1)
USER_ROUTES = [route for route in ROUTES if route.role != SLICE_TOKEN]
OWN_JOBS = {
    "POST /jobs", "POST /jobs/check", "GET /jobs", "GET /jobs/{ref}", "GET /jobs/{ref}/why",
    "POST /jobs/{ref}/cancel",
    "GET /jobs/{ref}/events", "GET /jobs/{ref}/logs", "GET /jobs/{ref}/logs/stream",
    "GET /jobs/{ref}/result", "GET /stream", "HEAD /snapshots/{digest}", "PUT /snapshots/{digest}",
    "POST /snapshots",
}  # fmt: skip
ALWAYS = {
    "GET /me", "GET /openapi.json", "POST /tokens/{id}/rotate", "POST /session", "GET /session",
    "DELETE /session", "POST /session/link", "GET /preferences",
}  # fmt: skip
ALLOWED = {
    "read": ALWAYS | {name_of(route) for route in USER_ROUTES if route.method in ("GET", "HEAD")},
    "submit": ALWAYS | OWN_JOBS,
}
OPTIONS = {"read": {"scope": TokenScope.READ}, "submit": {"scope": TokenScope.SUBMIT}}


def limited(service: ServiceHarness, user: str, **options) -> FleetClient:
    token = service.client("ada").create_token(user, **options).token
    service.tokens["limited"] = token
    return service.client("limited")


@pytest.mark.parametrize("limit", ALLOWED)
def test_a_limited_token_of_an_admin_reaches_only_what_it_allows(service, limit):
    limited(service, "ada", **OPTIONS[limit])
    for route in USER_ROUTES:
        status = ask(service, route, service.tokens["limited"])
        if name_of(route) in ALLOWED[limit]:
            assert status not in (401, 403), name_of(route)
        else:
            assert status == 403, name_of(route)


@pytest.mark.parametrize("scope", TokenScope)
def test_a_token_never_allows_more_than_its_user_may(service, scope):
    with pytest.raises(Forbidden, match="requires the member role"):
        limited(service, "vic", scope=scope).submit([NewJob(id=JobId("j"), spec={})])


def test_a_submit_token_reaches_only_jobs_of_its_user(service):
    service.submit("job-mel", by="mel")
    service.submit("job-mo", by="mo")
    client = limited(service, "mel", scope=TokenScope.SUBMIT)
    assert [job.id for job in client.jobs().jobs] == ["job-mel"]
    assert client.job("job-mel").job.owner == "mel"
    client.cancel("job-mel")
    for call in (client.job, client.why, client.cancel):
        with pytest.raises(Forbidden, match="limited to jobs of mel"):
            call("job-mo")
    with service.http(service.tokens["limited"]) as http:
        assert http.get("/stream").status_code == 400
        assert http.get("/stream", params={"job": "job-mo"}).status_code == 403


def test_a_service_account_gets_tokens_that_expire_from_an_admin_only(service):
    ada = service.client("ada")
    assert ada.put_user("ci", Role.MEMBER, service=True).service
    created = ada.create_token("ci")
    assert created.expires_at == service.clock.now() + 90 * DAY
    with pytest.raises(BadInput, match="to 366d"):
        ada.create_token("ci", expires_in=400 * DAY)
    with pytest.raises(BadInput, match="cannot have the admin role"):
        ada.put_user("ci", Role.ADMIN)
    with pytest.raises(Conflict, match="ci exists and is a service account"):
        ada.put_user("ci", Role.MEMBER, service=False)
    assert ada.put_user("ci", Role.VIEWER).service  # changing its role keeps what it is
    service.tokens["ci"] = created.token
    with pytest.raises(Forbidden, match="cannot create tokens"):
        service.client("ci").create_token()


def test_a_rotated_token_has_the_same_rights_and_the_old_one_expires(service):
    client = limited(service, "mel", scope=TokenScope.SUBMIT, expires_in=30 * DAY)
    old = client.me()
    service.clock.advance(10 * DAY)
    new = client.rotate_token(old.token_id, timedelta(hours=1))
    assert (new.scope, new.user) == (TokenScope.SUBMIT, "mel")
    assert new.expires_at == service.clock.now() + 30 * DAY
    with pytest.raises(Conflict, match=f"was replaced by {new.id}"):
        client.rotate_token(old.token_id, timedelta(days=7))
    service.clock.advance(timedelta(minutes=59))
    assert client.me().name == "mel"
    service.clock.advance(timedelta(minutes=2))
    with pytest.raises(Unauthorized, match="expired"):
        client.me()
    service.tokens["new"] = new.token
    assert service.client("new").me().token_id == new.id
    assert service.client("ada").audit(limit=1)[0].action is AuditAction.ROTATE_TOKEN


def test_a_limited_token_replaces_only_itself(service):
    other = service.client("mel").create_token(note="other")
    client = limited(service, "mel", scope=TokenScope.READ)
    with pytest.raises(Forbidden, match="can only replace itself"):
        client.rotate_token(other.id, timedelta(0))
    with pytest.raises(NotFound):
        client.rotate_token("mo-1", timedelta(0))
    with pytest.raises(Forbidden):
        client.create_token()


def test_an_expired_overlap_never_lengthens_a_token(service):
    client = limited(service, "mel", expires_in=timedelta(minutes=10))
    client.rotate_token(client.me().token_id, timedelta(days=7))
    service.clock.advance(timedelta(minutes=11))
    with service.http(service.tokens["limited"]) as http:
        assert http.get("/me").status_code == httpx.codes.UNAUTHORIZED


def test_of_concurrent_rotations_one_succeeds(service):
    token = service.client("mel").me().token_id
    before = len(service.store.tokens("mel"))

    def rotate(_) -> bool:
        try:
            service.client("mel").rotate_token(token, timedelta(hours=1))
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(6) as threads:
        assert sum(threads.map(rotate, range(6))) == 1
    assert len(service.store.tokens("mel")) == before + 1


def test_recording_the_use_of_a_token_does_not_undo_its_rotation(service):
    (token,) = service.store.tokens("mel")
    service.store.update_token(token.id, lambda known: replace(known, replaced_by="next"))
    auth.record_use(token, service.store, service.clock.now())
    assert service.store.tokens("mel")[0].replaced_by == "next"


@pytest.mark.parametrize("limit", ALLOWED)
def test_a_limited_token_of_an_admin_reads_no_preferences_of_others(service, limit):
    limited(service, "ada", **OPTIONS[limit])
    with service.http(service.tokens["limited"]) as http:
        assert http.get("/preferences").is_success
        assert http.get("/preferences", params={"user": "mel"}).status_code == 403
    with service.http(service.tokens["ada"]) as http:
        assert http.get("/preferences", params={"user": "mel"}).is_success


def test_errors_name_no_jobs_that_the_token_does_not_reach(service):
    service.submit("job-in", by="mel", name="mine")
    for number, owner in enumerate(("mo", "ada")):
        service.submit(f"abc-{number}", by=owner, name="secret-plan")
    limited(service, "mel", scope=TokenScope.SUBMIT)
    with service.http(service.tokens["limited"]) as http:
        for ref in ("secret-plam", "secret-plan", "abc"):
            answer = http.get(f"/jobs/{ref}")
            assert answer.status_code == 404 and "list them with" in answer.text, ref
            hint = answer.json()["error"]["message"].partition(repr(ref))[2]
            assert "secret" not in hint and "abc" not in hint
        assert "did you mean mine" in http.get("/jobs/mime").text


def test_a_token_creates_none_that_lasts_longer_than_itself(service):
    other = service.client("mel").create_token(note="forever")
    client = limited(service, "mel", expires_in=DAY)
    end = service.clock.now() + DAY
    assert client.create_token().expires_at == end
    assert client.create_token(expires_in=DAY / 2).expires_at == end - DAY / 2
    with pytest.raises(Forbidden, match="cannot create one that lasts longer"):
        client.create_token(expires_in=2 * DAY)
    with pytest.raises(Forbidden, match="cannot create one that lasts longer"):
        client.rotate_token(other.id, timedelta(0))
    assert service.client("mel").create_token().expires_at is None


def test_an_admin_token_that_expires_creates_none_for_others_that_lasts_longer(service):
    service.client("ada").put_user("ci", Role.MEMBER, service=True)
    client = limited(service, "ada", expires_in=DAY)
    for user in ("mo", "ci"):
        assert client.create_token(user).expires_at == service.clock.now() + DAY
        with pytest.raises(Forbidden, match="tpu token rotate"):
            client.create_token(user, expires_in=2 * DAY)
