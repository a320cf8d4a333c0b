"""Cookies of browsers: what they permit, and what they do not."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import httpx
import pytest

from tpufleet.errors import Forbidden, NotFound, Unauthorized
from tpufleet.service import event_streams
from tpufleet.service.web import sessions

SECRET, NOW = b"s" * 32, datetime(2026, 1, 1, tzinfo=UTC)


def test_a_cookie_lasts_a_week_and_cannot_be_changed():
    cookie = sessions.sign_cookie(SECRET, "abc", "s1", NOW)
    read = sessions.read_cookie(SECRET, cookie, NOW + timedelta(days=6))
    assert (read.token_hash, read.session_id) == ("abc", "s1")
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
    links = sessions.LoginLinks(SECRET)
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


def test_a_change_needs_the_token_of_the_page():
    cookie = sessions.sign_cookie(SECRET, "abc", "s1", NOW)
    sessions.check_csrf(SECRET, cookie, sessions.csrf_token(SECRET, cookie))
    other = sessions.sign_cookie(SECRET, "abc", "s2", NOW)
    for sent in (None, "", "x", sessions.csrf_token(SECRET, other)):
        with pytest.raises(Forbidden):
            sessions.check_csrf(SECRET, cookie, sent)


def test_a_session_over_http(service):
    url, token = service.url, service.tokens["ada"]
    with httpx.Client(base_url=f"{url}/api/v1") as browser:
        assert browser.get("/me").status_code == 401
        answer = browser.post("/session", headers={"Authorization": f"Bearer {token}"})
        assert answer.status_code == 200
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=strict" in cookie
        assert browser.get("/me").json()["name"] == "ada"
        assert browser.post("/tokens", json={"note": "x"}).status_code == 403
        csrf = {"X-Tpufleet-Csrf": browser.get("/session").json()["csrf"]}
        assert browser.post("/tokens", json={"note": "x"}, headers=csrf).status_code == 200
        # A revoked token ends its sessions, and no session is a token of an agent.
        assert browser.post("/agent/beat", content=b"{}", headers=csrf).status_code == 401
        mine = [
            row["id"] for row in browser.get("/tokens").json()["tokens"] if row["user"] == "ada"
        ]
        assert "ada-1" in mine
        browser.delete("/tokens/ada-1", headers=csrf)
        assert browser.get("/me").status_code == 401


def test_a_stream_ends_when_its_token_is_revoked(service, monkeypatch):
    monkeypatch.setattr(event_streams, "RECHECK_SECONDS", 0.05)
    with service.http(service.tokens["mo"]) as http, http.stream("GET", "/stream") as answer:
        chunks = answer.iter_bytes()
        assert b"connected" in next(chunks)
        service.client("ada").revoke_token("mo-1")
        for _ in chunks:  # ends, instead of waiting for events without end
            continue


def test_addresses_are_not_taken_from_headers(service):
    forged = {"X-Forwarded-For": "9.9.9.9"}
    with service.http(service.tokens["ada"]) as http:
        http.post("/tokens", json={"note": "x"}, headers=forged).raise_for_status()
    assert service.client("ada").audit()[0].address == "127.0.0.1"


def log_in(service, name: str) -> httpx.Client:
    browser = httpx.Client(base_url=f"{service.url}/api/v1", headers={"User-Agent": f"b-{name}"})
    token = {"Authorization": f"Bearer {service.tokens[name]}"}
    browser.headers["X-Tpufleet-Csrf"] = browser.post("/session", headers=token).json()["csrf"]
    return browser


def test_a_session_that_was_ended_cannot_be_used_again(service):
    with log_in(service, "mel") as browser:
        cookie = browser.cookies[sessions.COOKIE]
        assert browser.delete("/session").status_code == 200
        browser.cookies.set(sessions.COOKIE, cookie)  # a copy of it, in another program
        assert browser.get("/me").status_code == 401


def test_users_see_and_end_their_own_sessions_and_admins_all(service):
    ada, mel, mo = (service.client(name) for name in ("ada", "mel", "mo"))
    with log_in(service, "mel") as browser, log_in(service, "mo"):
        (mine,) = mel.sessions()
        assert (mine.user, mine.browser, mine.address) == ("mel", "b-mel", "127.0.0.1")
        assert browser.get("/sessions").json()["current"] == mine.id
        assert {each.user for each in ada.sessions()} == {"mel", "mo"}
        with pytest.raises(NotFound):
            mo.end_session(mine.id)
        ada.end_session(mine.id)
        assert browser.get("/me").status_code == 401
        assert mel.sessions() == ()
        ada.revoke_token("mo-1")
        assert ada.sessions() == ()


def test_a_stream_ends_with_its_session(service, monkeypatch):
    monkeypatch.setattr(event_streams, "RECHECK_SECONDS", 0.05)
    with log_in(service, "mel") as browser, browser.stream("GET", "/stream") as answer:
        chunks = answer.iter_bytes()
        assert b"connected" in next(chunks)
        service.client("ada").end_session(service.client("mel").sessions()[0].id)
        for _ in chunks:
            continue
