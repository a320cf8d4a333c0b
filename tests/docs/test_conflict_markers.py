"""No file was committed with a merge half resolved."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# As git writes them, at the start of a line; not a row of `=`, which underlines headings too.
MARKERS = "^(<{7}|>{7}) "


def test_no_tracked_file_has_conflict_markers():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    matches = subprocess.run(
        ["git", "grep", "-nIE", MARKERS], cwd=ROOT, capture_output=True, text=True
    )
    assert matches.returncode == 1, matches.stdout + matches.stderr
