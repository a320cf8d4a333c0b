"""The supervisor of a node's processes: however it ends, no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.polling import wait_until
from tpufleet_testbed.kubernetes.node import supervisor
from tpufleet_testbed.kubernetes.node.supervisor import (
    PidNamespace,
    SupervisedProgram,
    SupervisorConfig,
)

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not supervisor.namespaces_allowed(),
    reason="creating namespaces requires Linux and CAP_SYS_ADMIN (root on a host)",
)
# Leaves a daemon behind, as containerd does with its shims.
DAEMONIZE = "(setsid sleep 1000 &) ; exec sleep 1000"


@pytest.fixture
def supervised(tmp_path):
    """A running supervisor: its process, its namespace, and its folder."""
    mount_point, source = tmp_path / "mounted", tmp_path / "source"
    mount_point.mkdir()
    source.mkdir()
    config = SupervisorConfig(
        namespace_file=str(tmp_path / "namespace"),
        logs=str(tmp_path),
        bind_mounts={str(mount_point): str(source)},
        programs=(
            SupervisedProgram(name="daemonizes", argv=("sh", "-c", DAEMONIZE)),
            SupervisedProgram(
                name="writes", argv=("sh", "-c", f"touch {mount_point}/a; sleep 1000")
            ),
        ),
    )
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    process = subprocess.Popen(
        [sys.executable, "-m", supervisor.__name__, str(tmp_path / "config.json")]
    )
    namespace_file = tmp_path / "namespace"
    try:
        namespace = wait_until(lambda: PidNamespace.load(namespace_file))
        wait_until(lambda: len(namespace.members()) >= 4)
        yield process, namespace, tmp_path
    finally:
        process.kill()
        process.wait()


def sleeping(namespace: PidNamespace) -> list[int]:
    pids = []
    for pid in namespace.members():
        try:
            if psutil.Process(pid).name() == "sleep":
                pids.append(pid)
        except psutil.NoSuchProcess:
            continue
    return pids


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda value: value.name)
def test_all_processes_end_with_the_supervisor(supervised, number):
    process, namespace, _ = supervised
    wait_until(lambda: len(sleeping(namespace)) >= 3)
    process.send_signal(number)
    process.wait(900)
    wait_until(lambda: namespace.members() == [])


def test_after_sigterm_it_exits_only_when_no_process_is_left(supervised):
    process, namespace, _ = supervised
    process.terminate()
    assert process.wait(900) == 0
    assert namespace.members() == []


def test_all_processes_end_when_pid_1_of_the_namespace_is_killed(supervised):
    process, namespace, _ = supervised
    (first,) = (child.pid for child in psutil.Process(process.pid).children())
    os.kill(first, signal.SIGKILL)
    process.wait(900)
    assert namespace.members() == []


def test_a_created_mount_point_stays_until_it_is_no_longer_mounted(supervised, tmp_path):
    process, _, _ = supervised
    created, existing, unused = tmp_path / "mounted", tmp_path / "existing", tmp_path / "unused"
    (created / supervisor.MARKER_FILE).touch()
    existing.mkdir()
    paths = [str(path) for path in (created, existing, unused)]
    supervisor.create_mount_points(paths)
    supervisor.remove_mount_points(paths)
    assert created.exists() and existing.exists() and not unused.exists()
    process.terminate()
    process.wait(900)
    supervisor.remove_mount_points(paths)
    assert not created.exists() and existing.exists()


def test_programs_that_end_at_the_same_time_are_all_restarted(supervised):
    process, namespace, _ = supervised
    before = wait_until(lambda: len(pids := sleeping(namespace)) >= 3 and pids)
    (first,) = psutil.Process(process.pid).children()
    first.suspend()  # so that it reaps both at once
    wait_until(lambda: first.status() == psutil.STATUS_STOPPED)
    programs = first.children()
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: all(program.status() == psutil.STATUS_ZOMBIE for program in programs))
    first.resume()
    wait_until(lambda: len(set(sleeping(namespace)) - set(before)) >= 3)


def test_bind_mounts_are_visible_inside_the_namespace_only(supervised):
    _, _, folder = supervised
    wait_until((folder / "source" / "a").exists)
    assert list((folder / "mounted").iterdir()) == []
    assert str(folder) not in Path("/proc/self/mountinfo").read_text()


def test_a_later_namespace_of_the_same_number_is_another_one(supervised):
    _, namespace, _ = supervised
    earlier = replace(namespace, first_started=namespace.first_started - 1)
    assert namespace.members() and earlier.members() == []
    assert replace(namespace, first=2**22 + 1).members() == []
