"""Diagnostics of one host."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections import namedtuple
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tpufleet.agent import diagnostics
from tpufleet.model.fleet.host_commands import CheckResult, DiagnosticReport, Health
from tpufleet.model.values import encoding


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in ("dev/vfio", "tmp", "work"):
        (tmp_path / folder).mkdir(parents=True)
    for chip in range(4):
        (tmp_path / f"dev/vfio/{chip}").touch()
    return tmp_path


def diagnose(
    root: Path, *, repair: bool = False, sees_all: bool = True, **environ: str
) -> dict[str, CheckResult]:
    """By default as a user who may inspect every process: root, or the only user of the host."""
    environ = {"TPUFLEET_CHIPS": "4", "TPUFLEET_WORK": str(root / "work"), **environ}
    host = diagnostics.InspectedHost(root=root, environ=environ, repair=repair)
    use = diagnostics.chip_use(host)
    use = replace(use, unseen=0) if sees_all else use
    return {result.check: result for result in diagnostics.run_checks(host, use)}


@pytest.fixture
def shared_root(root: Path) -> Iterator[Path]:
    """The same host below a folder that every user can enter."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        shared = Path(folder)
        shutil.copytree(root, shared, dirs_exist_ok=True)
        shared.chmod(0o755)
        (shared / "tmp").chmod(0o1777)
        yield shared


def diagnose_as_nobody(root: Path, **options: Any) -> dict[str, CheckResult]:
    """In a child process, as the user `nobody`."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.closerange(3, writer)  # what this process holds open is not the child's
            os.closerange(writer + 1, 1024)
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            checks = tuple(diagnose(root, sees_all=False, **options).values())
        except BaseException as error:
            checks = (CheckResult(check="error", health=Health.FAILED, message=repr(error)),)
        report = DiagnosticReport(checks=checks, at=datetime.now(UTC))
        os.write(writer, encoding.to_json(report))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as output:
        report = encoding.from_json(output.read(), DiagnosticReport)
    os.waitpid(child, 0)
    assert report.checks[0].check != "error", report.checks[0].message
    return {check.check: check for check in report.checks}


def test_the_agents_user_is_told_what_it_cannot_see(shared_root):
    (shared_root / "tmp/libtpu_lockfile").touch()
    with (shared_root / "dev/vfio/0").open():
        results = diagnose_as_nobody(shared_root, repair=True)
    assert "processes of other users cannot be inspected" in results["holders"].message
    assert results["lock"].health is Health.WARNING and not results["lock"].repaired
    assert "sudo" in results["lock"].remedy
    assert (shared_root / "tmp/libtpu_lockfile").exists()


def test_a_lock_held_by_another_user_is_never_removed(shared_root):
    with (shared_root / "tmp/libtpu_lockfile").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        results = diagnose_as_nobody(shared_root, repair=True)
    assert results["lock"].message == f"process {os.getpid()} holds the libtpu lock"
    assert (shared_root / "tmp/libtpu_lockfile").exists()


def test_a_repair_that_is_not_permitted_is_reported(shared_root):
    token = shared_root / "slice-token"
    token.touch(mode=0o644)
    results = diagnose_as_nobody(shared_root, repair=True, TPUFLEET_TOKEN_FILE=str(token))
    assert results["credentials"].health is Health.FAILED
    assert "not repaired: Operation not permitted" in results["credentials"].message
    assert results["credentials"].remedy == f"run `sudo chmod 600 {token}`"


@pytest.mark.parametrize(
    ("weak", "health"), [("", Health.OK), ("1", Health.WARNING)], ids=["strong", "weak"]
)
def test_the_guarantee_about_processes_is_reported(root, weak, health):
    guarantee = "control group: no process of a job outlives it"
    result = diagnose(root, TPUFLEET_CONTAINMENT_IN_USE=guarantee, TPUFLEET_CONTAINMENT_WEAK=weak)[
        "containment"
    ]
    assert (result.health, result.message) == (health, guarantee)


def test_a_healthy_host_passes_all_checks(root):
    results = diagnose(root)
    failed = [result for result in results.values() if result.health is Health.FAILED]
    assert failed == []
    assert results["devices"].message == "4 chips"
    assert "tpufleet" in results["versions"].message


def test_a_missing_chip_is_reported_with_impact_and_remedy(root):
    (root / "dev/vfio/2").unlink()
    result = diagnose(root)["devices"]
    assert result.health is Health.FAILED and result.message == "3 of 4 chips are present"
    assert result.impact and "replace the TPU VM" in result.remedy


@pytest.mark.parametrize("device", ["accel", "vfio/"], ids=["v2 to v4", "v5 and newer"])
def test_a_foreign_process_on_the_chips_is_named_and_never_killed(root, device):
    for chip in range(4):
        (root / f"dev/vfio/{chip}").rename(root / f"dev/{device}{chip}")
    assert diagnose(root)["holders"].message == "no process uses the chips"
    with (root / f"dev/{device}3").open():
        result = diagnose(root, repair=True)["holders"]
        assert result.health is Health.FAILED and "python" in result.message and not result.repaired


def test_a_stale_lock_is_reported_and_removed_only_on_repair(root):
    lock = root / "tmp/libtpu_lockfile"
    lock.touch()
    assert diagnose(root)["lock"].health is Health.FAILED and lock.exists()
    repaired = diagnose(root, repair=True)["lock"]
    assert repaired.repaired and repaired.health is Health.OK and not lock.exists()


def test_the_lock_of_a_running_process_is_kept(root):
    lock = root / "tmp/libtpu_lockfile"
    lock.touch()
    with (root / "dev/vfio/1").open():
        assert diagnose(root, repair=True)["lock"].health is Health.OK
    assert lock.exists()


def test_a_token_readable_by_others_is_reported_and_repaired(root):
    token = root / "slice-token"
    token.write_text("x")
    token.chmod(0o644)
    assert diagnose(root, TPUFLEET_TOKEN_FILE=str(token))["credentials"].health is Health.FAILED
    assert diagnose(root, repair=True, TPUFLEET_TOKEN_FILE=str(token))["credentials"].repaired
    assert token.stat().st_mode & 0o077 == 0


def test_an_unmounted_data_disk_is_reported(root):
    (root / "mnt/disks/1").mkdir(parents=True)
    result = diagnose(root)["mounts"]
    assert result.health is Health.FAILED and "mnt/disks/1" in result.message


@pytest.mark.parametrize(
    ("free", "health"), [(50, Health.OK), (8, Health.WARNING), (1, Health.FAILED)]
)
def test_low_disk_space_is_reported(root, monkeypatch, free, health):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(diagnostics.shutil, "disk_usage", lambda _: usage(100, 100 - free, free))
    assert diagnose(root)["disk"].health is health
