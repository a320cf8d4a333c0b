"""Runs programs of this machine to their end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tpufleet.errors import FleetError

MAX_OUTPUT = 2000  # characters of it in an error


def missing_packages(packages: Mapping[str, str], path: str | None = None) -> set[str]:
    """Debian packages of the programs that are not on `path`; None means $PATH."""
    return {package for name, package in packages.items() if shutil.which(name, path=path) is None}


def unsupported_reason(purpose: str, missing: Collection[str], *, root: bool = True) -> str:
    """Why this machine cannot do it: it lacks Linux, root or Debian packages. Empty if it can."""
    if root and (sys.platform != "linux" or os.geteuid() != 0):
        return f"{purpose} requires Linux and root; run the command with sudo"
    if missing:
        names = " ".join(sorted(missing))
        return f"{purpose} requires programs that are not installed; run `apt-get install {names}`"
    return ""


def run(
    title: str, argv: Sequence[object], error: type[FleetError] = FleetError, **options: Any
) -> str:
    """The output. `error` with the end of it if the program fails."""
    done = subprocess.run([*map(str, argv)], capture_output=True, check=False, **options)
    if done.returncode != 0:
        output = (done.stdout + done.stderr).decode(errors="replace").strip()
        raise error(f"{title} failed:\n{output[-MAX_OUTPUT:]}")
    return done.stdout.decode(errors="replace")
