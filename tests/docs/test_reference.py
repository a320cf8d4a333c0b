"""The generated reference pages are up to date."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REFERENCE = runpy.run_path(str(ROOT / "scripts" / "reference.py"))


@pytest.mark.parametrize("name", REFERENCE["PAGES"])
def test_reference_page_is_up_to_date(name):
    text = (ROOT / "docs" / "reference" / name).read_text()
    assert text == REFERENCE["PAGES"][name](), "run `python scripts/reference.py --write`"


def test_the_commands_do_not_have_too_many_options():
    rows = re.findall(r"^\| `-", REFERENCE["PAGES"]["commands.md"](), re.MULTILINE)
    assert len(rows) <= 500, "CONTRIBUTING.md, What has to be earned"
