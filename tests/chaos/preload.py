"""Libraries that programs load first, so that what they are told about the machine can be changed.
Without a compiler there are none."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path


def build(source: Path, folder: Path) -> Path | None:
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    library = folder / f"{source.stem}.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"]
    subprocess.run(command, check=True)
    return library


def environment(libraries: Sequence[Path | None], **variables: str) -> dict[str, str]:
    """Of a server; its agents and their jobs inherit it."""
    present = [str(library) for library in libraries if library is not None]
    if not present:
        return {}
    variables = {"LD_PRELOAD": ":".join(present), **variables}
    return {**variables, "TPUFLEET_LOCAL_ENV": ",".join(variables)}
