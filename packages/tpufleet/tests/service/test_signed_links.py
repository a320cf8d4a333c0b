"""Signed links: one file of one job, without a token, until they expire."""

from __future__ import annotations

from datetime import timedelta

import httpx
import pytest

from tests.service.harness import ServiceHarness
from tpufleet.errors import BadInput, Forbidden
from tpufleet.model.people.users import TokenScope
from tpufleet.service.web.sessions import CSRF_HEADER

DAY = timedelta(days=1)


@pytest.fixture
def job(service: ServiceHarness) -> ServiceHarness:
    service.submit("job-1", by="mel")
    service.add_slice("s1", "job-1")
    service.add_attempt("job-1", 0, "s1")
    with service.http(service.slice_token("s1")) as http:
        answer = http.post(
            "/agent/results", params={"attempt": "job-1.0", "host": "s1/0"}, content=b"42"
        )
        assert answer.status_code == 200
    return service


def read(service: ServiceHarness, url: str) -> httpx.Response:
    return httpx.get(f"http://127.0.0.1:{service.port}{url}", verify=False, timeout=900)


def test_a_link_reads_its_file_without_a_token_until_it_expires(job):
    link = job.client("mel").create_link("job-1", "result", DAY)
    assert link.expires_at == job.clock.now() + DAY
    assert read(job, link.path).content == b"42"
    job.clock.advance(DAY + timedelta(seconds=1))
    answer = read(job, link.path)
    assert answer.status_code == 401 and "the link expired on" in answer.json()["error"]["message"]


@pytest.mark.parametrize("resource", ["logs", "result"])
def test_a_browser_does_not_guess_the_type_of_a_linked_file(job, resource):
    link = job.client("mel").create_link("job-1", resource, DAY)
    assert read(job, link.path).headers["X-Content-Type-Options"] == "nosniff"


def test_a_link_takes_the_parameters_of_its_route(job):
    link = job.client("mel").create_link("job-1", "logs", DAY)
    assert read(job, f"{link.path}&tail=3").status_code == 200
    assert "unknown parameter" in read(job, f"{link.path}&tial=3").text


CHANGES = {
    "another file": lambda path: path.replace("/result?", "/logs?"),
    "another job": lambda path: path.replace("job-1", "job-2"),
    "a later end": lambda path: path.replace("expires=1", "expires=2"),
    "no number": lambda path: path.replace("expires=", "expires=x"),
    "another user": lambda path: path.replace("user=mel", "user=ada"),
    "another token": lambda path: path.replace("token=mel-1", "token=ada-1"),
    "no token": lambda path: path.replace("token=mel-1&", ""),
    "no signature": lambda path: path.partition("&signature")[0],
    "empty signature": lambda path: path.partition("&signature")[0] + "&signature=",
    "not ASCII": lambda path: path + "%C3%A9",
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_link_is_refused(job, change):
    job.submit("job-2", by="mel")
    link = job.client("mel").create_link("job-1", "result", DAY)
    assert change(link.path) != link.path
    assert read(job, change(link.path)).status_code == 401


def test_a_link_only_reads(job):
    link = job.client("mel").create_link("job-1", "result", DAY)
    url = f"http://127.0.0.1:{job.port}{link.path}"
    assert httpx.post(url, verify=False, timeout=900).status_code == 401


def test_a_link_ends_with_its_user(job):
    link = job.client("mel").create_link("job-1", "result", DAY)
    job.client("ada").delete_user("mel")
    assert read(job, link.path).status_code == 401


def created_with(job: ServiceHarness, **limits) -> tuple[str, str]:
    """A link, and the id of the token that created it."""
    token = job.client("ada").create_token("mel", **limits)
    job.tokens["laptop"] = token.token
    return job.client("laptop").create_link("job-1", "result", DAY * 30).path, token.id


def test_a_link_ends_when_its_token_is_revoked(job):
    link, token_id = created_with(job)
    assert read(job, link).status_code == 200
    job.client("mel").revoke_token(token_id)
    answer = read(job, link)
    assert answer.status_code == 401 and "its token" in answer.json()["error"]["message"]


def test_a_link_ends_when_its_token_expires(job):
    link, _ = created_with(job, expires_in=DAY)
    job.clock.advance(DAY - timedelta(seconds=1))
    assert read(job, link).status_code == 200
    job.clock.advance(timedelta(seconds=2))
    assert read(job, link).status_code == 401


def test_a_link_lasts_when_its_token_is_rotated_and_ends_with_the_new_one(job):
    link, token_id = created_with(job)
    new = job.client("mel").rotate_token(token_id, overlap=timedelta(0))
    job.clock.advance(DAY)
    assert read(job, link).status_code == 200
    job.client("mel").revoke_token(new.id)
    assert read(job, link).status_code == 401


@pytest.mark.parametrize("ended", ["the session", "its token"])
def test_a_link_that_a_browser_created_ends_with_its_session(job, ended):
    token = job.client("ada").create_token("mel")
    with job.http(token.token) as http:
        csrf = http.post("/session").raise_for_status().json()["csrf"]
        cookies = dict(http.cookies)
    with job.http() as browser:
        browser.cookies.update(cookies)
        answer = browser.post(
            "/jobs/job-1/links",
            json={"resource": "result", "expires_in": "PT1H"},
            headers={CSRF_HEADER: csrf},
        )
    link = answer.raise_for_status().json()["path"]
    assert read(job, link).status_code == 200
    sessions = [each.id for each in job.store.tokens("mel") if each.session_of == token.id]
    job.client("mel").revoke_token(token.id if ended == "its token" else sessions[0])
    assert read(job, link).status_code == 401


@pytest.mark.parametrize("scope", [TokenScope.READ, TokenScope.SUBMIT])
def test_a_limited_token_creates_no_links(job, scope):
    job.tokens["limited"] = job.client("ada").create_token("mel", scope=scope).token
    with pytest.raises(Forbidden):
        job.client("limited").create_link("job-1", "logs", DAY)


def test_only_the_owner_or_an_admin_creates_links(job):
    assert job.client("ada").create_link("job-1", "logs", DAY)
    with pytest.raises(Forbidden):
        job.client("mo").create_link("job-1", "logs", DAY)
    with pytest.raises(Forbidden):
        job.client("vic").create_link("job-1", "logs", DAY)


@pytest.mark.parametrize(
    ("resource", "lifetime"),
    [("files", DAY), ("logs", timedelta(0)), ("logs", timedelta(days=91))],
    ids=["no such file", "no time", "too long"],
)
def test_an_invalid_request_is_refused(job, resource, lifetime):
    with pytest.raises(BadInput):
        job.client("mel").create_link("job-1", resource, lifetime)
