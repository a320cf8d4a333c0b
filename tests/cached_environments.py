"""Python environments of tests whose packages are not those of all tests: made once with uv, from a
file in requirements/, in the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import uv

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpufleet/environments"
REQUIREMENTS = Path(__file__).parents[1] / "requirements"
COMPLETE = "complete"  # a file in an environment
UNREACHABLE = ("Could not connect", "dns error", "error sending request", "Failed to fetch")


def programs(name: str) -> Path:
    """The folder of its programs; skips where packages cannot be fetched, but not in CI."""
    requirements = REQUIREMENTS / f"{name}.txt"
    contents = requirements.read_bytes() + sys.version.encode()
    folder = CACHE / f"{name}-{hashlib.sha256(contents).hexdigest()[:16]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / COMPLETE).exists():
            for earlier in CACHE.glob(f"{name}-*"):
                shutil.rmtree(earlier)
            _run("venv", "--python", sys.executable, folder)
            _run("pip", "install", "--python", folder, "--no-deps", "--require-hashes",
                 "-r", requirements)  # fmt: skip
            (folder / COMPLETE).touch()
    return folder / "bin"


def _run(*arguments: str | Path) -> None:
    done = subprocess.run([uv.find_uv_bin(), *arguments], capture_output=True, text=True)
    if any(text in done.stderr for text in UNREACHABLE) and "CI" not in os.environ:
        pytest.skip(f"the package index is not reachable: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
