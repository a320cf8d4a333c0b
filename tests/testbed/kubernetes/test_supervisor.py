"""Processes in a room of their own: whatever happens to it, none of them is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tpufleet.testbed.kubernetes.node import supervisor
from tpufleet.testbed.kubernetes.node.supervisor import SupervisedProgram, SupervisorConfig

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="namespaces need Linux and root"
)
# Leaves a daemon behind, as containerd does with its shims.
FORKS = "(setsid sleep 1000 &) ; exec sleep 1000"


def wait_until(condition, within: float = 60.0):
    deadline = time.monotonic() + within
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@pytest.fixture
def enclosure(tmp_path):
    """One that runs, the number of its namespace, and where it covers a folder."""
    (tmp_path / "covered").mkdir()
    (tmp_path / "ours").mkdir()
    plan = SupervisorConfig(
        namespace_file=str(tmp_path / "namespace"),
        logs=str(tmp_path),
        bind_mounts={str(tmp_path / "covered"): str(tmp_path / "ours")},
        programs=(
            SupervisedProgram(name="forks", argv=("sh", "-c", FORKS)),
            SupervisedProgram(
                name="touches", argv=("sh", "-c", f"touch {tmp_path}/covered/a; sleep 1000")
            ),
        ),
    )
    (tmp_path / "plan.json").write_text(plan.to_json())
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tpufleet.testbed.kubernetes.node.supervisor",
            str(tmp_path / "plan.json"),
        ]
    )
    record = tmp_path / "namespace"
    try:
        namespace = wait_until(lambda: record.exists() and record.read_text())
        wait_until(lambda: len(supervisor.namespace_members(namespace)) >= 4)
        yield process, namespace, tmp_path
    finally:
        process.kill()
        process.wait()


def sleeping(namespace: str) -> list[int]:
    found = []
    for pid in supervisor.namespace_members(namespace):
        try:
            if psutil.Process(pid).name() == "sleep":
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda one: one.name)
def test_everything_inside_ends_with_it(enclosure, number):
    process, namespace, _ = enclosure
    wait_until(lambda: len(sleeping(namespace)) >= 3)
    process.send_signal(number)
    process.wait(60)
    wait_until(lambda: supervisor.namespace_members(namespace) == [])


def test_when_it_is_told_to_end_none_is_left_by_the_time_it_is_gone(enclosure):
    process, namespace, _ = enclosure
    process.terminate()
    assert process.wait(60) == 0
    assert supervisor.namespace_members(namespace) == []


def test_when_its_first_process_is_killed_the_others_go_too(enclosure):
    process, namespace, _ = enclosure
    (first,) = (child.pid for child in psutil.Process(process.pid).children())
    os.kill(first, signal.SIGKILL)
    process.wait(60)
    assert supervisor.namespace_members(namespace) == []


def test_a_folder_made_to_be_covered_stays_until_the_last_who_covers_it_is_gone(
    enclosure, tmp_path
):
    process, _, _ = enclosure
    mine, theirs = tmp_path / "covered", tmp_path / "theirs"
    (mine / supervisor.MARKER_FILE).touch()
    theirs.mkdir()
    paths = [str(path) for path in (mine, theirs, tmp_path / "new")]
    supervisor.create_mount_points(paths)
    supervisor.remove_mount_points(paths)
    assert mine.exists() and theirs.exists() and not (tmp_path / "new").exists()
    process.terminate()
    process.wait(60)
    supervisor.remove_mount_points(paths)
    assert not mine.exists() and theirs.exists()


def test_programs_that_die_at_the_same_moment_are_all_started_again(enclosure):
    process, namespace, _ = enclosure
    before = wait_until(lambda: len(found := sleeping(namespace)) >= 3 and found)
    (first,) = psutil.Process(process.pid).children()
    first.suspend()  # so that it hears of both at once
    programs = first.children()
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: all(program.status() == psutil.STATUS_ZOMBIE for program in programs))
    first.resume()
    wait_until(lambda: len(set(sleeping(namespace)) - set(before)) >= 3)


def test_what_is_written_to_a_covered_folder_lands_in_ours_and_no_mount_is_seen_outside(enclosure):
    _, _, folder = enclosure
    wait_until((folder / "ours" / "a").exists)
    assert list((folder / "covered").iterdir()) == []
    assert str(folder) not in Path("/proc/self/mountinfo").read_text()
