"""CI fails on any failed test: nothing is run again until it passes, and no failure is accepted.
And nothing that is tracked depends on where packages come from."""

from __future__ import annotations

import collections
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.markdown import MAY_BE_DELETED

ROOT = Path(__file__).parents[2]
# Hosts of package registries, assembled so that this file does not name one.
REGISTRIES = re.compile(
    "|".join(
        (
            "py" + r"pi\.(?:org|python)",
            "python" + r"hosted\.org",
            "npm" + r"js\.(?:org|com)",
            "npm" + r"mirror\.",
            r"registry\." + r"(?:npm|yarn)",
            r"proxy\." + r"golang",
            r"conda\." + "anaconda",
            r"static\." + r"crates",
        )
    )
)
# They record the address that each package came from.
LOCK_FILES = {"uv.lock", "poetry.lock", "pdm.lock", "Pipfile.lock", "pylock.toml", "yarn.lock"}
RERUNS = re.compile(r"rerun|flaky|--lf|--last-failed|\|\| *true|set \+e|xfail", re.IGNORECASE)


@pytest.mark.parametrize("name", [".ci/run", ".ci/bare", "test", "pyproject.toml"])
def test_a_failed_test_fails_the_run(name):
    text = (ROOT / name).read_text()
    assert RERUNS.findall(text) == []
    if not name.endswith(".toml"):
        assert re.search(r"^set -e", text, re.MULTILINE)


def test_no_plugin_repeats_failed_tests():
    packages = (ROOT / "requirements" / "test.txt").read_text()
    assert re.findall(r"rerunfailures|flaky|pytest-retry", packages) == []


def test_no_tracked_file_records_the_address_of_a_package_registry():
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    files = [file for file in files if file.is_file()]
    assert [str(file) for file in files if file.name in LOCK_FILES] == []
    found = {
        f"{file.relative_to(ROOT)}: {match[0]}"
        for file in files
        for match in REGISTRIES.finditer(file.read_bytes().decode(errors="ignore"))
    }
    assert found == set()


def test_requirements_are_pinned_with_hashes():
    shipped = list(ROOT.glob("packages/*/src/**/*requirements.txt"))
    assert shipped
    for file in [*ROOT.glob("requirements/*.txt"), *shipped]:
        lines = file.read_text().splitlines()
        pins = [line for line in lines if line[:1] not in ("", " ", "#")]
        assert pins and all("==" in line and line.endswith("\\") for line in pins), file
        assert not any(line.startswith("tpufleet") for line in pins), file


def test_every_line_of_the_list_of_integration_tests_names_something():
    texts = collections.defaultdict(str)
    for folder in [ROOT / "tests", *ROOT.glob("packages/*/tests")]:
        for path in folder.rglob("test_*.py"):
            texts[path.name] += path.read_text()
    stale = []
    for line in (ROOT / "tests" / "integration.txt").read_text().split():
        name, _, function = line.partition("::")
        if (ROOT / name).is_relative_to(MAY_BE_DELETED):
            continue
        exists = line.startswith("[") or (ROOT / name).exists() or name in texts
        if not exists or (function and f"def {function}(" not in texts[name]):
            stale.append(line)
    assert stale == []


STUB = """#!/bin/sh
echo "${0##*/} $*" >> "$LOG"
"""


@pytest.mark.parametrize(
    ("arguments", "lints", "builds"),
    [
        ("", True, False),
        ("--all", True, True),
        ("--all -x", True, True),
        ("tests/test_a.py::test_b", False, False),
        ("--all tests/test_a.py::test_b", False, False),
        ("--all tests", False, False),
    ],
)
def test_only_a_run_of_all_tests_builds(tmp_path, arguments, lints, builds):
    """`./test` in an environment that is set up, whose programs note that they are called."""
    log = tmp_path / "log"
    for name in ("test", "scripts/environment.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in (".venv/bin/python", ".venv/bin/ruff", ".venv/bin/mypy", "scripts/build-web"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(STUB)
        (tmp_path / name).chmod(0o755)
    for name in ("packages/a/pyproject.toml", "requirements/test.txt", "tests/test_a.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    nothing = subprocess.check_output(["cksum"], stdin=subprocess.DEVNULL, text=True)
    (tmp_path / ".venv/.ready-test").write_text(nothing.strip())
    environ = {"PATH": os.environ["PATH"], "LOG": str(log)}
    subprocess.run(["./test", *arguments.split()], cwd=tmp_path, env=environ, check=True)
    calls = log.read_text()
    assert ("ruff check" in calls) is lints
    for call in ("build_servers.py", "build-web", "mypy"):
        assert (call in calls) is builds
    assert "-m pytest" in calls
