"""Hosts whose provider could only hand them a word: it lets one agent in, once."""

from __future__ import annotations

import httpx
import pytest

from tests.service.harness import SECRET
from tpufleet.model.fleet.agent_protocol import SliceTokenReply, SliceTokenRequest
from tpufleet.model.fleet.hosts import HostId
from tpufleet.model.fleet.slices import SliceId, SliceState
from tpufleet.model.values.encoding import from_json, to_json
from tpufleet.service.transport import auth

NONCE = "n" * 32


def enter(service, host: str, nonce: str = NONCE, word: str | None = None) -> httpx.Response:
    slice_id = SliceId(host.partition("/")[0])
    with service.http(word or auth.bootstrap_token(SECRET, slice_id)) as http:
        return http.post(
            "/agent/register", content=to_json(SliceTokenRequest(host_id=HostId(host), nonce=nonce))
        )


def test_each_host_of_a_slice_gets_its_token_and_gets_it_again_with_its_own_nonce(service):
    service.add_slice("s1", None)
    for host in ("s1/0", "s1/1", "s1/0"):
        answer = enter(service, host, nonce=f"{host} {NONCE}")
        assert from_json(answer.content, SliceTokenReply).token == auth.slice_token(
            SECRET, SliceId("s1")
        )


def test_nobody_is_let_in_for_a_host_that_has_an_agent(service):
    service.add_slice("s1", None)
    assert enter(service, "s1/0").status_code == 200
    refused = enter(service, "s1/0", nonce="another nonce altogether")
    assert refused.status_code == 403 and "already bound to another agent" in refused.text


@pytest.mark.parametrize(
    ("host", "word", "status"),
    [
        ("s1/0", "guessed", 401),
        ("s1/0", auth.slice_token(SECRET, SliceId("s1")), 401),
        ("s1/0", auth.bootstrap_token(SECRET, SliceId("s2")), 401),
        ("s2/0", None, 401),
        ("gone/0", None, 401),
        ("s1/99", None, 400),
        ("nonsense", "x", 401),
    ],
)
def test_who_has_no_business_here_is_turned_away(service, host, word, status):
    service.add_slice("s1", None)
    service.add_slice("gone", None, state=SliceState.GONE)
    assert enter(service, host, word=word).status_code == status


def test_a_word_is_no_token(service):
    service.add_slice("s1", None)
    with service.http(auth.bootstrap_token(SECRET, SliceId("s1"))) as http:
        answer = http.post("/agent/heartbeat", content=to_json(service.make_heartbeat("s1/0")))
    assert answer.status_code == 401


def test_a_nonce_that_could_be_guessed_is_refused(service):
    service.add_slice("s1", None)
    assert enter(service, "s1/0", nonce="short").status_code == 400
