"""Buckets as folders: the field of the job file, and the command that mounts them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tpufleet.errors import BadInput
from tpufleet.model.job.job_file import parse_job, to_document
from tpufleet.model.job.mounts import ERROR_PREFIX, FAILED, Mount, mounted_command

JOB = {"command": ["python", "train.py"], "accelerator": "v5e-4"}


@pytest.mark.parametrize(
    "written",
    [
        [{"bucket": "my-data", "path": "/data", "read_only": True}],
        [{"bucket": "gs://my-data", "path": "/data", "read_only": True}],
        ["my-data:/data:ro"],
    ],
    ids=["mapping", "gs://", "option"],
)
def test_mounts_are_read_and_written(written):
    spec = parse_job({**JOB, "mounts": written})
    assert spec.mounts == (Mount(bucket="my-data", path="/data", read_only=True),)
    assert parse_job(to_document(spec)) == spec


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ([{"bucket": "My Data", "path": "/data"}], r"mounts\[0\].bucket"),
        ([{"bucket": "my-data", "path": "data"}], "absolute path"),
        ([{"bucket": "my-data", "path": "/a/../etc"}], "absolute path"),
        ([{"bucket": "my-data", "path": "/a", "readonly": True}], "read_only"),
        (["my-data:/a", "other-data:/a"], "used twice"),
    ],
)
def test_invalid_mounts_are_rejected(written, message):
    with pytest.raises(BadInput, match=message):
        parse_job({**JOB, "mounts": written})


def run(folder: Path, command: list[str], *, installed: bool = True) -> subprocess.CompletedProcess:
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    if installed:
        (programs / "gcsfuse").write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\n')
        (programs / "gcsfuse").chmod(0o700)
    mounts = [
        Mount(bucket="my-data", path=f"{folder}/data", read_only=True),
        Mount(bucket="my-out", path=f"{folder}/out"),
    ]
    return subprocess.run(
        mounted_command(mounts, command), capture_output=True, text=True,
        env={**os.environ, "PATH": f"{programs}:/usr/bin:/bin"},
    )  # fmt: skip


def test_the_command_runs_after_the_mounts_with_its_own_exit_status(tmp_path):
    ran = run(tmp_path, ["sh", "-c", 'echo "$0 $1"; exit 7', "a b", "c"])
    assert (ran.returncode, ran.stdout) == (7, "a b c\n")
    assert (tmp_path / "calls").read_text().splitlines() == [
        f"--implicit-dirs -o ro my-data {tmp_path}/data", f"--implicit-dirs my-out {tmp_path}/out",
    ]  # fmt: skip
    assert (tmp_path / "data").is_dir()


def test_a_host_without_gcsfuse_says_so(tmp_path):
    ran = run(tmp_path, ["true"], installed=False)
    assert ran.returncode == FAILED
    assert ran.stderr.startswith(f"{ERROR_PREFIX}gcsfuse is not installed on this host")


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "data").touch()
    ran = run(tmp_path, ["true"])
    assert ran.returncode == 1 and f"mounts: {tmp_path}/data cannot be made" in ran.stderr
    assert "/mnt/buckets" in ran.stderr


def test_without_mounts_the_command_is_unchanged():
    assert mounted_command((), ["python", "train.py"]) == ("python", "train.py")
