"""The documentation site builds without a warning, so every link and anchor in it resolves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_site_builds_with_every_link_and_anchor_resolved(tmp_path):
    pytest.importorskip("material", reason="needs mkdocs-material: pip install '.[docs]'")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert (tmp_path / "index.html").exists()
