"""A server that is away for some time does not end what goes on until it is interrupted."""

from __future__ import annotations

import json
import os
import socket

import pytest

from tests.views.cli_runner import Tpu
from tests.views.job_scenarios import start_job
from tests.views.test_terminal_output import Terminal


def end(screen: Terminal) -> None:
    screen.interrupt()
    assert screen.end() in (0, 130)


@pytest.mark.slow
def test_a_watched_list_goes_on_after_an_outage(world, tpu: Tpu):
    world.submit("job-1", name="before")
    screen = Terminal(tpu, "jobs", "--watch")
    screen.wait_for("before")
    world.stop()
    screen.wait_for("cannot reach the server")
    world.start()
    world.submit("job-2", name="afterwards")
    screen.wait_for("afterwards")
    end(screen)


@pytest.mark.parametrize("command", [("logs", "job-1"), ("events",)], ids=["logs", "events"])
def test_a_stream_tells_that_it_is_interrupted(world, tpu: Tpu, command):
    start_job(world)
    world.send_log("job-1.0", "slice-1/0", 0, b"submitted\n")
    screen = Terminal(tpu, *command, "--follow")
    screen.wait_for("submitted")
    world.stop()
    screen.wait_for("; retrying")
    world.start()
    world.send_log("job-1.0", "slice-1/0", 10, b"job-2\n")
    world.submit("job-2")
    screen.wait_for("job-2")
    end(screen)
    assert screen.shown.count("; retrying") == 1


def test_no_second_server_is_started_beside_a_frozen_one(tmp_path, alone: Tpu):
    home = tmp_path / "state"
    home.mkdir(mode=0o700)
    (home / "token").touch(0o600)
    (home / "token").write_text("tpf_x")
    alone.environ["TPUFLEET_REQUEST_TIMEOUT"] = "1s"
    with socket.create_server(("127.0.0.1", 0)) as listener:  # connects, and never answers
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        (home / "server.json").write_text(json.dumps({"url": url, "pid": os.getpid()}))
        answer = alone("run", "v5e-1", "--", "true")
    assert answer.exit_code == 1
    assert f"{url} does not answer (timed out)" in answer.stderr
    assert not (home / "server.log").exists()


def test_a_list_that_is_cut_off_says_so(world, tpu: Tpu):
    for number in range(3):
        world.submit(f"job-{number}")
    assert "the newest 2; --limit shows more" in tpu("jobs", "--limit", "2").stderr
    assert not tpu("jobs", "--limit", "3").stderr
