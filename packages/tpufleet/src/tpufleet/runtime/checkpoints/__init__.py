"""Atomic checkpoints of a gang: each process writes its part, process 0 commits.

They are stored in the folder or bucket that the context names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

from tpufleet.errors import BadInput
from tpufleet.runtime.checkpoints.folders import FolderCheckpoints
from tpufleet.runtime.checkpoints.types import (
    PARTS_TIMEOUT_SECONDS,
    Checkpoint,
    CheckpointIncomplete,
    CheckpointStore,
)
from tpufleet.runtime.context import Context, context
from tpufleet.runtime.progress_file import RESTORE, SAVE, timed

__all__ = [
    "Checkpoint",
    "CheckpointIncomplete",
    "CheckpointStore",
    "latest",
    "open_checkpoints",
    "prune",
    "save",
]


def latest() -> Checkpoint | None:
    """The newest complete checkpoint; damaged ones are skipped. Every process reads and verifies
    all parts, so all processes get the same answer."""
    with timed(RESTORE):
        return open_checkpoints(context()).latest()


def save(
    step: int, writer: Callable[[Path], None], *, wait: float = PARTS_TIMEOUT_SECONDS
) -> Checkpoint:
    """Call `writer(folder)` to write this process's part, and return when all parts are committed.
    Every process must call it with the same step. Raises CheckpointIncomplete when other parts are
    missing after `wait` seconds."""
    with timed(SAVE):
        return open_checkpoints(context()).save(step, writer, wait=wait)


def prune(keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and the remains of crashed saves. Only process
    0 acts."""
    open_checkpoints(context()).prune(keep)


def open_checkpoints(here: Context) -> CheckpointStore:
    if here.checkpoint_dir.startswith("gs://"):
        return _open_bucket(here)
    if "://" in here.checkpoint_dir:
        raise BadInput(
            f"unsupported checkpoint location {here.checkpoint_dir}; use a folder or gs://bucket/…"
        )
    return FolderCheckpoints(
        Path(here.checkpoint_dir),
        process_id=here.process_id,
        num_processes=here.num_processes,
        writer=f"{here.job_id}.{here.attempt}",
    )


@cache
def _open_bucket(here: Context) -> CheckpointStore:
    # Imports Google's client.
    from tpufleet.runtime.checkpoints.buckets import BucketCheckpoints
    from tpufleet.runtime.gcs import Bucket

    return BucketCheckpoints(
        Bucket(here.checkpoint_dir),
        process_id=here.process_id,
        num_processes=here.num_processes,
        writer=f"{here.job_id}.{here.attempt}",
        scratch=_scratch(here),
        keeps=here.local_dir is not None,
    )


def _scratch(here: Context) -> Path | None:
    if here.run_dir is None:
        return None
    return (here.local_dir or here.log_dir.parent) / "checkpoints"
