"""Functions and jobs from Python, on a real server with simulated slices."""

from __future__ import annotations

import concurrent.futures
import functools
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import tpufleet
from tests.polling import wait_until
from tests.providers.local.test_isolation import stop_all
from tests.server_process import Server
from tpufleet.errors import BadInput
from tpufleet.views.python import session as sessions
from tpufleet.views.python.functions import RemoteTraceback

WAIT = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("python") / "home")
    server.start()
    tpufleet.connect(server.url, (server.home / "token").read_text().strip())
    yield server
    sessions.session().client.close()
    sessions._session = None
    stop_all(server)
    server.cleanup()


@pytest.fixture(autouse=True)
def workdir(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "helper.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.chdir(folder)
    return folder


def describe(x):
    return {"square": x * x, "host": os.environ["TPUFLEET_PROCESS_ID"]}


def test_a_function_returns_its_result_from_a_slice():
    offset = 7
    future = tpufleet.submit(lambda x: x + offset, 35, accelerator="v5e-1", tags=["one"])
    assert future.result(WAIT) == 42
    assert future.job.state == "succeeded"
    assert future.job.row.tags == ("one",)


def test_every_host_calls_it_and_host_0_answers():
    assert tpufleet.submit(describe, 3, accelerator="v5e-16").result(WAIT) == {
        "square": 9,
        "host": "0",
    }


def test_it_imports_from_the_folder_that_was_sent():
    def use_helper(x):
        import helper

        return helper.double(x)

    assert tpufleet.submit(use_helper, 21).result(WAIT) == 42


def test_an_exception_comes_back_with_its_traceback():
    def fail(*, key):
        return {}[key]

    future = tpufleet.submit(functools.partial(fail, key="absent"))
    with pytest.raises(KeyError, match="absent") as raised:
        future.result(WAIT)
    assert isinstance(raised.value.__cause__, RemoteTraceback)
    assert "in fail" in str(raised.value.__cause__)
    assert future.job.state == "failed"


def test_a_process_that_dies_without_a_word_is_a_failed_job():
    future = tpufleet.submit(lambda: os._exit(3))
    with pytest.raises(tpufleet.JobFailed, match="status 3") as raised:
        future.result(WAIT)
    assert raised.value.job.id == future.job.id


def test_map_gives_results_in_the_order_of_the_items():
    assert list(tpufleet.map(lambda x: x * x, range(6), accelerator="v5e-1")) == [
        0, 1, 4, 9, 16, 25,
    ]  # fmt: skip


def test_futures_work_with_the_standard_library():
    futures = tpufleet.submit_all(lambda x: -x, [1, 2])
    done = {future.result() for future in concurrent.futures.as_completed(futures, WAIT)}
    assert done == {-1, -2}


def test_cancelling_a_future_cancels_its_job():
    def sleep():
        import time

        time.sleep(600)

    future = tpufleet.submit(sleep)
    assert future.cancel()
    assert future.cancelled()
    wait_until(lambda: future.job.state == "cancelled", WAIT, lambda: repr(future.job))
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()


def test_ending_a_map_early_cancels_the_rest():
    def wait_for(seconds):
        import time

        time.sleep(seconds)
        return seconds

    results = tpufleet.map(wait_for, [0, 600, 600], name="early")
    assert next(results) == 0
    results.close()
    wait_until(
        lambda: (
            sorted(job.state for job in tpufleet.jobs(name="early"))
            == ["cancelled", "cancelled", "succeeded"]
        ),
        WAIT,
        lambda: str(tpufleet.jobs(name="early")),
    )


def test_a_future_can_be_had_again_from_its_job():
    first = tpufleet.submit(lambda: "kept")
    first.result(WAIT)
    assert tpufleet.attach(tpufleet.job(first.job.id)).result(WAIT) == "kept"


def test_what_cannot_be_sent_is_refused_before_anything_is_submitted():
    before = len(tpufleet.jobs())
    with pytest.raises(BadInput, match="cannot send arguments 0: TypeError"):
        tpufleet.submit(print, threading.Lock())
    with socket.socket() as connection, pytest.raises(BadInput, match="cannot send"):
        tpufleet.submit(lambda: connection)
    with pytest.raises(BadInput, match="not a function"):
        tpufleet.submit("python train.py")
    with pytest.raises(BadInput, match="accelerator"):
        tpufleet.submit(print, accelerator="v9-8")
    with pytest.raises(BadInput, match="zones"):
        tpufleet.run("v5e-1", "true", zone=["us-central1-a"])
    assert len(tpufleet.jobs()) == before


def test_a_command_is_run_and_read(workdir: Path):
    (workdir / "train.py").write_text(
        "from tpufleet import runtime\nruntime.progress(3, total=3, loss=0.25)\nprint('trained')\n"
    )
    job = tpufleet.run("v5e-1", ["python", "train.py"], tags=["baseline"], name="trained")
    assert job.wait(WAIT) is job
    assert "trained" in job.logs()
    assert [line for line in job.follow_logs() if line == "trained"] == ["trained"]
    newest = job.metrics().iloc[-1]
    assert (newest["step"], newest["loss"]) == (3, 0.25)
    assert "succeeded" in repr(job.why())
    assert repr(job).startswith(f"<Job trained {job.id}: succeeded, 3/3 (100%), 1 × v5")
    assert job.spec["tags"] == ["baseline"]
    assert "succeeded" in [event.state for event in job.events()]
    again = job.rerun(tags=["second"], name="again")
    assert again.wait(WAIT).row.tags == ("second",)


def test_a_failed_command_raises_with_the_end_of_its_log():
    job = tpufleet.run("v5e-1", "echo out of ideas; exit 4")
    with pytest.raises(tpufleet.JobFailed, match="out of ideas"):
        job.wait(WAIT)
    assert job.wait(check=False).state == "failed"


def test_waiting_ends_at_the_timeout_and_the_job_goes_on():
    job = tpufleet.run("v5e-1", "sleep 600", workdir=None)
    with pytest.raises(TimeoutError):
        job.wait(0.1)
    assert not job.done
    job.cancel()


def test_a_member_cannot_read_the_results_of_others_as_objects(server: Server):
    job = tpufleet.submit(lambda: 1).job
    job.wait(WAIT)
    server.client.put_user("eve", "member")
    token = server.client.create_token("eve").token
    admin = sessions.session().client
    try:
        tpufleet.connect(server.url, token)
        with pytest.raises(BadInput, match="only results of your own"):
            tpufleet.attach(tpufleet.job(job.id))
    finally:
        sessions.session().client.close()
        sessions._session = sessions.Session(admin)
