"""Every file and folder of this repository that the documentation names exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs import markdown
from tests.repository import ROOT, SOURCES

PAGES = [
    *sorted(markdown.DOCS.rglob("*.md")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted(ROOT.glob("packages/*/README.md")),
]
# What a path may be relative to: the repository, and the code of each distribution.
BASES = [ROOT, *(source / source.parent.name.replace("-", "_") for source in SOURCES)]
# A path of this repository starts with one of these, wherever it stands.
TOP = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"build", "dist", "site"}
PACKAGES = {path.name for base in BASES[1:] for path in base.iterdir() if path.is_dir()}
IN_CODE = TOP | PACKAGES | {"src/tpufleet"}

_anywhere = re.compile(rf"(?<![\w/.:$-])(?:\./)?((?:{'|'.join(sorted(TOP))})/[\w./*-]*\w/?)")
_in_code = re.compile(rf"((?:{'|'.join(sorted(IN_CODE))})/[\w./-]*)")


def named_paths(page: Path) -> Iterator[str]:
    text = page.read_text()
    yield from _anywhere.findall(text)
    for code in markdown.code_in_sentences(page):
        if match := _in_code.fullmatch(code.removeprefix("./")):
            yield match[1]


def exists(name: str) -> bool:
    if (ROOT / name).is_relative_to(markdown.MAY_BE_DELETED):
        return True
    if "*" in name:
        return any(any(base.glob(name)) for base in BASES)
    return any((base / name).exists() for base in BASES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_named_path_exists(page):
    assert sorted({name for name in named_paths(page) if not exists(name)}) == []


def test_the_walk_of_a_job_has_as_many_files_as_it_says():
    text = (markdown.DOCS / "architecture.md").read_text()
    walk = text.partition("## The walk of a job\n")[2].partition("\n## ")[0]
    files = re.findall(r"^(\d+)\. `[\w/]+\.py`", walk, re.MULTILINE)
    assert [int(number) for number in files] == list(range(1, len(files) + 1))
    assert walk.startswith(f"The {len(files)} files")


def test_a_path_that_does_not_exist_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("See `model/nowhere.py`, `docs/architecture.md` and\n./test tests/none.py\n")
    assert {name for name in named_paths(page) if not exists(name)} == {
        "model/nowhere.py",
        "tests/none.py",
    }
