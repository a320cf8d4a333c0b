"""Where the files of the repository are that several distributions share."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(ROOT.glob("packages/*/src"))
TEST_ROOTS = [ROOT, *sorted(path.parent for path in ROOT.glob("packages/*/tests"))]
