"""The control plane away, slow or refusing: the workload runs on, and nothing is lost."""

from __future__ import annotations

import sys
import threading
import time
from datetime import timedelta

from tests.agent.control_plane import wait_until
from tests.agent.test_running import archive
from tests.agent.test_stopping import PATIENT
from tpufleet.agent.workload.runner import LOG_UPLOAD_TIMEOUT_SECONDS
from tpufleet.client.agents import LOG_TIMEOUT
from tpufleet.model.hosts import NoticeKind, Phase

COUNTS = "for n in $(seq 400); do echo line $n; sleep 0.002; done"


def numbers(log: str) -> list[int]:
    return [int(line.split()[1]) for line in log.splitlines() if line.startswith("line ")]


def test_an_outage_from_the_first_line_to_the_last_loses_nothing(world):
    world.assign("sh", "-c", f"while ! test -e ../run/go; do sleep 0.05; done; {COUNTS}; exit 5")
    world.start()
    world.phase(Phase.RUNNING)
    world.plane.vanish()
    (world.run_dir() / "go").touch()
    output = world.work / "j1.0" / "output.log"
    wait_until(lambda: "exited with status 5" in output.read_text())
    assert numbers(world.log()) == []
    world.plane.come_back()
    assert world.exit().status == 5
    wait_until(lambda: "exited with status 5" in world.log())
    assert numbers(world.log()) == list(range(1, 401))
    assert bytes(world.plane.logs["j1.0"]) == output.read_bytes()


def test_an_outage_in_the_middle_neither_loses_nor_repeats_a_line(world):
    world.assign("sh", "-c", COUNTS)
    world.start()
    world.shows("line 50\n")
    world.plane.vanish()
    output = world.work / "j1.0" / "output.log"
    wait_until(lambda: "line 300\n" in output.read_text())
    world.plane.come_back()
    assert world.exit().clean
    wait_until(lambda: "exited with status 0" in world.log())
    assert numbers(world.log()) == list(range(1, 401))


def test_a_server_that_lost_part_of_the_log_gets_it_again(world):
    world.plane.forget_log_after = 100
    world.assign("sh", "-c", COUNTS)
    world.start()
    assert world.exit().clean
    wait_until(lambda: "exited with status 0" in world.log())
    assert numbers(world.log()) == list(range(1, 401))


def test_a_refusing_log_route_does_not_hold_the_end_back(world):
    world.plane.refuse["logs"] = 404
    world.assign("sh", "-c", "echo unheard; exit 2")
    began = time.monotonic()
    world.start()
    assert world.exit().status == 2
    assert time.monotonic() - began < LOG_TIMEOUT.read  # nobody waited for an answer
    del world.plane.refuse["logs"]
    world.shows("unheard\n")


def test_a_hanging_log_route_does_not_hold_the_end_back(world):
    world.plane.delay["logs"] = threading.Event()
    world.assign("sh", "-c", "echo late; exit 2")
    began = time.monotonic()
    world.start()
    assert world.exit().status == 2
    assert time.monotonic() - began < LOG_TIMEOUT.read  # nobody waited for an answer


def test_the_end_is_told_only_after_the_log_arrived(world):
    held = world.plane.delay["logs"] = threading.Event()
    world.assign("echo", "slow but whole")
    world.start()
    wait_until(lambda: world.plane.waiting["logs"] == 1)
    output = world.work / "j1.0" / "output.log"
    wait_until(lambda: "exited with status 0" in output.read_text())
    assert not any(beat.exit for beat in world.plane.beats)
    held.set()
    world.exit()
    assert "exited with status 0" in world.log()


