"""Keeps the file that standard error is appended to small: an agent or a server may log for months.

Where standard error is a pipe or the journal, whoever reads it limits it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat

MAX_BYTES = 16 * 2**20  # of the current file; the previous one is kept beside it, as `NAME.1`


def rotate(descriptor: int = 2, max_bytes: int = MAX_BYTES) -> bool:
    """Whether it was rotated. Copies and truncates: other processes have the same file open, so it
    cannot be renamed. What they write meanwhile may be lost."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size <= max_bytes:
        return False
    if not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND:
        return False  # the next write would be at the old end
    # Deleted, no /proc, or no room: rather lose the old lines than fill the disk.
    with contextlib.suppress(OSError):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if os.path.samestat(status, os.stat(path)):
            _copy_tail(path, f"{path}.1", max_bytes)
    os.ftruncate(descriptor, 0)
    return True


def _copy_tail(path: str, to: str, size: int) -> None:
    create = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with open(path, "rb") as source, open(os.open(to, create, 0o600), "wb") as target:
        source.seek(-size, os.SEEK_END)
        shutil.copyfileobj(source, target)
