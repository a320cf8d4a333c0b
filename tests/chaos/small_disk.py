"""A file system of its own for state folders, small enough to be filled."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil

SIZE = 256 * 2**20


class SmallDisk:
    """A tmpfs, where this user may mount one. Elsewhere the servers themselves get a limit on the
    size of files: nothing can be written either, with another error."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._filler = folder / "filler"
        command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE},mode=711", "chaos", str(folder)]
        mount = shutil.which("mount")
        self.mounted = (
            mount is not None
            and os.geteuid() == 0
            and subprocess.run(command, capture_output=True).returncode == 0
        )

    def fill(self, servers: Sequence[int]) -> None:
        if not self.mounted:
            for pid in servers:
                _limit_files(pid, 0)
            return
        with self._filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(2**20))
            except OSError:
                pass  # full, but for less than a mebibyte
            try:
                while True:
                    file.write(bytes(512))
            except OSError:
                return  # full

    def free(self, servers: Sequence[int]) -> None:
        if not self.mounted:
            for pid in servers:
                _limit_files(pid, resource.RLIM_INFINITY)
            return
        self._filler.unlink(missing_ok=True)

    def cleanup(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


def _limit_files(pid: int, size: int) -> None:
    try:
        process = psutil.Process(pid)
        _, hard = process.rlimit(resource.RLIMIT_FSIZE)
        process.rlimit(resource.RLIMIT_FSIZE, (size, hard))
    except psutil.NoSuchProcess:
        return
