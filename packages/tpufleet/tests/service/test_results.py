"""Results: from the agent of a live attempt, once, to whoever may read jobs."""

from __future__ import annotations

import io

import httpx
import pytest

from tests.service.harness import ServiceHarness
from tpufleet.client import snapshots
from tpufleet.errors import Conflict, Forbidden, NotFound
from tpufleet.model.api_types import PurgeRequest
from tpufleet.model.job.attempts import AttemptState


@pytest.fixture
def running(service: ServiceHarness) -> ServiceHarness:
    service.submit("job-1")
    service.add_slice("s1", "job-1")
    service.add_slice("s2", None)
    service.add_attempt("job-1", 0, "s1", state=AttemptState.ENDED)
    service.add_attempt("job-1", 1, "s1")
    return service


def send(service: ServiceHarness, attempt: str, data: bytes, host: str = "s1/0") -> httpx.Response:
    with service.http(service.slice_token(host.partition("/")[0])) as http:
        return http.post("/agent/results", params={"attempt": attempt, "host": host}, content=data)


def test_a_job_without_a_result_says_how_one_is_handed_over(running):
    with pytest.raises(NotFound, match="TPUFLEET_RUN_DIR"):
        running.client().result("job-1")


def test_the_first_result_that_a_job_hands_over_stays_its_result(running):
    assert send(running, "job-1.1", b"first").json() == {"done": True}
    assert send(running, "job-1.1", b"second").json() == {"done": False}
    assert running.client("vic").result("job-1") == b"first"


@pytest.mark.parametrize(
    ("attempt", "host", "status"),
    [
        ("job-1.0", "s1/0", 409),
        ("job-1.1", "s2/0", 403),
        ("job-1.7", "s1/0", 404),
        ("job-1.1", "s1/99", 400),
        ("job-1.1", "s1/00", 401),
    ],
    ids=[
        "an attempt that has ended",
        "a slice that does not run it",
        "no such attempt",
        "a host that does not exist",
        "another spelling of a host",
    ],
)
def test_a_result_is_refused_from(running, attempt, host, status):
    assert send(running, attempt, b"forged", host).status_code == status
    with pytest.raises(NotFound):
        running.client().result("job-1")


FILES = PurgeRequest(jobs=("job-1",))


@pytest.fixture
def with_code(running, tmp_path) -> tuple[ServiceHarness, str]:
    """A job that has handed over a result and runs code that was uploaded."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("1")
    scanned = snapshots.scan(tmp_path / "code")
    packed = io.BytesIO()
    snapshots.pack(scanned, packed)
    running.client().put_snapshot(scanned.digest, packed.getvalue())
    running.change_job("job-1", snapshot=scanned.digest)
    assert send(running, "job-1.1", b"first").json() == {"done": True}
    return running, scanned.digest


def test_the_files_of_a_job_that_has_ended_can_be_dropped(with_code):
    service, digest = with_code
    service.end_job("job-1")
    service.client().purge(FILES)
    service.client().purge(FILES)
    assert not service.client().has_snapshot(digest)
    with pytest.raises(Conflict, match="were deleted"):
        service.client().result("job-1")


def test_files_stay_while_their_job_lives_and_code_while_any_job_that_runs_it_does(with_code):
    service, digest = with_code
    with pytest.raises(Conflict, match="can be archived or purged after it has ended"):
        service.client().purge(FILES)
    service.end_job("job-1")
    service.submit("job-2")
    service.change_job("job-2", snapshot=digest)
    service.client().purge(FILES)
    assert service.client().has_snapshot(digest)


def test_nobody_drops_the_files_of_another(with_code):
    service, digest = with_code
    service.end_job("job-1")
    for name in ("vic", "mo"):
        with pytest.raises(Forbidden):
            service.client(name).purge(FILES)
    assert service.client().has_snapshot(digest)
