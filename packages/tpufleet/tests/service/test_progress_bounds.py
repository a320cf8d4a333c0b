"""Numbers in heartbeats that no program counts and no database holds: the heartbeat is refused, as
unreadable, and the agent then omits its progress."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta

import pytest

from tests.polling import wait_until
from tests.service.harness import ServiceHarness
from tpufleet.model.fleet.hosts import Progress
from tpufleet.model.values.bounds import MAX_NUMBER
from tpufleet.model.values.encoding import to_json
from tpufleet.stores.open_store import open_store

MOMENT = timedelta(seconds=3)
NOT_STEPS = {
    "negative": "-1",
    "beyond 2^53": str(MAX_NUMBER + 1),
    "beyond 64 bits": str(2**63),
    "minus 2^63": str(-(2**63) - 1),
    "forty digits": "9" * 40,
    "too long for Python": "9" * 5000,
    "beyond any float": "1e400",
    "a fraction": "0.5",
    "a text": '"many"',
    "a list": "[1]",
}


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[ServiceHarness]:
    folder = tmp_path_factory.mktemp("state")
    service = ServiceHarness(open_store(f"sqlite:///{folder}/fleet.db"), folder)
    service.start()
    service.submit("job-1")
    service.add_slice("s1", "job-1")
    service.add_attempt("job-1", 0, "s1")
    yield service
    service.close()


def send(service: ServiceHarness, status: int = 200, **fields: str) -> None:
    """`fields` are JSON, also what Python cannot write."""
    heartbeat = json.loads(to_json(service.make_heartbeat("s1/0", attempt_id="job-1.0")))
    content = json.dumps({**heartbeat, **dict.fromkeys(fields, "@")})
    for name, value in fields.items():
        content = content.replace(f'"{name}": "@"', f'"{name}": {value}')
    with service.http(service.slice_token("s1")) as http:
        answer = http.post("/agent/heartbeat", content=content.encode())
    assert answer.status_code == status, answer.text


def recorded(service: ServiceHarness) -> Progress:
    host = service.store.last_heartbeats(["s1/0"]).get("s1/0")
    return (host and host.progress) or Progress()


@pytest.mark.parametrize(
    "name",
    [
        "step",
        pytest.param("total", marks=pytest.mark.slow),
        pytest.param("checkpoint_step", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("number", NOT_STEPS.values(), ids=NOT_STEPS.keys())
def test_a_number_that_is_no_step_is_refused(running, name, number):
    running.clock.advance(MOMENT)
    at = to_json(running.clock.now()).decode()
    send(running, 400, progress=f'{{"{name}": {number}}}')
    send(running, 400, points=f'[{{"at": {at}, "step": {number}}}]')


def test_later_steps_are_recorded_after_all_of_that(running):
    running.clock.advance(MOMENT)
    at = to_json(running.clock.now()).decode()
    send(running, progress='{"step": 7}', points=f'[{{"at": {at}, "step": 7}}]')
    wait_until(lambda: recorded(running).step == 7)
    wait_until(lambda: 7 in [point.step for point in running.store.metric_points("job-1")])


@pytest.mark.parametrize("value", ["7", '"half"', '[{"step": 3}]', '{"metrics": 5}', '{"at": 0}'])
@pytest.mark.parametrize("name", ["progress", "points"])
def test_progress_of_another_form_is_refused(running, name, value):
    send(running, 400, **{name: value})


@pytest.mark.parametrize("name", ["coordinator_port", "seq", "protocol"])
def test_other_large_numbers_are_not_an_error_of_the_server(running, name):
    send(running, **{name: str(2**63)})
