"""Stopping: stop file, SIGTERM, grace, SIGKILL, and nothing left before the end is told."""

from __future__ import annotations

import signal
import sys
import threading
from dataclasses import replace
from datetime import timedelta

import psutil
import pytest

from tests.agent.control_plane import wait_until
from tpufleet.client.agents import HEARTBEAT_TIMEOUT
from tpufleet.model.end_reasons import EndReason
from tpufleet.model.hosts import NoticeKind, Phase

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
# A daemon as the books have it: forks twice, leaves its session, keeps no terminal.
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


def stop_now(world, reason=EndReason.CANCELLED):
    world.plane.assignment = replace(world.plane.assignment, stop=reason)


def test_a_stop_gives_the_program_its_chance(world):
    world.assign_python(PATIENT)
    world.start()
    world.shows("up\n")
    stop_now(world)
    exit = world.exit()
    assert (exit.status, exit.stopped_by_us, exit.line) == (0, True, "cancelled")
    assert (world.run_dir() / "stop").exists()
    assert "[tpufleet] stopping: cancelled; SIGTERM now, SIGKILL after 5 s\nsaving\n" in world.log()
    assert Phase.STOPPING in {beat.phase for beat in world.plane.beats}


@pytest.mark.parametrize("next_one", [None, "j1.1"], ids=["none", "another"])
def test_an_attempt_that_is_no_longer_assigned_is_stopped(world, next_one):
    world.assign_python(PATIENT)
    world.start()
    world.shows("up\n")
    if next_one:
        world.assign("echo", "next", attempt_id=next_one, number=1)
    else:
        world.plane.assignment = None
    assert world.exit().stopped_by_us
    if next_one:
        assert world.exit(next_one).clean
        assert "next" in world.log(next_one)
    wait_until(lambda: world.plane.beats[-1].attempt_id == next_one)


def test_children_that_ignore_sigterm_are_killed_after_the_grace_period(world):
    world.assign(
        "sh", "-c", f"{sys.executable} -c '{STUBBORN}' & wait", grace=timedelta(seconds=0.5)
    )
    world.start()
    world.shows("up\n")
    stop_now(world)
    exit = world.exit()
    assert exit.stopped_by_us and exit.signal == signal.SIGTERM
    assert world.processes() == []


def test_a_program_that_ignores_sigterm_is_killed_after_the_grace_period(world):
    world.assign_python(STUBBORN, grace=timedelta(seconds=0.3))
    world.start()
    world.shows("up\n")
    stop_now(world)
    exit = world.exit()
    assert (exit.signal, exit.stopped_by_us, exit.oom_killed) == (signal.SIGKILL, True, False)


def test_a_daemon_that_left_the_session_and_ignores_sigterm_is_found_and_killed(world):
    world.assign_python(
        DAEMON + "daemon(True); print('up', flush=True); time.sleep(60)",
        grace=timedelta(seconds=0.5),
    )
    world.start()
    world.shows("up\n")
    wait_until(lambda: len(world.processes()) >= 2)
    stop_now(world)
    world.exit()
    assert world.processes() == []


def test_what_lingers_after_the_program_ended_is_ended_before_the_end_is_told(world):
    world.assign_python(DAEMON + "daemon(False); print('done', flush=True); sys.exit(3)")
    world.start()
    exit = world.exit()
    assert (exit.status, exit.stopped_by_us) == (3, False)
    assert world.processes() == []


def test_a_child_in_the_session_without_the_mark_is_ended_too(world):
    world.assign("sh", "-c", "env -i sleep 61.25 & echo left")
    world.start()
    assert world.exit().clean
    left = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "61.25"]]
    assert left == []


def test_a_helper_that_setup_left_running_serves_the_command_and_goes_with_it(world):
    world.assign(
        "sh",
        "-c",
        "kill -0 $(cat ../run/helper) && echo served",
        setup=("sh", "-c", "sleep 60 & echo $! > ../run/helper"),
    )
    world.start()
    assert world.exit().clean
    assert "served\n" in world.log()
    assert world.processes() == []


def test_a_stop_during_setup_never_reaches_the_command(world):
    world.assign("echo", "never", setup=("sh", "-c", "echo up; sleep 60"))
    world.start()
    world.shows("up\n")
    stop_now(world, EndReason.SUPERSEDED)
    exit = world.exit()
    assert exit.stopped_by_us and exit.during_setup
    assert "never" not in world.log()


def test_an_attempt_that_is_to_stop_before_it_began_never_runs(world):
    world.assign("echo", "never", stop=EndReason.CANCELLED)
    world.start()
    exit = world.exit()
    assert exit.stopped_by_us and exit.line == "cancelled" and not exit.clean
    assert "never\n" not in world.log()


def test_a_stop_while_the_code_cannot_be_fetched_ends_the_attempt(world):
    world.plane.refuse["snapshots"] = 503
    world.assign("true", snapshot="d1")
    world.start()
    world.phase(Phase.SETUP)
    stop_now(world)
    assert world.exit().stopped_by_us


def test_a_notice_reaches_the_program_and_the_control_plane_at_once(world):
    world.assign_python(PATIENT)
    world.plane.next_beat = timedelta(seconds=30)  # so that nothing but the notice can be why
    world.start()
    world.shows("up\n")
    world.notice_file.write_text("preempted")
    beat = wait_until(lambda: next((b for b in world.plane.beats if b.notice), None), within=60)
    assert beat.notice is NoticeKind.PREEMPTED
    exit = world.exit(within=60)
    assert exit.stopped_by_us and exit.status == 0
    assert "preempted" in exit.line


def test_a_notice_is_acted_on_and_sent_also_while_another_beat_hangs(world):
    world.assign_python(PATIENT)
    world.start()
    world.shows("up\n")
    world.plane.delay["beat"] = held = threading.Event()
    count = len(world.plane.beats)
    wait_until(lambda: world.plane.waiting["beat"] == 1)
    world.notice_file.write_text("maintenance")
    world.shows("saving\n")
    wait_until(lambda: world.plane.waiting["beat"] == 2, within=HEARTBEAT_TIMEOUT.read - 1)
    held.set()
    wait_until(lambda: any(b.notice for b in world.plane.beats[count:]))
    assert world.exit().stopped_by_us


def test_nothing_new_is_begun_after_a_notice(world):
    world.notice_file.write_text("preempted")
    world.start()
    wait_until(lambda: any(beat.notice for beat in world.plane.beats))
    world.assign("echo", "never")
    assert world.exit().stopped_by_us
    assert "never\n" not in world.log()


def test_release_stops_the_program_tells_the_end_and_leaves(world):
    world.assign_python(PATIENT)
    world.start()
    world.shows("up\n")
    world.plane.release = True
    assert world.left() == 0
    assert world.exit().stopped_by_us
    assert world.processes() == []


def test_an_idle_agent_leaves_when_released(world):
    world.plane.release = True
    world.start()
    assert world.left() == 0


@pytest.mark.parametrize("status", [401, 403])
def test_an_agent_whose_slice_is_not_ours_any_more_stops_everything_and_leaves(world, status):
    world.assign_python(PATIENT)
    world.start()
    world.shows("up\n")
    world.plane.refuse["beat"] = status
    assert world.left() == 3
    assert world.processes() == []
    assert "saving\n" in (world.work / "j1.0" / "output.log").read_text()
