"""A message about a missing package names the line that installs it for this Python."""

from __future__ import annotations

import ast
import os
import subprocess
import venv
from pathlib import Path

import pytest
import uv

import tpufleet

SOURCE = Path(tpufleet.__file__).parent
# Text that runs elsewhere: on the hosts of a job, and on those of a node.
ELSEWHERE = {"model/job/jobs.py", "views/cli/vm/remote_commands.py"}


def printed_by(python: Path, path: Path, **environ: str) -> str:
    code = "from tpufleet.errors import install_command; print(install_command('tpufleet[gcs]'))"
    env = {"PATH": str(path), "PYTHONPATH": str(SOURCE.parent), "HOME": str(path), **environ}
    done = subprocess.run([python, "-c", code], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Of an environment without pip, as uv makes them, in a folder with a space in its name."""
    folder = tmp_path / "my environment"
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin" / "python"


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """The PATH."""
    folder = tmp_path / "programs"
    folder.mkdir()
    return folder


def put_uv(programs: Path) -> None:
    (programs / "uv").write_text("#!/bin/sh\n")
    (programs / "uv").chmod(0o755)


def test_an_environment_with_pip_uses_its_own(python: Path, programs: Path, tmp_path: Path):
    (tmp_path / "packages/pip").mkdir(parents=True)
    (tmp_path / "packages/pip/__init__.py").touch()
    put_uv(programs)
    path = os.pathsep.join([str(SOURCE.parent), str(tmp_path / "packages")])
    line = printed_by(python, programs, PYTHONPATH=path)
    assert line == f"'{python}' -m pip install 'tpufleet[gcs]'"


def test_an_environment_of_uv_has_no_pip(python: Path, programs: Path):
    put_uv(programs)
    line = printed_by(python, programs)
    assert line == f"uv pip install --python '{python}' 'tpufleet[gcs]'"


def test_without_pip_and_uv_pip_is_brought_first(python: Path, programs: Path):
    line = printed_by(python, programs)
    assert line == f"'{python}' -m ensurepip && '{python}' -m pip install 'tpufleet[gcs]'"


@pytest.mark.parametrize(
    ("mark", "line"),
    [
        ("uv-receipt.toml", "uv tool install 'tpufleet[gcs]'"),
        ("pipx_metadata.json", "pipx install --force 'tpufleet[gcs]'"),
    ],
)
def test_an_installed_tool_is_installed_again_with_the_extra(python, programs, mark, line):
    (python.parents[1] / mark).touch()
    assert printed_by(python, programs) == line


def test_uv_accepts_the_line(python: Path, programs: Path):
    """As far as it goes without a network."""
    (programs / "uv").symlink_to(uv.find_uv_bin())
    line = printed_by(python, programs)
    done = subprocess.run(
        f"{line} --offline --no-index --dry-run", shell=True, capture_output=True, text=True,
        env={**os.environ, "PATH": f"{programs}:/usr/bin:/bin"},
    )  # fmt: skip
    assert "you require tpufleet[gcs]" in " ".join(done.stderr.split()), done.stderr


def test_no_message_names_an_installer_of_its_own():
    """`pip install …` is wrong where there is no pip, and where pip is another Python's."""
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno}: {node.value.strip()[:60]}"
        for path in sorted(SOURCE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and "pip install" in node.value
        and str(path.relative_to(SOURCE)) not in {*ELSEWHERE, "errors.py"}
    ]
    assert found == []
