"""What serves people who come from other tools can be deleted by `rm -r` of its folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.repository import ROOT

FOLDER = "packages/tpufleet-migration"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is tracked here, without the folder."""
    copy = tmp_path_factory.mktemp("checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists() and not name.startswith(f"{FOLDER}/"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name, follow_symlinks=False)
    return copy


def run(checkout: Path, *command: str, status: int = 0, **environ: str) -> str:
    done = subprocess.run(
        command, cwd=checkout, env={**os.environ, **environ}, capture_output=True, text=True
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def run_python(checkout: Path, *arguments: str, status: int = 0) -> None:
    """In an environment in which all is installed: its files name the folder."""
    folders = [*checkout.glob("packages/*/src"), sysconfig.get_path("purelib")]
    path = os.pathsep.join(map(str, folders))
    # Without `site`, which adds the folders of this checkout.
    run(checkout, sys.executable, "-S", "-m", *arguments, status=status, PYTHONPATH=path)


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("--help", 0),
        ("run --help", 0),
        ("config rules", 0),
        ("config --help", 0),
        ("extract --help", 0),
        ("purge --help", 0),
        ("kill x", 2),
    ],
)
def test_commands_work(checkout: Path, words: str, status: int):
    run_python(checkout, "tpufleet", *words.split(), status=status)


def test_layers_and_pages_are_complete(checkout: Path):
    pages = ("tests/docs/test_pages.py", "tests/docs/test_paths.py")
    run_python(checkout, "pytest", "-n0", "tests/test_architecture.py", *pages)


@pytest.mark.slow
def test_it_is_installed(checkout: Path):
    run(checkout, "./test", "tests/test_architecture.py", TPUFLEET_VENV=str(checkout / ".venv"))
    assert "extract" in run(checkout, ".venv/bin/tpu", "--help")
