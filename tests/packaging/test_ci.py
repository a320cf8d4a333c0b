"""CI fails on any failed test: nothing is run again until it passes, and no failure is accepted.
And nothing that is tracked depends on where packages come from."""

from __future__ import annotations

import collections
import re
import subprocess
from pathlib import Path

import pytest

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
    for file in (ROOT / "requirements").glob("*.txt"):
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
        exists = line.startswith("[") or (ROOT / name).exists() or name in texts
        if not exists or (function and f"def {function}(" not in texts[name]):
            stale.append(line)
    assert stale == []
