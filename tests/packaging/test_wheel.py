"""What people install: wheels, in environments that have nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import uv

import tpufleet
from tests.repository import ROOT
from tpufleet.service.web.pages import STATIC_FOLDER

UV = uv.find_uv_bin()
MAX_CORE_PACKAGES = 25
OTHERS = sorted(path.name[len("tpufleet-") :] for path in ROOT.glob("packages/tpufleet-*"))
UNREACHABLE = ("Could not connect", "dns error", "error sending request", "Failed to fetch")


def run(*command: str | Path, cwd: Path, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TPUFLEET_"))}
    cache = os.environ.get("UV_CACHE_DIR") or str(Path.home() / ".cache/uv")
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**clean, "HOME": str(cwd), "UV_CACHE_DIR": cache},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def run_uv(*arguments: str | Path, cwd: Path) -> str:
    done = run(UV, *arguments, "--quiet", "--no-config", cwd=cwd)
    if any(text in done.stderr for text in UNREACHABLE):
        pytest.skip("the package index is not reachable")
    assert done.returncode == 0, done.stderr
    return done.stdout


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
            if (ROOT / name).is_dir():  # deploy/, which the core links to
                shutil.copytree(ROOT / name, target)
            else:
                target.write_bytes((ROOT / name).read_bytes())
    for project in sorted(path.parent for path in source.glob("packages/*/pyproject.toml")):
        run_uv("build", "--wheel", "--out-dir", folder, project, cwd=folder)
    return {path.name.split("-")[0].replace("_", "-"): path for path in folder.glob("*.whl")}


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
        tracked = {line for line in tracked if (ROOT / source / line).is_file()}
        assert tracked - set(zipfile.ZipFile(wheel).namelist()) == set()


def test_the_core_holds_the_manifests_and_the_chart(wheels: dict[str, Path]):
    """`tpu deploy init` and `tpu cluster` need no checkout."""
    held = set(zipfile.ZipFile(wheels["tpufleet"]).namelist())
    shipped = [*(ROOT / "deploy/k8s").rglob("*"), *(ROOT / "deploy/helm").rglob("*")]
    files = {f"tpufleet/{path.relative_to(ROOT)}" for path in shipped if path.is_file()}
    assert files and files <= held


def environment(folder: Path, *install: str | Path) -> Path:
    """Its folder of programs."""
    run_uv("venv", "--python", sys.executable, folder / "venv", cwd=folder)
    run_uv("pip", "install", "--python", folder / "venv/bin/python", *install, cwd=folder)
    return folder / "venv" / "bin"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("others", "command"),
    [
        ((), "submit"),
        (("activations",), "extract"),
        (("gke",), "provisioner"),
        (("firestore",), "bridge"),
        (("testbed",), "emulator"),
        (OTHERS, "extract"),
    ],
    ids=["core", "activations", "gke", "firestore", "testbed", "all"],
)
def test_a_subset_installs_into_an_empty_environment(
    wheels: dict[str, Path], tmp_path: Path, others: Sequence[str], command: str
):
    """With what it depends on, and with the commands of what is installed."""
    names = ["tpufleet", *(f"tpufleet-{name}" for name in others)]
    programs = environment(tmp_path, *(wheels[name] for name in names))
    for arguments in (["--help"], [command, "--help"]):
        done = run(programs / "tpu", *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    if others == ("activations",):  # without a server and the rest
        done = run(programs / "python", ROOT / "examples/extract/small.py", cwd=tmp_path)
        assert "whole: True" in done.stdout, done.stderr
    listed = run_uv("pip", "list", "--python", programs / "python", cwd=tmp_path)
    packages = listed.splitlines()[2:]
    assert sum(line.startswith("tpufleet") for line in packages) == len(names)
    if not others:
        assert len(packages) <= MAX_CORE_PACKAGES
        assert run(programs / "tpu", "extract", "--help", cwd=tmp_path).returncode != 0


@pytest.mark.slow
def test_demo_runs_from_the_wheel_in_an_empty_environment(wheels: dict[str, Path], tmp_path: Path):
    pins = ROOT / "requirements" / "demo.txt"
    programs = environment(tmp_path, "--no-deps", "--require-hashes", "-r", pins)
    run_uv(
        *("pip", "install", "--python", programs / "python", "--no-deps", wheels["tpufleet"]),
        cwd=tmp_path,
    )
    where = run(
        programs / "python", "-c", "import tpufleet; print(tpufleet.__file__)", cwd=tmp_path
    )
    assert str(tmp_path) in where.stdout
    demo = run(programs / "tpu", "demo", cwd=tmp_path)
    assert demo.returncode == 0, demo.stdout + demo.stderr
