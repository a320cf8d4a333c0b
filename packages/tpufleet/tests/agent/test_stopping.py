"""Stopping: stop file, SIGTERM, grace period, SIGKILL, and no process left afterwards."""

from __future__ import annotations

import signal
import sys
import threading
from dataclasses import replace
from datetime import timedelta

import psutil
import pytest

from tests.polling import wait_until
from tpufleet.client.agents import HEARTBEAT_TIMEOUT
from tpufleet.model.fleet.hosts import NoticeKind, Phase
from tpufleet.model.job.end_reasons import EndReason

PATIENT = """
import signal, sys, time
def stop(*_):
    print("saving", flush=True); sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("up", flush=True)
time.sleep(60)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
while True: time.sleep(60)
"""
SAVING = """
import os, signal, time
from tpufleet import runtime
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def write(folder):
    (folder / "weights").write_text("all")
    print("saving", flush=True)
    began = time.monotonic()
    while not os.path.exists("../run/go") or time.monotonic() < began + 2:
        time.sleep(0.01)
runtime.checkpoints.save(7, write)
while True: time.sleep(60)
"""
# One process dies in a save, and leaves another that does not.
DIED_SAVING = """
import os, signal, time
from tpufleet import runtime
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if (child := os.fork()) == 0:
    runtime.checkpoints.save(7, lambda folder: os._exit(9) if os.fork() else time.sleep(60))
os.waitpid(child, 0)
print("up", flush=True)
while True: time.sleep(60)
"""
# A classic daemon: forks twice, leaves its session, closes its terminal.
DAEMON = """
import os, sys, time
def daemon(ignore):
    if os.fork(): return
    os.setsid()
    if os.fork(): os._exit(0)
    if ignore:
        import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for fd in (0, 1, 2): os.close(fd)
    time.sleep(60); os._exit(0)
"""


def stop_now(harness, reason=EndReason.CANCELLED, *, abort=False):
    harness.control_plane.assignment = replace(
        harness.control_plane.assignment, stop=reason, abort=abort
    )


def test_a_stop_lets_the_program_save_and_exit(harness):
    harness.assign_python(PATIENT)
    harness.start()
    harness.wait_for_log("up\n")
    stop_now(harness)
    exit = harness.wait_for_exit()
    assert (exit.status, exit.stopped_by_agent, exit.log_line) == (0, True, "cancelled")
    assert (harness.run_dir() / "stop").exists()
    assert (
        "[tpufleet] stopping: cancelled; SIGTERM now, SIGKILL after 5 s\nsaving\n" in harness.log()
    )
    assert Phase.STOPPING in {heartbeat.phase for heartbeat in harness.control_plane.heartbeats}


@pytest.mark.parametrize("next_attempt", [None, "j1.1"], ids=["none", "another"])
def test_an_attempt_that_is_no_longer_assigned_is_stopped(harness, next_attempt):
    harness.assign_python(PATIENT)
    harness.start()
    harness.wait_for_log("up\n")
    if next_attempt:
        harness.assign("echo", "next", attempt_id=next_attempt, number=1)
    else:
        harness.control_plane.assignment = None
    assert harness.wait_for_exit().stopped_by_agent
    if next_attempt:
        assert harness.wait_for_exit(next_attempt).clean
        assert "next" in harness.log(next_attempt)
    wait_until(lambda: harness.control_plane.heartbeats[-1].attempt_id == next_attempt)


def test_children_that_ignore_sigterm_are_killed_after_the_grace_period(harness):
    harness.assign(
        "sh", "-c", f"{sys.executable} -c '{STUBBORN}' & wait", grace=timedelta(seconds=3)
    )
    harness.start()
    harness.wait_for_log("up\n")
    stop_now(harness)
    exit = harness.wait_for_exit()
    assert exit.stopped_by_agent and exit.signal == signal.SIGTERM
    assert harness.processes() == []


def test_a_program_that_ignores_sigterm_is_killed_after_the_grace_period(harness):
    harness.assign_python(STUBBORN, grace=timedelta(seconds=0.3))
    harness.start()
    harness.wait_for_log("up\n")
    stop_now(harness)
    exit = harness.wait_for_exit()
    assert (exit.signal, exit.stopped_by_agent, exit.oom_killed) == (signal.SIGKILL, True, False)


