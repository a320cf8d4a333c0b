"""Who may call what: every route against every kind of caller."""

from __future__ import annotations

import re
import socket
from datetime import timedelta

import pytest

from tests.service.harness import ServiceHarness
from tpufleet.client.fleet import FleetClient
from tpufleet.errors import BadInput, Conflict, Forbidden, NotFound, Unauthorized, Unreachable
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.inbox import InboxMessageKind
from tpufleet.model.people.users import Role
from tpufleet.model.values.encoding import to_json
from tpufleet.service.api.routes import ROUTES
from tpufleet.service.transport import auth
from tpufleet.service.transport.routing import SLICE_TOKEN, Route
from tpufleet.stores.memory import MemoryStore

RANK = [Role.VIEWER, Role.MEMBER, Role.ADMIN]
CALLERS = {"vic": Role.VIEWER, "mel": Role.MEMBER, "ada": Role.ADMIN}


def name_of(route: Route) -> str:
    return f"{route.method} {route.path}"


def ask(service: ServiceHarness, route: Route, token: str | None) -> int:
    """The status of a call that goes no further than it may: it names nothing that exists."""
    path = re.sub(r"\{\w+\}", "nothing", route.path)
    if "stream" in path:
        path += "?nonsense=1"  # an open stream would never answer
    with service.http(token) as http:
        return http.request(route.method, path).status_code


def token_of(service: ServiceHarness, caller: str) -> str | None:
    tokens = {"nobody": None, "stranger": auth.new_token(), "slice": service.slice_token("s1")}
    return tokens[caller] if caller in tokens else service.tokens[caller]


@pytest.mark.parametrize("route", ROUTES, ids=name_of)
def test_every_route_is_closed_to_whoever_has_no_right_to_it(shared_service, route):
    allowed = {
        caller
        for caller, role in CALLERS.items()
        if route.role != SLICE_TOKEN and RANK.index(role) >= RANK.index(route.role)
    }
    for caller in ("nobody", "stranger", "slice", *CALLERS):
        status = ask(shared_service, route, token_of(shared_service, caller))
        if caller in allowed:
            assert status not in (401, 403), caller
        elif caller in CALLERS and route.role != SLICE_TOKEN:
            assert status == 403, caller
        else:
            assert status == 401, caller


@pytest.mark.parametrize(
    "path", ["/api/v1", "/api/v1/nothing", "/api/v1/agent/nothing", "/docs", "/api/v1/jobs/"]
)
def test_an_unknown_path_tells_a_stranger_nothing(shared_service, path):
    with shared_service.http() as http:
        assert http.get(shared_service.url + path).status_code == 401
        bad = {"Authorization": "Bearer tpf_wrong"}
        assert http.get(shared_service.url + path, headers=bad).status_code == 401
        good = {"Authorization": f"Bearer {shared_service.tokens['vic']}"}
        assert http.get(shared_service.url + path, headers=good).status_code == 404


def test_a_wrong_verb_is_refused_in_words(shared_service):
    with shared_service.http(shared_service.tokens["ada"]) as http:
        answer = http.patch("/jobs")
    assert answer.status_code == 405
    assert "openapi.json" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "kind"),
    [
        ("GET", "/jobs/check", "no job"),  # another method than the route of that name
        ("GET", "/jobs/%7Bref%7D", "no job"),
        ("GET", "/jobs//logs", "no route"),
        ("GET", "/jobs/a/b", "no route"),
        ("GET", "", "no route"),
    ],
)
def test_a_path_that_resembles_another_route(shared_service, method, path, kind):
    with shared_service.http(shared_service.tokens["ada"]) as http:
        answer = http.request(method, path)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].startswith(kind)


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Basic abc", "tpf_x", "Bearer \xff\xfe", "bearer tpf_"]
)
def test_a_malformed_header_is_no_token(shared_service, header):
    with shared_service.http() as http:
        answer = http.get("/me", headers={"Authorization": header.encode("latin-1")})
    assert answer.status_code == 401
    assert answer.json()["error"]["kind"] == "Unauthorized"


AMBIGUOUS = {
    # RFC 9112, section 6.3: a proxy that reads the length sees one request, we see two.
    "length and chunks": "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two tokens": "Authorization: Bearer another\r\n\r\n",
}


