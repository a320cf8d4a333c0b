"""Runs programs of this machine to their end."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any

from tpufleet.errors import FleetError

MAX_OUTPUT = 2000  # characters of it in an error


def run(
    title: str, argv: Sequence[object], error: type[FleetError] = FleetError, **options: Any
) -> str:
    """The output. `error` with the end of it if the program fails."""
    done = subprocess.run([*map(str, argv)], capture_output=True, check=False, **options)
    if done.returncode != 0:
        output = (done.stdout + done.stderr).decode(errors="replace").strip()
        raise error(f"{title} failed:\n{output[-MAX_OUTPUT:]}")
    return done.stdout.decode(errors="replace")