def test_after_an_outage_longer_than_its_patience_the_log_still_comes_before_the_end(world):
    """Once the end is told, the host may be taken away, and with it what is not sent yet."""
    world.assign("sh", "-c", f"while ! test -e ../run/go; do sleep 0.05; done; {COUNTS}; exit 5")
    world.start()
    world.phase(Phase.RUNNING)
    world.plane.vanish()
    (world.run_dir() / "go").touch()
    output = world.work / "j1.0" / "output.log"
    wait_until(lambda: "exited with status 5" in output.read_text())
    over = time.monotonic() + LOG_UPLOAD_TIMEOUT_SECONDS + 1
    wait_until(lambda: time.monotonic() > over)
    held = world.plane.delay["logs"] = threading.Event()
    count = len(world.plane.beats)
    world.plane.come_back()
    wait_until(lambda: world.plane.waiting["logs"] and len(world.plane.beats) > count)
    assert not any(beat.exit for beat in world.plane.beats)
    held.set()
    assert world.exit().status == 5
    assert numbers(world.log()) == list(range(1, 401))


def test_an_agent_that_must_leave_does_not_wait_for_an_outage_to_end(world):
    world.assign("sh", "-c", "echo up; exec sleep 60")
    world.start()
    world.shows("up\n")
    world.plane.vanish()
    world.leave()
    assert world.left() == 0


def test_the_program_runs_on_through_an_outage_that_is_shorter_than_the_lease(world):
    world.assign("sh", "-c", "echo up; sleep 1.5; echo still here")
    world.start()
    world.shows("up\n")
    world.plane.refuse["beat"] = 503
    count = len(world.plane.beats)
    wait_until(lambda: "still here" in world.log())
    del world.plane.refuse["beat"]
    assert world.exit().clean
    assert len(world.plane.beats) > count


def test_a_lost_lease_stops_the_program_and_that_is_told_later(world):
    world.plane.lease = timedelta(seconds=1)
    world.assign_python(PATIENT)
    world.start()
    world.shows("up\n")
    world.plane.vanish()
    output = world.work / "j1.0" / "output.log"
    wait_until(lambda: "saving\n" in output.read_text())
    world.plane.come_back()
    exit = world.exit()
    assert exit.stopped_by_us
    assert exit.line == "the lease was lost: no control plane answered for 1 s"


def test_a_simulated_host_does_not_wait_for_ever_for_a_control_plane_that_is_gone(world):
    world.assign("sh", "-c", "echo up; exec sleep 60")
    world.start(waits_seconds=2.0)
    world.shows("up\n")
    world.plane.vanish()
    assert world.left() == 3
    assert "did not come back" in (world.work / "j1.0" / "output.log").read_text()


def test_an_answer_that_makes_no_sense_is_waited_out(world):
    world.plane.garble.add("beat")
    world.assign("echo", "at last")
    world.start()
    wait_until(lambda: world.plane.waiting["garbled"] >= 2)
    world.plane.garble.clear()
    assert world.exit().clean


def test_code_is_fetched_once_the_server_is_back(world):
    world.plane.snapshots["d1"] = archive(hello_py="print('fetched')")
    world.plane.refuse["snapshots"] = 503
    world.assign(sys.executable, "hello.py", snapshot="d1")
    world.start()
    world.phase(Phase.SETUP)
    del world.plane.refuse["snapshots"]
    assert world.exit().clean
    assert "fetched\n" in world.log()


def test_a_late_answer_does_not_undo_a_newer_one(world):
    world.start()
    wait_until(lambda: world.plane.beats)
    held = world.plane.hold_next_reply = threading.Event()
    world.plane.release = True
    wait_until(lambda: world.plane.waiting["reply"])
    world.plane.release = False
    world.notice_file.write_text("preempted")  # its beat overtakes the one that hangs
    wait_until(lambda: world.plane.beats[-1].notice)
    world.notice(NoticeKind.MAINTENANCE)  # once this one comes, the answer to that one was heard
    wait_until(lambda: world.plane.beats[-1].notice is NoticeKind.MAINTENANCE)
    held.set()
    count = len(world.plane.beats)
    wait_until(lambda: len(world.plane.beats) > count + 3)
    assert world.status is None