@pytest.mark.parametrize("path", ["/api/v1/me", "/healthz", "/metrics", "/"])
@pytest.mark.parametrize("rest", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_a_request_that_a_proxy_may_read_differently_is_refused(shared_service, rest, path):
    token, service = shared_service.tokens["mel"], shared_service
    head = f"Host: fleet\r\nAuthorization: Bearer {token}\r\n"
    hidden = f"GET /api/v1/me HTTP/1.1\r\n{head}\r\n"
    with socket.create_connection(("127.0.0.1", service.port), timeout=900) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\n{head}{rest}{hidden}".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1, "what follows is not read"


def test_a_slice_token_speaks_for_its_own_slice_only(service):
    service.add_slice("s1", None)
    service.add_slice("s2", None)
    with service.http(service.slice_token("s2")) as http:
        answer = http.post("/agent/heartbeat", content=to_json(service.make_heartbeat("s1/0")))
    assert answer.status_code == 401


def test_slice_tokens_follow_from_the_secret_and_differ_by_slice():
    one = auth.slice_token(b"secret", SliceId("a"))
    assert one == auth.slice_token(b"secret", SliceId("a"))
    assert one != auth.slice_token(b"secret", SliceId("b"))
    assert one != auth.slice_token(b"another", SliceId("a"))
    assert auth.is_slice_token(one, b"secret", SliceId("a"))


def test_a_token_that_was_withdrawn_is_refused_at_once(service):
    new_token = service.client("mel").create_token(note="laptop")
    with FleetClient(service.url, new_token.token) as laptop:
        assert laptop.me().name == "mel"
        service.client("mel").revoke_token(new_token.id)
        with pytest.raises(Unauthorized):
            laptop.me()


def test_what_was_created_with_a_stolen_token_is_revoked_with_it(service):
    mel, stolen = service.client("mel"), service.client("mel").create_token(note="laptop")
    kept = mel.create_token(note="ci")
    with FleetClient(service.url, stolen.token) as thief:
        child = thief.create_token(note="hidden")
    with FleetClient(service.url, child.token) as thief:
        grandchild = thief.rotate_token(child.id, timedelta(hours=1))
    ended = mel.revoke_token(stolen.id)
    assert {row.id for row in ended.revoked} == {stolen.id, child.id, grandchild.id}
    for token in (stolen, child, grandchild):
        with FleetClient(service.url, token.token) as thief, pytest.raises(Unauthorized):
            thief.me()
    with FleetClient(service.url, kept.token) as ci:
        assert ci.me().name == "mel"


def test_a_token_does_not_outlive_its_ancestor_because_its_parent_was_revoked_first(service):
    mel, stolen = service.client("mel"), service.client("mel").create_token(note="laptop")
    with FleetClient(service.url, stolen.token) as thief:
        child = thief.create_token()
    with FleetClient(service.url, child.token) as thief:
        grandchild = thief.create_token()
    with FleetClient(service.url, grandchild.token) as thief:
        assert [row.id for row in thief.revoke_token(child.id).revoked] == [child.id]
        last = thief.create_token()
    ended = mel.revoke_token(stolen.id)
    assert {row.id for row in ended.revoked} == {stolen.id, grandchild.id, last.id}
    with FleetClient(service.url, grandchild.token) as thief, pytest.raises(Unauthorized):
        thief.me()


def test_a_token_stays_valid_when_the_one_that_it_replaced_is_revoked_with_it(service):
    old = service.client("mel").create_token()
    with FleetClient(service.url, old.token) as client:
        new = client.rotate_token(old.id, timedelta(hours=1))
    with FleetClient(service.url, new.token) as client:
        assert [row.id for row in client.revoke_token(old.id).revoked] == [old.id]
        assert client.me().name == "mel"


def test_revoking_an_admins_token_names_what_it_created_for_others(service):
    ada = service.client("ada")
    laptop = ada.create_token()
    with FleetClient(service.url, laptop.token) as client:
        for_mel = client.create_token(user="mel")
    with FleetClient(service.url, for_mel.token) as client:
        of_mel = client.create_token()
    ended = ada.revoke_token(laptop.id)
    assert [row.id for row in ended.revoked] == [laptop.id]
    assert {row.id for row in ended.remaining} == {for_mel.id, of_mel.id}
    revoked = {row.id for row in ada.revoke_tokens("mel").revoked}
    assert revoked >= {for_mel.id, of_mel.id}
    with pytest.raises(Unauthorized):
        service.client("mel").me()


def test_a_user_revokes_all_their_tokens_but_the_one_in_use(service):
    mel = service.client("mel")
    others = {mel.create_token().id for _ in range(3)}
    assert {row.id for row in mel.revoke_tokens("mel").revoked} == others
    assert mel.me().name == "mel"
    with pytest.raises(Forbidden):
        mel.revoke_tokens("ada")
    with pytest.raises(NotFound):
        service.client("ada").revoke_tokens("nobody-here")


def test_the_hash_of_a_token_is_all_that_is_kept(service):
    new_token = service.client("mel").create_token()
    kept = repr(service.store.tokens())
    assert new_token.token not in kept
    assert new_token.token.startswith("tpf_")
    shown = service.client("ada").tokens()
    assert {row.user for row in shown} >= {"mel", "ada"}
    assert not any(hasattr(row, "hash") for row in shown)


def test_a_member_sees_and_drops_their_own_tokens_only(service):
    assert {row.user for row in service.client("mel").tokens(user="ada")} == {"mel"}
    with pytest.raises(NotFound):
        service.client("mel").revoke_token("ada-1")
    with pytest.raises(Forbidden):
        service.client("mel").create_token(user="ada")


def test_the_use_of_a_token_is_noted(service):
    service.client("mel").me()
    used = {token.user: token.last_used_at for token in service.store.tokens()}
    assert used["mel"] == service.clock.now()
    assert used["vic"] is None


def test_a_token_that_is_withdrawn_while_in_use_does_not_come_back(service):
    token = next(token for token in service.store.tokens() if token.user == "mel")
    service.store.delete_token(token.id)
    auth.record_use(token, service.store, service.clock.now())
    with pytest.raises(Unauthorized):
        service.client("mel").me()


def test_dropping_a_user_ends_their_tokens(service):
    service.client("ada").delete_user("mel")
    with pytest.raises(Unauthorized):
        service.client("mel").me()


def test_a_new_role_counts_from_the_next_call(service):
    service.client("ada").put_user("vic", Role.MEMBER)
    assert service.client("vic").me().role is Role.MEMBER


def test_names_of_users_differ_in_more_than_case(service):
    with pytest.raises(Conflict, match="MEL differs from user mel only in case"):
        service.client("ada").put_user("MEL", Role.MEMBER)
    assert service.store.user("MEL") is None


def test_the_only_admin_can_neither_go_nor_step_down(service):
    with pytest.raises(Conflict, match="only admin"):
        service.client("ada").delete_user("ada")
    with pytest.raises(Conflict, match="only admin"):
        service.client("ada").put_user("ada", Role.VIEWER)


def test_an_expired_token_is_refused(service):
    lifetime = timedelta(days=30)
    new_token = service.client("mel").create_token(note="laptop", expires_in=lifetime)
    assert new_token.expires_at == service.clock.now() + lifetime
    with FleetClient(service.url, new_token.token) as laptop:
        service.clock.advance(lifetime - timedelta(seconds=1))
        assert laptop.me().name == "mel"
        service.clock.advance(timedelta(seconds=1))
        with pytest.raises(Unauthorized, match=f"token {new_token.id} expired on"):
            laptop.me()
    shown = {row.id: row.expires_at for row in service.client("ada").tokens()}
    assert shown[new_token.id] == new_token.expires_at and shown["mel-1"] is None


@pytest.mark.parametrize(
    "lifetime", [timedelta(0), timedelta(days=-1), timedelta(days=999_999_999)]
)
def test_the_lifetime_of_a_token_is_checked(service, lifetime):
    with pytest.raises(BadInput, match="expires_in"):
        service.client("mel").create_token(expires_in=lifetime)


def test_the_jobs_of_a_deleted_user_are_cancelled(service):
    service.submit("job-1")
    service.submit("job-2")
    service.end_job("job-2")
    service.submit("job-3", by="mo")
    service.client("ada").delete_user("mel")
    cancelled = [
        message.job_id
        for message in service.store.inbox()
        if message.kind is InboxMessageKind.CANCEL
    ]
    assert set(cancelled) == {"job-1"}


def test_a_database_error_is_not_told_to_callers(tmp_path):
    """Nor to strangers, whose token cannot be looked up."""
    secret = "connection to db.internal:5432 as fleet failed"

    class BrokenStore(MemoryStore):
        broken = False

        def token_and_user(self, digest):
            if self.broken:
                raise Unreachable(secret)
            return super().token_and_user(digest)

        def jobs(self, query):
            raise Unreachable(secret)

    service = ServiceHarness(BrokenStore(), tmp_path)
    service.start()
    try:
        with service.http(service.tokens["mel"]) as http:
            answers = [http.get("/jobs")]
            service.store.broken = True
            answers.append(http.get("/jobs"))
    finally:
        service.close()
    assert [answer.status_code for answer in answers] == [503, 503]
    assert all("db.internal" not in answer.text for answer in answers)
