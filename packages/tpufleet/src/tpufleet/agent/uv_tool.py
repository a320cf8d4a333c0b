"""Finds uv, which makes the environments of jobs and the bundles of hosts."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from tpufleet.errors import not_installed


def find_uv() -> str:
    """The one that the variable UV names, as uv sets it for programs that it runs; that of our own
    environment; or else the one on the PATH. BadInput if there is none."""
    named = os.environ.get("UV")
    candidates = [*([Path(named)] if named else []), Path(sys.prefix) / "bin" / "uv"]
    package = importlib.util.find_spec("uv")
    if package is not None and package.origin:  # installed with --target, as in a bundle
        candidates.append(Path(package.origin).parents[1] / "bin" / "uv")
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            return str(candidate)
    found = shutil.which("uv")
    if found is None:
        raise not_installed("uv", "uv")
    return found
