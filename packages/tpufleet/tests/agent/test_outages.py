"""Server outages: the workload keeps running and no log or report is lost."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import httpx
import pytest

from tests.agent.test_running import archive
from tests.agent.test_stopping import PATIENT
from tests.polling import wait_until
from tpufleet.agent.workload import runner
from tpufleet.agent.workload.output.logs import MAX_UNWRITTEN_BYTES, LogFile
from tpufleet.agent.workload.runner import LOG_UPLOAD_TIMEOUT_SECONDS
from tpufleet.client import agents
from tpufleet.model.fleet.hosts import NoticeKind, Phase

COUNTS = "for n in $(seq 400); do echo line $n; sleep 0.002; done"


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process can grow. Programs that it starts meanwhile inherit that."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)


def numbers(log: str) -> list[int]:
    return [int(line.split()[1]) for line in log.splitlines() if line.startswith("line ")]


def test_an_outage_for_the_whole_run_loses_no_log(harness):
    harness.assign("sh", "-c", f"while ! test -e ../run/go; do sleep 0.05; done; {COUNTS}; exit 5")
    harness.start()
    harness.wait_for_phase(Phase.RUNNING)
    harness.control_plane.stop()
    (harness.run_dir() / "go").touch()
    output = harness.work / "j1.0" / "output.log"
    wait_until(lambda: "exited with status 5" in output.read_text())
    assert numbers(harness.log()) == []
    harness.control_plane.restart()
    assert harness.wait_for_exit().status == 5
    wait_until(lambda: "exited with status 5" in harness.log())
    assert numbers(harness.log()) == list(range(1, 401))
    assert bytes(harness.control_plane.logs["j1.0"]) == output.read_bytes()


def test_an_outage_during_the_run_neither_loses_nor_repeats_a_line(harness):
    harness.assign("sh", "-c", COUNTS)
    harness.start()
    harness.wait_for_log("line 50\n")
    harness.control_plane.stop()
    output = harness.work / "j1.0" / "output.log"
    wait_until(lambda: "line 300\n" in output.read_text())
    harness.control_plane.restart()
    assert harness.wait_for_exit().clean
    wait_until(lambda: "exited with status 0" in harness.log())
    assert numbers(harness.log()) == list(range(1, 401))


def test_log_lost_by_the_server_is_uploaded_again(harness):
    harness.control_plane.forget_log_after = 100
    harness.assign("sh", "-c", COUNTS)
    harness.start()
    assert harness.wait_for_exit().clean
    wait_until(lambda: "exited with status 0" in harness.log())
    assert numbers(harness.log()) == list(range(1, 401))


def wait_past_the_upload_timeout(harness) -> None:
    """After the command exited with status 5."""
    output = harness.work / "j1.0" / "output.log"
    wait_until(lambda: output.exists() and "exited with status 5" in output.read_text())
    over = time.monotonic() + LOG_UPLOAD_TIMEOUT_SECONDS + 1
    wait_until(lambda: time.monotonic() > over)


@pytest.fixture
def patient_uploads(monkeypatch):
    """They wait longer than the test does, so that what waits for them fails it."""
    monkeypatch.setattr(agents, "LOG_TIMEOUT", httpx.Timeout(300.0))


def test_a_rejected_log_upload_does_not_delay_the_exit_report(harness):
    harness.control_plane.refused_routes["logs"] = 404
    harness.assign("sh", "-c", "echo unheard; exit 2")
    harness.start()
    assert harness.wait_for_exit().status == 2
    del harness.control_plane.refused_routes["logs"]
    harness.wait_for_log("unheard\n")


def test_a_hanging_log_upload_does_not_delay_the_exit_report_for_long(
    harness, patient_uploads, monkeypatch
):
    monkeypatch.setattr(runner, "LOG_UNANSWERED_TIMEOUT_SECONDS", 1.0)
    harness.control_plane.delayed_routes["logs"] = threading.Event()
    harness.assign("sh", "-c", "echo late; exit 2")
    harness.start()
    assert harness.wait_for_exit().status == 2


def test_the_exit_is_reported_after_the_log_is_uploaded(harness):
    held = harness.control_plane.delayed_routes["logs"] = threading.Event()
    harness.assign("echo", "slow but complete")
    harness.start()
    wait_until(lambda: harness.control_plane.held_requests["logs"] == 1)
    output = harness.work / "j1.0" / "output.log"
    wait_until(lambda: "exited with status 0" in output.read_text())
    assert not any(heartbeat.exit for heartbeat in harness.control_plane.heartbeats)
    held.set()
    harness.wait_for_exit()
    assert "exited with status 0" in harness.log()


@pytest.mark.slow
def test_after_an_outage_longer_than_the_upload_timeout_the_log_precedes_the_exit(harness):
    """Once the exit is reported, the host may be released, with everything not uploaded yet."""
    harness.assign("sh", "-c", f"while ! test -e ../run/go; do sleep 0.05; done; {COUNTS}; exit 5")
    harness.start()
    harness.wait_for_phase(Phase.RUNNING)
    harness.control_plane.stop()
    (harness.run_dir() / "go").touch()
    wait_past_the_upload_timeout(harness)
    held = harness.control_plane.delayed_routes["logs"] = threading.Event()
    count = len(harness.control_plane.heartbeats)
    harness.control_plane.restart()
    wait_until(
        lambda: (
            harness.control_plane.held_requests["logs"]
            and len(harness.control_plane.heartbeats) > count
        )
    )
    assert not any(heartbeat.exit for heartbeat in harness.control_plane.heartbeats)
    held.set()
    assert harness.wait_for_exit().status == 5
    assert numbers(harness.log()) == list(range(1, 401))


@pytest.mark.slow
def test_a_shutdown_does_not_wait_for_an_outage_to_end(harness):
    harness.assign("sh", "-c", "echo up; exec sleep 60")
    harness.start()
    harness.wait_for_log("up\n")
    harness.control_plane.stop()
    harness.request_shutdown()
    assert harness.wait_for_agent_exit() == 0


def test_the_program_survives_an_outage_shorter_than_the_lease(harness):
    harness.assign("sh", "-c", "echo up; sleep 1.5; echo still here")
    harness.start()
    harness.wait_for_log("up\n")
    harness.control_plane.refused_routes["heartbeat"] = 503
    count = len(harness.control_plane.heartbeats)
    wait_until(lambda: "still here" in harness.log())
    del harness.control_plane.refused_routes["heartbeat"]
    assert harness.wait_for_exit().clean
    assert len(harness.control_plane.heartbeats) > count


def test_an_expired_lease_stops_the_program_and_is_reported_later(harness):
    harness.assign_python(PATIENT)
    harness.start()
    harness.wait_for_log("up\n")
    harness.control_plane.lease = timedelta(seconds=1)
    count = len(harness.control_plane.heartbeats)
    wait_until(lambda: len(harness.control_plane.heartbeats) > count + 2)
    harness.control_plane.stop()
    output = harness.work / "j1.0" / "output.log"
    wait_until(lambda: "saving\n" in output.read_text())
    harness.control_plane.restart()
    exit = harness.wait_for_exit()
    assert exit.stopped_by_agent
    assert exit.log_line == "server unreachable for 1 s"


def test_a_simulated_host_exits_when_the_control_plane_is_gone(harness):
    harness.assign("sh", "-c", "echo up; exec sleep 60")
    harness.start(server_timeout_seconds=5.0)
    harness.wait_for_log("up\n")
    harness.control_plane.stop()
    assert harness.wait_for_agent_exit() == 3
    assert "server unreachable for 5 s" in (harness.work / "j1.0" / "output.log").read_text()


def test_an_invalid_reply_is_retried(harness):
    harness.control_plane.garbled_routes.add("heartbeat")
    harness.assign("echo", "at last")
    harness.start()
    wait_until(lambda: harness.control_plane.held_requests["garbled"] >= 2)
    harness.control_plane.garbled_routes.clear()
    assert harness.wait_for_exit().clean


def test_the_code_download_is_retried(harness):
    harness.control_plane.snapshots["d1"] = archive(hello_py="print('fetched')")
    harness.control_plane.refused_routes["snapshots"] = 503
    harness.assign(sys.executable, "hello.py", snapshot="d1")
    harness.start()
    harness.wait_for_phase(Phase.SETUP)
    del harness.control_plane.refused_routes["snapshots"]
    assert harness.wait_for_exit().clean
    assert "fetched\n" in harness.log()


def test_a_delayed_reply_does_not_undo_a_newer_one(harness):
    harness.start()
    wait_until(lambda: harness.control_plane.heartbeats)
    held = harness.control_plane.hold_next_reply = threading.Event()
    harness.control_plane.release = True
    wait_until(lambda: harness.control_plane.held_requests["reply"])
    harness.control_plane.release = False
    harness.notice_file.write_text("preempted")  # its heartbeat overtakes the one that hangs
    wait_until(lambda: harness.control_plane.heartbeats[-1].notice)
    harness.notice(NoticeKind.MAINTENANCE)  # once this one comes, the answer to that one was heard
    wait_until(lambda: harness.control_plane.heartbeats[-1].notice is NoticeKind.MAINTENANCE)
    held.set()
    count = len(harness.control_plane.heartbeats)
    wait_until(lambda: len(harness.control_plane.heartbeats) > count + 3)
    assert harness.status is None


def test_unreadable_heartbeats_never_stop_the_workload(harness):
    """A server of another release, which answers each heartbeat with 400, longer than the lease."""
    harness.control_plane.lease = timedelta(seconds=5)  # longer than the machine stands still
    harness.assign("sh", "-c", "echo started; while ! test -e ../run/go; do sleep 0.05; done")
    harness.start()
    harness.wait_for_phase(Phase.RUNNING)
    harness.control_plane.refused_routes["heartbeat"] = 400
    refused_at = time.monotonic()
    wait_until(lambda: time.monotonic() > refused_at + 7)
    del harness.control_plane.refused_routes["heartbeat"]
    (harness.run_dir() / "go").touch()
    assert harness.wait_for_exit().clean


def test_output_on_a_full_disk_is_kept_in_memory_and_uploaded(harness):
    """The log cannot be written from the start until after the exit, and nothing of it is lost."""
    script = f"while ! test -e ../run/go; do sleep 0.05; done; {COUNTS}; exit 5"
    harness.assign("sh", "-c", script)
    harness.start()
    harness.wait_for_log("command: sh")
    with full_disk():
        (harness.run_dir() / "go").touch()
        harness.wait_for_log("line 300\n")  # also uploaded from there
        assert harness.wait_for_exit().status == 5
    assert numbers(harness.log()) == list(range(1, 401))
    assert "exited with status 5" in harness.log()


@pytest.mark.parametrize("status", [503, pytest.param(500, marks=pytest.mark.slow)])
def test_the_exit_waits_while_the_server_has_no_room_for_the_log(harness, status):
    """Heartbeats are answered, uploads are not, for longer than an upload may take."""
    harness.control_plane.refused_routes["logs"] = status
    harness.assign("sh", "-c", f"{COUNTS}; exit 5")
    harness.start()
    wait_past_the_upload_timeout(harness)
    assert not any(heartbeat.exit for heartbeat in harness.control_plane.heartbeats)
    del harness.control_plane.refused_routes["logs"]
    assert harness.wait_for_exit().status == 5
    assert numbers(harness.log()) == list(range(1, 401))


def test_the_exit_waits_while_an_upload_is_not_answered(harness):
    """Heartbeats are answered; uploads hang, as when the database is frozen, for longer than an
    upload may take."""
    held = harness.control_plane.delayed_routes["logs"] = threading.Event()
    harness.assign("sh", "-c", f"{COUNTS}; exit 5")
    harness.start()
    wait_past_the_upload_timeout(harness)
    assert not any(heartbeat.exit for heartbeat in harness.control_plane.heartbeats)
    held.set()
    assert harness.wait_for_exit().status == 5
    assert numbers(harness.log()) == list(range(1, 401))


def test_after_a_database_outage_the_log_precedes_the_exit(harness):
    """The server answers every request with an error, for longer than an upload may take."""
    harness.assign("sh", "-c", f"while ! test -e ../run/go; do sleep 0.05; done; {COUNTS}; exit 5")
    harness.start()
    harness.wait_for_phase(Phase.RUNNING)
    harness.control_plane.refused_routes |= {"heartbeat": 503, "logs": 503}
    (harness.run_dir() / "go").touch()
    wait_past_the_upload_timeout(harness)
    held = harness.control_plane.delayed_routes["logs"] = threading.Event()
    harness.control_plane.refused_routes.clear()
    count = len(harness.control_plane.heartbeats)
    wait_until(lambda: len(harness.control_plane.heartbeats) > count)
    wait_until(lambda: harness.control_plane.held_requests["logs"])
    assert not any(heartbeat.exit for heartbeat in harness.control_plane.heartbeats)
    held.set()
    assert harness.wait_for_exit().status == 5
    assert numbers(harness.log()) == list(range(1, 401))


def test_an_agent_uploads_what_the_one_before_it_could_not(harness):
    harness.assign("sh", "-c", f"echo first; {COUNTS}; echo last; exec sleep 60")
    harness.control_plane.refused_routes["logs"] = 503
    agent = harness.start_process()
    output = harness.work / "j1.0" / "output.log"
    wait_until(lambda: output.exists() and "last\n" in output.read_text())
    agent.kill()
    agent.wait()
    del harness.control_plane.refused_routes["logs"]
    harness.start_process()
    exit = harness.wait_for_exit()
    assert exit.stopped_by_agent and "restarted" in exit.log_line
    assert numbers(harness.log()) == list(range(1, 401))
    assert harness.log().endswith("the agent on this host restarted; its processes were killed\n")


def test_a_log_that_the_job_has_replaced_is_not_uploaded(tmp_path):
    private = tmp_path / "private"
    private.write_text("of root")
    for number, replace in enumerate((Path.symlink_to, Path.hardlink_to)):
        path = tmp_path / f"output-{number}"
        replace(path, private)
        with pytest.raises(OSError):
            LogFile(path, existing=True)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError):
        LogFile(tmp_path / "pipe", existing=True)


def test_what_does_not_fit_into_memory_is_counted_and_the_rest_is_kept(tmp_path):
    log = LogFile(tmp_path / "output")
    log.append(b"before\n")
    chunk = b"x" * 2**20
    with full_disk():
        for _ in range(20):
            log.append(chunk)
        assert log.size == 7 + MAX_UNWRITTEN_BYTES // 2**20 * 2**20
    log.append(b"after\n")
    log.close()
    text = (tmp_path / "output").read_bytes()
    lost = 20 * 2**20 - MAX_UNWRITTEN_BYTES
    notice = f"\n[tpufleet] {lost} bytes of output lost: disk full\nafter\n".encode()
    assert text == b"before\n" + b"x" * MAX_UNWRITTEN_BYTES + notice
