"""`tpu submit-code`, as a person types it."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.bridges.worlds import PROJECT, World


def tpu(world: World, *args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
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
    )


def test_code_is_sent_followed_listed_and_shown(world: World):
    world.start_bridge()
    done = tpu(world, "-", "--challenge", "5", "--follow", stdin="result = challenge_number * 2")
    assert done.returncode == 0, done.stderr
    assert "status:" in done.stdout and "completed" in done.stdout
    assert done.stdout.rstrip().endswith("result: 10")
    listed = json.loads(tpu(world, "--list", "--json").stdout)["documents"]
    assert [(row["status"], row["challenge_number"]) for row in listed] == [("completed", 5)]
    assert listed[0]["metadata"]["submitted_by"]
    table = tpu(world, "--list").stdout.splitlines()
    assert table[0].split() == ["id", "status", "challenge", "created", "result"]
    assert table[1].startswith(listed[0]["id"])
    shown = tpu(world, "--show", listed[0]["id"])
    assert shown.returncode == 0 and "result: 10" in shown.stdout


def test_code_that_fails_is_told_with_its_traceback_and_the_exit_status(world: World):
    world.start_bridge()
    done = tpu(world, "-", "--follow", stdin="raise ValueError('\\x1b[31mred')")
    assert done.returncode == 1
    assert "error: ValueError: " in done.stdout and "\x1b" not in done.stdout


def test_mistakes_are_told_before_anything_is_sent(world: World):
    for args, words in {
        ("missing.py",): "missing.py: cannot be read",
        ("--timeout", "-1"): "timeout: more than 0",
        ("--show", "nothing-like-it"): "no document nothing-like-it",
    }.items():
        done = tpu(world, *args)
        assert done.returncode in (1, 2) and words in done.stderr
    assert list(world.documents.stream()) == []
