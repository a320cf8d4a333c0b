"""Cookies of browsers: what they permit, and what they do not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from tpufleet.errors import Forbidden, Unauthorized
from tpufleet.service.people import user_commands
from tpufleet.service.transport import event_streams
from tpufleet.service.web import sessions
from tpufleet.stores.memory import MemoryStore
from tpufleet.stores.open_store import open_store

SECRET, NOW = b"s" * 32, datetime(2026, 1, 1, tzinfo=UTC)


def test_a_cookie_lasts_a_week_and_cannot_be_changed():
    cookie = sessions.sign_cookie(SECRET, "abc", "s1", NOW)
    assert sessions.read_cookie(SECRET, cookie, NOW + timedelta(days=6)) == ("abc", "s1")
    payload, _, signature = cookie.partition(".")
    for bad in (
        cookie + "x",
        payload,
        f"{payload}.",
        f".{signature}",
        "",
        "é",
        "a|b.c",
        cookie[1:],
    ):
        with pytest.raises(Unauthorized):
            sessions.read_cookie(SECRET, bad, NOW)
    with pytest.raises(Unauthorized):
        sessions.read_cookie(SECRET, cookie, NOW + timedelta(days=8))
    with pytest.raises(Unauthorized):
        sessions.read_cookie(b"another" * 5, cookie, NOW)


def test_a_link_is_no_cookie_and_works_once():
    links = sessions.LoginLinks(SECRET, MemoryStore())
    code = links.create("abc", NOW)
    with pytest.raises(Unauthorized):
        sessions.read_cookie(SECRET, code.removeprefix(sessions.LINK_PREFIX), NOW)
    assert links.redeem(code, NOW + timedelta(minutes=1)) == "abc"
    with pytest.raises(Unauthorized):
        links.redeem(code, NOW + timedelta(minutes=1))
    with pytest.raises(Unauthorized):
        links.redeem(code.replace(".", "=."), NOW + timedelta(minutes=1))  # the same code
    with pytest.raises(Unauthorized):
        links.redeem(links.create("abc", NOW), NOW + timedelta(minutes=3))


def test_a_link_works_once_on_all_servers_of_a_store(tmp_path):
    url = f"sqlite:///{tmp_path}/fleet.db"
    stores = [open_store(url), open_store(url)]
    code = sessions.LoginLinks(SECRET, stores[0]).create("abc", NOW)
    barrier = threading.Barrier(8, timeout=900)

    def redeem(number: int) -> bool:
        links = sessions.LoginLinks(SECRET, stores[number % 2])
        barrier.wait()
        try:
            return links.redeem(code, NOW) == "abc"
        except Unauthorized:
            return False

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(redeem, range(8))) == 1
    for store in stores:
        store.close()


def test_records_of_used_links_are_deleted_once_no_server_accepts_the_links():
    store = MemoryStore()
    links = sessions.LoginLinks(SECRET, store)
    for hours in (0, 0, 2):
        moment = NOW + timedelta(hours=hours)
        links.redeem(links.create("abc", moment), moment)
    (left,) = store.objects("")
    assert left.at == NOW + timedelta(hours=2)
    with pytest.raises(Unauthorized):
        links.redeem("tpl_made-up.code", NOW)
    assert len(store.objects("")) == 1, "only links of this server are recorded"


def test_a_link_that_was_used_is_refused_after_a_restart(service):
    code = service.client("ada").login_link().path.removeprefix("/#/login/")
    link = {"Authorization": f"Bearer {code}"}
    with service.http() as http:
        assert http.post("/session", headers=link).status_code == 200
    service.stop()
    service.start()
    with service.http() as http:
        assert http.post("/session", headers=link).status_code == 401


def test_a_change_needs_the_token_of_the_page():
    cookie = sessions.sign_cookie(SECRET, "abc", "s1", NOW)
    sessions.check_csrf(SECRET, cookie, sessions.csrf_token(SECRET, cookie))
    other = sessions.sign_cookie(SECRET, "abd", "s1", NOW)
    for sent in (None, "", "x", sessions.csrf_token(SECRET, other)):
        with pytest.raises(Forbidden):
            sessions.check_csrf(SECRET, cookie, sent)


@pytest.mark.parametrize(
    "public_url, host, secure",
    [
        ("https://fleet.example", "fleet.example", True),
        ("https://fleet.example", "Fleet.Example:443", True),
        ("https://fleet.example", "127.0.0.1", False),
        ("http://fleet.example", "fleet.example", False),
        ("", "fleet.example", False),
    ],
)
def test_a_cookie_is_for_encrypted_connections_behind_a_proxy_too(
    service, public_url, host, secure
):
    """The proxy speaks plain HTTP to this server, and tells nothing of the browser's connection."""
    service.stop()
    service.start(public_url=public_url)
    with service.http() as http:
        answer = http.post("/session", headers={**bearer(service), "Host": host})
    assert answer.status_code == 200 and ("Secure" in answer.headers["set-cookie"]) == secure


def bearer(service) -> dict[str, str]:
    return {"Authorization": f"Bearer {service.tokens['ada']}"}


