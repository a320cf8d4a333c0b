"""Diagnostics of one host."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import pytest

from tpufleet.agent import diagnostics
from tpufleet.model.host_commands import CheckResult, Health


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in ("dev/vfio", "tmp", "work"):
        (tmp_path / folder).mkdir(parents=True)
    for chip in range(4):
        (tmp_path / f"dev/vfio/{chip}").touch()
    return tmp_path


def diagnose(root: Path, *, repair: bool = False, **environ: str) -> dict[str, CheckResult]:
    environ = {"TPUFLEET_CHIPS": "4", "TPUFLEET_WORK": str(root / "work"), **environ}
    host = diagnostics.InspectedHost(root=root, environ=environ, repair=repair)
    return {result.check: result for result in diagnostics.run_checks(host)}


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
    assert result.impact and "replace the node" in result.remedy


def test_a_foreign_process_on_the_chips_is_named_and_never_killed(root):
    with (root / "dev/vfio/0").open():
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
