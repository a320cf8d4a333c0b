"""The oldest JAX that pyproject.toml allows runs the kernels and the models."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

from tests.repository import ROOT
from tpufleet.errors import BadInput
from tpufleet_activations.model import engines

OLDEST = ".".join(map(str, engines.OLDEST_JAX))
KERNELS = "tpu_kernel or varlen or kernel_that_fails or numpy or bits or infinities or transformers"


def test_every_extra_has_the_bound_that_is_checked():
    projects = [
        tomllib.loads(path.read_text())["project"]
        for path in ROOT.glob("packages/*/pyproject.toml")
    ]
    lines = [line for project in projects for line in project["dependencies"]]
    for project in projects:
        lines += [
            line for extra in project.get("optional-dependencies", {}).values() for line in extra
        ]
    bounds = {match[1] for line in lines if (match := re.match(r"jax(?:\[\w+\])?>=([\d.]+)", line))}
    assert bounds == {OLDEST}


@pytest.mark.parametrize("version", ["0.6.2", "0.7.0", "0.7.1"])
def test_an_older_version_is_refused(version):
    with pytest.raises(BadInput, match=f"jax>={OLDEST}"):
        engines.check_jax_version(version)


@pytest.mark.parametrize("version", [OLDEST, "0.7.2.dev3", "0.10.0", "1.0.0", "0.12.0.1"])
def test_a_newer_version_is_accepted(version):
    engines.check_jax_version(version)


@pytest.mark.versions
def test_models_and_kernels_agree_with_the_oldest_version(tmp_path):
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("needs uv, which installs the older version beside this one")
    packages = [f"jax=={OLDEST}", f"jaxlib=={OLDEST}", "ml_dtypes"]
    install = [uv, "pip", "install", "-q", "--python", sys.executable, "--target", str(tmp_path)]
    subprocess.run([*install, "--no-deps", *packages], check=True)
    tests = [
        f"packages/tpufleet-activations/tests/activations/{name}.py"
        for name in ("test_decoder", "test_kernels")
    ]
    tests.append("packages/tpufleet-activations/tests/activations/test_varlen_attention.py")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *tests,
        "-k",
        KERNELS,
    ]
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    version = subprocess.run(
        [sys.executable, "-c", "import jax; print(jax.__version__)"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert version.stdout.strip() == OLDEST
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
