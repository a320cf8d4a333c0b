"""`tpu submit-code`, as a person types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.bridges.harness import ORDER, PROJECT, BridgeHarness


def tpu(
    world: BridgeHarness, *args: str, stdin: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "tpufleet", "submit-code", *args),
            *("--project", PROJECT, "--collection", world.documents.id),
        ],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **variables},
    )


def test_code_is_sent_followed_listed_and_shown(world: BridgeHarness):
    world.start_bridge()
    done = tpu(world, "-", "--challenge", "5", "--follow", stdin="result = challenge_number * 2")
    assert done.returncode == 0, done.stderr
    assert "status:" in done.stdout and "completed" in done.stdout
    steps = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("20")]
    assert steps[0] == "pending" and steps == sorted(steps, key=ORDER.index)
    assert done.stdout.count("challenge_number:") == 1
    assert done.stdout.rstrip().endswith("result: 10")
    listed = json.loads(tpu(world, "--list", "--json").stdout)["documents"]
    assert [(row["status"], row["challenge_number"]) for row in listed] == [("completed", 5)]
    assert listed[0]["metadata"]["submitted_by"]
    table = tpu(world, "--list").stdout.splitlines()
    assert table[0].split() == ["id", "status", "challenge", "created", "result"]
    assert table[1].startswith(listed[0]["id"])
    shown = tpu(world, "--show", listed[0]["id"])
    assert shown.returncode == 0 and "result: 10" in shown.stdout


def test_code_that_fails_is_told_with_its_traceback_and_the_exit_status(world: BridgeHarness):
    world.start_bridge()
    done = tpu(world, "-", "--follow", stdin="raise ValueError('\\x1b[31mred')")
    assert done.returncode == 1
    assert "error: ValueError: " in done.stdout and "\x1b" not in done.stdout


def test_mistakes_are_told_before_anything_is_sent(world: BridgeHarness):
    for args, words in {
        ("missing.py",): "missing.py: cannot be read",
        ("--timeout", "-1"): "timeout: more than 0",
        ("--show", "nothing-like-it"): "no document nothing-like-it",
    }.items():
        done = tpu(world, *args)
        assert done.returncode in (1, 2) and words in done.stderr
    assert list(world.documents.stream()) == []


def test_a_firestore_that_does_not_answer_is_told_and_not_waited_for(world: BridgeHarness):
    """Nobody listens on port 1. The whole command has two minutes, and takes seconds."""
    done = tpu(world, "--list", FIRESTORE_EMULATOR_HOST="127.0.0.1:1")
    assert done.returncode != 0 and "Firestore does not answer" in done.stderr
