"""The doctor's look at one host."""

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


def look(root: Path, *, mend: bool = False, **environ: str) -> dict[str, CheckResult]:
    given = {"TPUFLEET_CHIPS": "4", "TPUFLEET_WORK": str(root / "work"), **environ}
    host = diagnostics.InspectedHost(root=root, environ=given, repair=mend)
    return {found.check: found for found in diagnostics.run_checks(host)}


def test_a_healthy_host_is_found_healthy(root):
    found = look(root)
    ailing = [item for item in found.values() if item.health is Health.FAILED]
    assert ailing == []
    assert found["devices"].message == "4 chips"
    assert "tpufleet" in found["versions"].message


def test_a_missing_chip_is_found_and_what_it_means_is_said(root):
    (root / "dev/vfio/2").unlink()
    found = look(root)["devices"]
    assert found.health is Health.FAILED and found.message == "3 of 4 chips are there"
    assert found.impact and "replaced" in found.remedy


def test_who_holds_the_chips_is_named_and_never_ended(root):
    with (root / "dev/vfio/0").open():
        found = look(root, mend=True)["holders"]
        assert found.health is Health.FAILED and "python" in found.message and not found.repaired


def test_a_stale_lock_is_found_and_removed_only_when_asked(root):
    lock = root / "tmp/libtpu_lockfile"
    lock.touch()
    assert look(root)["lock"].health is Health.FAILED and lock.exists()
    mended = look(root, mend=True)["lock"]
    assert mended.repaired and mended.health is Health.OK and not lock.exists()


def test_the_lock_of_a_running_program_is_left_alone(root):
    lock = root / "tmp/libtpu_lockfile"
    lock.touch()
    with (root / "dev/vfio/1").open():
        assert look(root, mend=True)["lock"].health is Health.OK
    assert lock.exists()


def test_a_token_that_others_can_read_is_found_and_mended(root):
    token = root / "slice-token"
    token.write_text("x")
    token.chmod(0o644)
    assert look(root, TPUFLEET_TOKEN_FILE=str(token))["credentials"].health is Health.FAILED
    assert look(root, mend=True, TPUFLEET_TOKEN_FILE=str(token))["credentials"].repaired
    assert token.stat().st_mode & 0o077 == 0


def test_a_data_disk_that_is_not_mounted_is_found(root):
    (root / "mnt/disks/1").mkdir(parents=True)
    found = look(root)["mounts"]
    assert found.health is Health.FAILED and "mnt/disks/1" in found.message


@pytest.mark.parametrize(
    ("free", "health"), [(50, Health.OK), (8, Health.WARNING), (1, Health.FAILED)]
)
def test_a_disk_that_fills_up_is_found(root, monkeypatch, free, health):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(diagnostics.shutil, "disk_usage", lambda _: usage(100, 100 - free, free))
    assert look(root)["disk"].health is health
