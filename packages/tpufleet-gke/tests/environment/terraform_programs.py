"""OpenTofu and Terraform for tests, where they are installed or built."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from scripts import build_servers


def find(name: str) -> str | None:
    """`tofu` or `terraform`."""
    return build_servers.find(name) if name in build_servers.SERVERS else shutil.which(name)


def opentofu() -> str:
    path = find("tofu")
    if path is None:
        pytest.skip("OpenTofu not found; scripts/build_servers.py tofu builds it")
    return path


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "TF_CLI_CONFIG_FILE": os.devnull, "CHECKPOINT_DISABLE": "1"}
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
