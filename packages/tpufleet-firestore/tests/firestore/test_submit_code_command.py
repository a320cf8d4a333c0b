"""The command `tpu submit-code`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.firestore.harness import ORDER, PATIENCE, PROJECT, BridgeHarness


def tpu(
    harness: BridgeHarness, *args: str, stdin: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "tpufleet", "submit-code", *args),
            *("--project", PROJECT, "--collection", harness.documents.id),
        ],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={**os.environ, **variables},
    )


@pytest.mark.slow
def test_code_is_submitted_followed_listed_and_shown(harness: BridgeHarness):
    harness.start_bridge()
    done = tpu(harness, "-", "--challenge", "5", "--follow", stdin="result = challenge_number * 2")
    assert done.returncode == 0, done.stderr
    assert "status:" in done.stdout and "completed" in done.stdout
    steps = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("20")]
    # A bridge may schedule it before the first look.
    assert steps and steps == sorted(steps, key=ORDER.index)
    assert done.stdout.count("challenge_number:") == 1
    assert done.stdout.rstrip().endswith("result: 10")
    listed = json.loads(tpu(harness, "--list", "--json").stdout)["documents"]
    assert [(row["status"], row["challenge_number"]) for row in listed] == [("completed", 5)]
    assert listed[0]["metadata"]["submitted_by"]
    table = tpu(harness, "--list").stdout.splitlines()
    assert table[0].split() == ["ID", "STATUS", "CHALLENGE", "CREATED", "RESULT"]
    assert table[1].startswith(listed[0]["id"])
    shown = tpu(harness, "--show", listed[0]["id"])
    assert shown.returncode == 0 and "result: 10" in shown.stdout


@pytest.mark.slow
def test_failed_code_prints_its_traceback_and_exits_with_1(harness: BridgeHarness):
    harness.start_bridge()
    done = tpu(harness, "-", "--follow", stdin="raise ValueError('\\x1b[31mred')")
    assert done.returncode == 1
    assert "error: ValueError: " in done.stdout and "\x1b" not in done.stdout


def test_invalid_arguments_are_reported_before_anything_is_written(harness: BridgeHarness):
    for args, message in {
        ("missing.py",): "cannot read missing.py",
        ("--timeout", "-1"): "timeout: expected a number above 0",
        ("--show", "nothing-like-it"): "no document nothing-like-it",
    }.items():
        done = tpu(harness, *args)
        assert done.returncode in (1, 2) and message in done.stderr
    assert list(harness.documents.stream(retry=PATIENCE)) == []


def test_an_unreachable_firestore_is_reported_within_seconds(harness: BridgeHarness):
    """Port 1 is closed. The command has a limit of two minutes."""
    done = tpu(harness, "--list", FIRESTORE_EMULATOR_HOST="127.0.0.1:1")
    assert done.returncode != 0 and "Firestore is unreachable" in done.stderr
