"""The generated reference pages are up to date."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REFERENCE = runpy.run_path(str(ROOT / "scripts" / "reference.py"))


@pytest.mark.parametrize("name", REFERENCE["PAGES"])
def test_reference_page_is_up_to_date(name):
    text = (ROOT / "docs" / "reference" / name).read_text()
    assert text == REFERENCE["PAGES"][name](), "run `python scripts/reference.py --write`"
