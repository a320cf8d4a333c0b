"""Who may call what: every route against every kind of caller."""

from __future__ import annotations

import re

import pytest

from tests.service.harness import ServiceHarness
from tpufleet.client.fleet import FleetClient
from tpufleet.errors import Conflict, Forbidden, NotFound, Unauthorized
from tpufleet.model.encoding import to_json
from tpufleet.model.slices import SliceId
from tpufleet.model.users import Role
from tpufleet.service import auth
from tpufleet.service.api.routes import ROUTES
from tpufleet.service.routing import SLICE_TOKEN, Route

RANK = [Role.VIEWER, Role.MEMBER, Role.ADMIN]
CALLERS = {"vic": Role.VIEWER, "mel": Role.MEMBER, "ada": Role.ADMIN}


def name_of(route: Route) -> str:
    return f"{route.method} {route.path}"


def ask(world: ServiceHarness, route: Route, token: str | None) -> int:
    """The status of a call that goes no further than it may: it names nothing that exists."""
    path = re.sub(r"\{\w+\}", "nothing", route.path)
    if "stream" in path:
        path += "?nonsense=1"  # an open stream would never answer
    with world.http(token) as http:
        return http.request(route.method, path).status_code


def token_of(world: ServiceHarness, caller: str) -> str | None:
    tokens = {"nobody": None, "stranger": auth.new_token(), "slice": world.slice_token("s1")}
    return tokens[caller] if caller in tokens else world.tokens[caller]


@pytest.mark.parametrize("route", ROUTES, ids=name_of)
def test_every_route_is_closed_to_whoever_has_no_right_to_it(standing, route):
    allowed = {
        caller
        for caller, role in CALLERS.items()
        if route.role != SLICE_TOKEN and RANK.index(role) >= RANK.index(route.role)
    }
    for caller in ("nobody", "stranger", "slice", *CALLERS):
        status = ask(standing, route, token_of(standing, caller))
        if caller in allowed:
            assert status not in (401, 403), caller
        elif caller in CALLERS and route.role != SLICE_TOKEN:
            assert status == 403, caller
        else:
            assert status == 401, caller


@pytest.mark.parametrize(
    "path", ["/", "/api/v1", "/api/v1/nothing", "/api/v1/agent/nothing", "/docs", "/api/v1/jobs/"]
)
def test_an_unknown_path_tells_a_stranger_nothing(standing, path):
    with standing.http() as http:
        assert http.get(standing.url + path).status_code == 401
        bad = {"Authorization": "Bearer tpf_wrong"}
        assert http.get(standing.url + path, headers=bad).status_code == 401
        good = {"Authorization": f"Bearer {standing.tokens['vic']}"}
        assert http.get(standing.url + path, headers=good).status_code == 404


def test_a_wrong_verb_is_refused_in_words(standing):
    with standing.http(standing.tokens["ada"]) as http:
        answer = http.patch("/jobs")
    assert answer.status_code == 405
    assert "openapi.json" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Basic abc", "tpf_x", "Bearer \xff\xfe", "bearer tpf_"]
)
def test_a_malformed_header_is_no_token(standing, header):
    with standing.http() as http:
        answer = http.get("/me", headers={"Authorization": header.encode("latin-1")})
    assert answer.status_code == 401
    assert answer.json()["error"]["kind"] == "Unauthorized"


def test_a_slice_token_speaks_for_its_own_slice_only(world):
    world.slice("s1", None)
    world.slice("s2", None)
    with world.http(world.slice_token("s2")) as http:
        answer = http.post("/agent/beat", content=to_json(world.beat_of("s1/0")))
    assert answer.status_code == 401


def test_slice_tokens_follow_from_the_secret_and_differ_by_slice():
    one = auth.slice_token(b"secret", SliceId("a"))
    assert one == auth.slice_token(b"secret", SliceId("a"))
    assert one != auth.slice_token(b"secret", SliceId("b"))
    assert one != auth.slice_token(b"another", SliceId("a"))
    assert auth.is_slice_token(one, b"secret", SliceId("a"))


def test_a_token_that_was_withdrawn_is_refused_at_once(world):
    made = world.client("mel").create_token(note="laptop")
    with FleetClient(world.url, made.token) as laptop:
        assert laptop.me().name == "mel"
        world.client("mel").revoke_token(made.id)
        with pytest.raises(Unauthorized):
            laptop.me()


def test_the_hash_of_a_token_is_all_that_is_kept(world):
    made = world.client("mel").create_token()
    kept = repr(world.store.tokens())
    assert made.token not in kept
    assert made.token.startswith("tpf_")
    shown = world.client("ada").tokens()
    assert {row.user for row in shown} >= {"mel", "ada"}
    assert not any(hasattr(row, "hash") for row in shown)


def test_a_member_sees_and_drops_their_own_tokens_only(world):
    assert {row.user for row in world.client("mel").tokens(user="ada")} == {"mel"}
    with pytest.raises(NotFound):
        world.client("mel").revoke_token("ada-1")
    with pytest.raises(Forbidden):
        world.client("mel").create_token(user="ada")


def test_the_use_of_a_token_is_noted(world):
    world.client("mel").me()
    used = {token.user: token.last_used_at for token in world.store.tokens()}
    assert used["mel"] == world.clock.now()
    assert used["vic"] is None


def test_a_token_that_is_withdrawn_while_in_use_does_not_come_back(world):
    token = next(token for token in world.store.tokens() if token.user == "mel")
    world.store.drop_token(token.id)
    auth.record_use(token, world.store, world.clock.now())
    with pytest.raises(Unauthorized):
        world.client("mel").me()


def test_dropping_a_user_ends_their_tokens(world):
    world.client("ada").delete_user("mel")
    with pytest.raises(Unauthorized):
        world.client("mel").me()


def test_a_new_role_counts_from_the_next_call(world):
    world.client("ada").put_user("vic", Role.MEMBER)
    assert world.client("vic").me().role is Role.MEMBER


def test_the_only_admin_can_neither_go_nor_step_down(world):
    with pytest.raises(Conflict, match="only admin"):
        world.client("ada").delete_user("ada")
    with pytest.raises(Conflict, match="only admin"):
        world.client("ada").put_user("ada", Role.VIEWER)
