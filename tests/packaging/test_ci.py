"""CI fails on any failed test: nothing is run again until it passes, and no failure is accepted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