def test_a_blocked_program_is_killed_at_once_when_another_process_is_gone(harness):
    harness.assign_python(STUBBORN, grace=timedelta(hours=1))
    harness.start()
    harness.wait_for_log("up\n")
    stop_now(harness, EndReason.USER_ERROR, abort=True)
    exit = harness.wait_for_exit()
    assert (exit.signal, exit.stopped_by_agent) == (signal.SIGKILL, True)
    assert "SIGKILL after 0.5 s" in harness.log()


def test_what_a_failed_program_leaves_is_killed_at_once(harness):
    started = f"{sys.executable} -c '{STUBBORN}' > ../run/log &"
    wait = "until grep -q up ../run/log; do sleep 0.1; done"
    harness.assign("sh", "-c", f"{started} {wait}; exit 3", grace=timedelta(hours=1))
    harness.start()
    exit = harness.wait_for_exit()
    assert (exit.status, exit.stopped_by_agent) == (3, False)
    assert harness.processes() == []


def test_a_stopping_program_is_killed_once_another_process_is_gone(harness):
    harness.assign_python(STUBBORN, grace=timedelta(hours=1))
    harness.start()
    harness.wait_for_log("up\n")
    stop_now(harness, EndReason.PREEMPTED)
    harness.wait_for_phase(Phase.STOPPING)
    stop_now(harness, EndReason.PREEMPTED, abort=True)
    assert harness.wait_for_exit().signal == signal.SIGKILL


@pytest.mark.parametrize("first", ["released", "aborted"])
def test_a_blocked_program_is_killed_also_when_its_slice_is_released(harness, first):
    """Its machines are deleted because those of another slice of the gang are gone."""
    harness.assign_python(STUBBORN, grace=timedelta(hours=1))
    harness.start()
    harness.wait_for_log("up\n")
    if first == "released":
        harness.control_plane.release = True
        harness.wait_for_phase(Phase.STOPPING)
    stop_now(harness, EndReason.PREEMPTED, abort=True)
    harness.control_plane.release = True
    assert harness.wait_for_exit().signal == signal.SIGKILL


def test_a_save_that_has_begun_is_completed_although_another_process_is_gone(harness):
    """And the program is killed when it is done, however much of the grace period is left."""
    harness.assign_python(SAVING, grace=timedelta(hours=1))
    harness.start()
    harness.wait_for_log("saving\n")
    stop_now(harness, EndReason.USER_ERROR, abort=True)
    harness.wait_for_phase(Phase.STOPPING)
    wait_until((harness.run_dir() / "peer-gone").exists)
    (harness.run_dir() / "go").touch()
    assert harness.wait_for_exit().signal == signal.SIGKILL
    assert [path.name for path in harness.checkpoint.iterdir()] == ["step_00000007"]


def test_a_save_does_not_outlast_the_grace_period(harness):
    harness.assign_python(SAVING, grace=timedelta(seconds=0.3))
    harness.start()
    harness.wait_for_log("saving\n")
    stop_now(harness, EndReason.USER_ERROR, abort=True)
    assert harness.wait_for_exit().signal == signal.SIGKILL


def test_a_save_that_its_process_did_not_survive_is_not_waited_for(harness):
    harness.assign_python(DIED_SAVING, grace=timedelta(hours=1))
    harness.start()
    harness.wait_for_log("up\n")
    assert list(harness.run_dir().glob("saving.*"))
    stop_now(harness, EndReason.USER_ERROR, abort=True)
    assert harness.wait_for_exit().signal == signal.SIGKILL


def test_a_daemon_outside_the_session_that_ignores_sigterm_is_killed(harness):
    harness.assign_python(
        DAEMON + "daemon(True); print('up', flush=True); time.sleep(60)",
        grace=timedelta(seconds=0.5),
    )
    harness.start()
    harness.wait_for_log("up\n")
    wait_until(lambda: len(harness.processes()) >= 2)
    stop_now(harness)
    harness.wait_for_exit()
    assert harness.processes() == []


def test_leftover_processes_are_ended_before_the_exit_is_reported(harness):
    harness.assign_python(DAEMON + "daemon(False); print('done', flush=True); sys.exit(3)")
    harness.start()
    exit = harness.wait_for_exit()
    assert (exit.status, exit.stopped_by_agent) == (3, False)
    assert harness.processes() == []


def test_a_child_in_the_session_with_another_environment_is_ended(harness):
    harness.assign("sh", "-c", "env -i sleep 61.25 & echo left")
    harness.start()
    assert harness.wait_for_exit().clean
    left = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "61.25"]]
    assert left == []


