"""What people install: the wheel, in an environment that has nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import tpufleet
from tests.repository import ROOT
from tpufleet.service.web.pages import STATIC_FOLDER

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def run(*command: str | Path, cwd: Path, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TPUFLEET_"))}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**clean, "HOME": str(cwd)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By distribution."""
    folder = tmp_path_factory.mktemp("wheels")
    source = folder / "source"
    # A copy: building writes into the source folder.
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "packages"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    # The web page is built, not tracked.
    page = [str(path.relative_to(ROOT)) for path in STATIC_FOLDER.rglob("*") if path.is_file()]
    for name in [*filter(None, listed.stdout.split("\0")), *page]:
        if (
            "/tests/" not in name
            and "/web/" not in name.replace("/service/web/", "/")
            and (ROOT / name).exists()
        ):
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    projects = sorted(path.parent for path in source.glob("packages/*/pyproject.toml"))
    built = run(*PIP, "wheel", "--quiet", "--no-deps", "-w", folder, *projects, cwd=folder)
    if "Could not find a version that satisfies" in built.stderr:
        pytest.skip("the package index is not reachable, so setuptools cannot be installed")
    assert built.returncode == 0, built.stderr
    return {path.name.split("-")[0].replace("_", "-"): path for path in folder.glob("*.whl")}


@pytest.mark.slow
def test_wheels_have_one_version(wheels: dict[str, Path]):
    assert set(wheels) == {path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")}
    assert {path.name.split("-")[1] for path in wheels.values()} == {tpufleet.__version__}


def test_wheel_holds_the_web_page(wheels: dict[str, Path]):
    if not (STATIC_FOLDER / "index.html").is_file():
        pytest.skip("the web page was not built: scripts/build-web")
    names = zipfile.ZipFile(wheels["tpufleet"]).namelist()
    assert "tpufleet/service/web/static/index.html" in names
    assert any(name.endswith(".js") for name in names)


def test_wheels_hold_every_data_file(wheels: dict[str, Path]):
    for name, wheel in wheels.items():
        source = f"packages/{name}/src"
        listed = subprocess.run(
            ["git", "ls-files", source], cwd=ROOT, capture_output=True, text=True, check=True
        )
        tracked = {line.removeprefix(f"{source}/") for line in listed.stdout.splitlines()}
        tracked = {line for line in tracked if (ROOT / source / line).exists()}
        assert tracked - set(zipfile.ZipFile(wheel).namelist()) == set()


@pytest.mark.slow
def test_demo_runs_from_the_wheel_in_an_empty_environment(wheels: dict[str, Path], tmp_path: Path):
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    # The pip of this environment installs into the other one. Python compiles what is imported.
    install = (*PIP, "--python", python, "install", "--quiet", "--no-compile")
    installed = run(
        *install, "--require-hashes", "-r", ROOT / "requirements" / "demo.txt", cwd=tmp_path
    )
    if "Could not find a version that satisfies" in installed.stderr:
        pytest.skip("the package index is not reachable")
    assert installed.returncode == 0, installed.stderr
    installed = run(*install, "--no-deps", wheels["tpufleet"], cwd=tmp_path)
    assert installed.returncode == 0, installed.stderr
    where = run(python, "-c", "import tpufleet; print(tpufleet.__file__)", cwd=tmp_path)
    assert str(environment) in where.stdout
    demo = run(environment / "bin" / "tpu", "demo", cwd=tmp_path)
    assert demo.returncode == 0, demo.stdout + demo.stderr
