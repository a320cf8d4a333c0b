"""Whether a disk has room, without writing to it."""

from __future__ import annotations

import os
from pathlib import Path

# A commit with many jobs may take this much. Below it small writes still succeed, into space that a
# file already has, and others fail.
MIN_FREE_BYTES = 2**20


def is_full(folder: Path) -> bool:
    """False where it is unknown. Quotas of users are not included."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return False
    as_root = os.geteuid() == 0  # may use the blocks that are reserved
    free_blocks = disk.f_bfree if as_root else disk.f_bavail
    free_files = disk.f_ffree if as_root else disk.f_favail
    no_blocks = disk.f_blocks > 0 and free_blocks * disk.f_frsize < MIN_FREE_BYTES
    no_files = disk.f_files > 0 and free_files == 0  # some file systems count none
    return no_blocks or no_files
