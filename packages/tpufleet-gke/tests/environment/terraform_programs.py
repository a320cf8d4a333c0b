"""OpenTofu and Terraform for tests, where they are installed or built."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tpufleet_gke.environment.terraform.versions import OPENTOFU_VERSION

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpufleet/servers"


def find(name: str) -> str | None:
    return shutil.which(name, path=f"{CACHE}{os.pathsep}{os.environ.get('PATH', '')}")


def opentofu() -> str:
    path = find("tofu")
    if path is None:
        pytest.skip(
            f"OpenTofu {OPENTOFU_VERSION} not found; ./test builds it where Go is installed"
        )
    return path


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "TF_CLI_CONFIG_FILE": os.devnull, "CHECKPOINT_DISABLE": "1"}
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