def test_a_background_process_of_setup_lives_as_long_as_the_command(harness):
    harness.assign(
        "sh",
        "-c",
        "kill -0 $(cat ../run/helper) && echo served",
        setup=("sh", "-c", "sleep 60 & echo $! > ../run/helper"),
    )
    harness.start()
    assert harness.wait_for_exit().clean
    assert "served\n" in harness.log()
    assert harness.processes() == []


def test_a_stop_during_setup_skips_the_command(harness):
    harness.assign("echo", "never", setup=("sh", "-c", "echo up; sleep 60"))
    harness.start()
    harness.wait_for_log("up\n")
    stop_now(harness, EndReason.SUPERSEDED)
    exit = harness.wait_for_exit()
    assert exit.stopped_by_agent and exit.during_setup
    assert "never" not in harness.log()


def test_an_attempt_stopped_before_its_start_never_runs(harness):
    harness.assign("echo", "never", stop=EndReason.CANCELLED)
    harness.start()
    exit = harness.wait_for_exit()
    assert exit.stopped_by_agent and exit.log_line == "cancelled" and not exit.clean
    assert "never\n" not in harness.log()


def test_a_stop_during_a_failing_code_download_ends_the_attempt(harness):
    harness.control_plane.refused_routes["snapshots"] = 503
    harness.assign("true", snapshot="d1")
    harness.start()
    harness.wait_for_phase(Phase.SETUP)
    stop_now(harness)
    assert harness.wait_for_exit().stopped_by_agent


def test_a_notice_is_forwarded_to_the_program_and_the_control_plane_immediately(harness):
    harness.assign_python(PATIENT)
    harness.control_plane.next_heartbeat = timedelta(
        seconds=30
    )  # so that only the notice can be the cause
    harness.start()
    harness.wait_for_log("up\n")
    harness.notice_file.write_text("preempted")
    heartbeat = wait_until(
        lambda: next(
            (heartbeat for heartbeat in harness.control_plane.heartbeats if heartbeat.notice), None
        ),
        timeout=900,
    )
    assert heartbeat.notice is NoticeKind.PREEMPTED
    exit = harness.wait_for_exit(within=60)
    assert exit.stopped_by_agent and exit.status == 0
    assert "preempted" in exit.log_line


def test_a_notice_is_handled_while_a_heartbeat_hangs(harness):
    harness.assign_python(PATIENT)
    harness.start()
    harness.wait_for_log("up\n")
    harness.control_plane.delayed_routes["heartbeat"] = held = threading.Event()
    count = len(harness.control_plane.heartbeats)
    wait_until(lambda: harness.control_plane.held_requests["heartbeat"] == 1)
    harness.notice_file.write_text("maintenance")
    harness.wait_for_log("saving\n")
    wait_until(
        lambda: harness.control_plane.held_requests["heartbeat"] == 2,
        timeout=HEARTBEAT_TIMEOUT.read - 1,
    )
    held.set()
    wait_until(
        lambda: any(heartbeat.notice for heartbeat in harness.control_plane.heartbeats[count:])
    )
    assert harness.wait_for_exit().stopped_by_agent


def test_no_attempt_starts_after_a_notice(harness):
    harness.notice_file.write_text("preempted")
    harness.start()
    wait_until(lambda: any(heartbeat.notice for heartbeat in harness.control_plane.heartbeats))
    harness.assign("echo", "never")
    assert harness.wait_for_exit().stopped_by_agent
    assert "never\n" not in harness.log()


def test_a_release_stops_the_program_and_reports_its_exit(harness):
    harness.assign_python(PATIENT)
    harness.start()
    harness.wait_for_log("up\n")
    harness.control_plane.release = True
    assert harness.wait_for_agent_exit() == 0
    assert harness.wait_for_exit().stopped_by_agent
    assert harness.processes() == []


def test_an_idle_agent_exits_when_released(harness):
    harness.control_plane.release = True
    harness.start()
    assert harness.wait_for_agent_exit() == 0


@pytest.mark.parametrize("status", [401, 403])
def test_a_rejected_agent_stops_the_program_and_exits(harness, status):
    harness.assign_python(PATIENT)
    harness.start()
    harness.wait_for_log("up\n")
    harness.control_plane.refused_routes["heartbeat"] = status
    assert harness.wait_for_agent_exit() == 3
    assert harness.processes() == []
    assert "saving\n" in (harness.work / "j1.0" / "output.log").read_text()