def test_a_session_over_http(service):
    url, token = service.url, service.tokens["ada"]
    with httpx.Client(base_url=f"{url}/api/v1", verify=False, timeout=900) as browser:
        assert browser.get("/me").status_code == 401
        answer = browser.post("/session", headers={"Authorization": f"Bearer {token}"})
        assert answer.status_code == 200
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=strict" in cookie
        assert browser.get("/me").json()["name"] == "ada"
        assert browser.post("/tokens", json={"note": "x"}).status_code == 403
        assert browser.get("/session").json()["csrf"] == "", "the cookie alone changes nothing"
        csrf = {"X-Tpufleet-Csrf": answer.json()["csrf"]}
        assert browser.post("/tokens", json={"note": "x"}, headers=csrf).status_code == 200
        # A revoked token ends its sessions, and no session is a token of an agent.
        assert browser.post("/agent/heartbeat", content=b"{}", headers=csrf).status_code == 401
        mine = [
            row["id"] for row in browser.get("/tokens").json()["tokens"] if row["user"] == "ada"
        ]
        assert "ada-1" in mine
        browser.delete("/tokens/ada-1", headers=csrf)
        assert browser.get("/me").status_code == 401


@contextmanager
def log_in(service, name="ada") -> Iterator[httpx.Client]:
    token = {"Authorization": f"Bearer {service.tokens[name]}"}
    with httpx.Client(base_url=f"{service.url}/api/v1", verify=False, timeout=900) as browser:
        csrf = browser.post("/session", headers=token).json()["csrf"]
        browser.headers["X-Tpufleet-Csrf"] = csrf
        yield browser


def session_ids(service, name="ada") -> list[str]:
    return [row.id for row in service.client("ada").tokens(name) if row.session_of is not None]


def test_a_copied_cookie_dies_with_the_logout_and_other_sessions_live_on(service):
    with (
        log_in(service) as browser,
        log_in(service) as other,
        httpx.Client(verify=False, timeout=900) as thief,
    ):
        thief.base_url = browser.base_url
        thief.headers["Cookie"] = f"{sessions.COOKIE}={browser.cookies[sessions.COOKIE]}"
        assert thief.get("/me").status_code == 200
        assert browser.delete("/session").status_code == 200
        assert thief.get("/me").status_code == 401
        assert other.get("/me").status_code == 200
    assert len(session_ids(service)) == 1


def test_sessions_are_listed_with_the_tokens_and_can_be_revoked(service):
    with log_in(service, "mel") as browser:
        [session] = session_ids(service, "mel")
        [row] = [row for row in browser.get("/tokens").json()["tokens"] if row["id"] == session]
        assert (row["note"], row["session_of"]) == ("browser session", "mel-1")
        assert browser.post(f"/tokens/{session}/rotate", json={}).status_code == 409
        service.client("mel").revoke_token(session)
        assert browser.get("/me").status_code == 401
    assert service.client("mel").me().name == "mel"


def test_a_revoked_token_takes_its_sessions_along(service):
    with log_in(service, "mel") as browser:
        service.client("ada").revoke_token("mel-1")
        assert browser.get("/me").status_code == 401
    assert session_ids(service, "mel") == []


def test_the_id_of_a_session_is_no_token(service):
    with log_in(service):
        [session] = session_ids(service)
    for text in (session, f"session:{session}"):
        with service.http(text) as http:
            assert http.get("/me").status_code == 401


def test_a_token_that_is_made_in_a_browser_outlives_its_session(service):
    with log_in(service) as browser:
        assert browser.post("/tokens", json={"note": "x"}).json().get("expires_at") is None


@pytest.mark.slow
def test_the_oldest_session_ends_when_there_are_too_many(service):
    with log_in(service) as first:
        for _ in range(user_commands.MAX_SESSIONS):
            service.clock.advance(timedelta(seconds=1))
            with log_in(service):
                continue
        assert first.get("/me").status_code == 401
    assert len(session_ids(service)) == user_commands.MAX_SESSIONS


@pytest.mark.parametrize("path", ["/stream", "/jobs/job-1/logs/stream"])
def test_a_stream_ends_soon_after_its_token_is_revoked(service, path):
    service.submit("job-1")
    with service.http(service.tokens["mo"]) as http, http.stream("GET", path) as answer:
        chunks = answer.iter_bytes()
        assert answer.status_code == 200 and next(chunks)
        service.client("ada").revoke_token("mo-1")
        revoked_at = time.monotonic()
        for _ in chunks:  # ends, instead of waiting for more without end
            continue
        # On a busy machine; other streams are closed after this time, or never.
        assert time.monotonic() - revoked_at < 10 * event_streams.KEEP_ALIVE_SECONDS


def test_addresses_are_not_taken_from_headers(service):
    forged = {"X-Forwarded-For": "9.9.9.9"}
    with service.http(service.tokens["ada"]) as http:
        http.post("/tokens", json={"note": "x"}, headers=forged).raise_for_status()
    assert service.client("ada").audit()[0].address == "127.0.0.1"
