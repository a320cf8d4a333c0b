"""Results: from the agent of a live attempt, once, to whoever may read jobs."""

from __future__ import annotations

import httpx
import pytest

from tests.service.world import World
from tpufleet.errors import NotFound
from tpufleet.model.attempts import AttemptState


@pytest.fixture
def running(world: World) -> World:
    world.submit("job-1")
    world.slice("s1", "job-1")
    world.slice("s2", None)
    world.attempt("job-1", 0, "s1", state=AttemptState.ENDED)
    world.attempt("job-1", 1, "s1")
    return world


def send(world: World, attempt: str, data: bytes, host: str = "s1/0") -> httpx.Response:
    with world.http(world.slice_token(host.partition("/")[0])) as http:
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
    [("job-1.0", "s1/0", 409), ("job-1.1", "s2/0", 403), ("job-1.7", "s1/0", 404)],
    ids=["an attempt that has ended", "a slice that does not run it", "no such attempt"],
)
def test_a_result_is_refused_from(running, attempt, host, status):
    assert send(running, attempt, b"forged", host).status_code == status
    with pytest.raises(NotFound):
        running.client().result("job-1")
