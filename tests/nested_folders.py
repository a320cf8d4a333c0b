"""Folders as a hostile job makes them: nested deeper than a path can name, or not deletable."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest


def make_nested(root: Path, levels: int, *, file: bytes | None = None) -> None:
    """`root/d/d/d…`, with a file `bottom` in the deepest."""
    root.mkdir(parents=True, exist_ok=True)
    current = os.open(root, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=current)
        child = os.open("d", os.O_RDONLY, dir_fd=current)
        os.close(current)
        current = child
    if file is not None:
        flags = os.O_WRONLY | os.O_CREAT
        with open(os.open("bottom", flags, 0o600, dir_fd=current), "wb") as bottom:
            bottom.write(file)
    os.close(current)


def refuse_to_delete(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of this name, as if each were a mount point, which not even root can delete."""
    rmdir = os.rmdir

    def refuse(path: str, *, dir_fd: int | None = None) -> None:
        if path == name:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        rmdir(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", refuse)
