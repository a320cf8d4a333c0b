"""What checkpoints in folders and in buckets have in common."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tpufleet.errors import BadInput, FleetError, Temporary
from tpufleet.runtime.context import context

T = TypeVar("T")

MARKER = "COMPLETE"
MAX_STEP = 2**53  # as of reported progress; larger numbers in names are no steps
PARTS_TIMEOUT_SECONDS = 600.0  # how long one process waits for the parts of the others
SURVIVORS_SECONDS = 5.0  # the same once one of them is gone; processes write at the same time


class CheckpointIncomplete(FleetError, Temporary):
    """Another process did not write its part in time. The previous checkpoint stays the latest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    step: int
    folder: Path
    processes: int  # that wrote it

    def part(self, process_id: int) -> Path:
        """The folder that one process wrote."""
        return self.folder / f"part_{process_id}"


@contextlib.contextmanager
def saving() -> Iterator[None]:
    """Tells the agent that this process must not be killed before its end, if it is stopped because
    another one is gone."""
    run_dir = context().run_dir
    if run_dir is None:
        yield
        return
    marker = run_dir / f"saving.{os.getpid()}.{threading.get_ident()}"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a full disk must not end the program
            file = stack.enter_context(marker.open("w"))
            # Ends with this process, also if it is killed; those that it forks do not have it.
            fcntl.lockf(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                marker.unlink()


def _peer_is_gone() -> bool:
    run_dir = context().run_dir
    return run_dir is not None and (run_dir / "peer-gone").exists()


def wait_for(poll: Callable[[], T | None], deadline: float, every: float, what: str) -> T:
    """The first result that is not None. Raises CheckpointIncomplete after the deadline, or soon
    when another process is gone, which may have been before it wrote its part."""
    while (result := poll()) is None:
        if _peer_is_gone():
            deadline = min(deadline, time.monotonic() + SURVIVORS_SECONDS)
        if time.monotonic() > deadline:
            raise CheckpointIncomplete(f"timed out waiting for {what}")
        time.sleep(every)
    return result


def may_prune(keep: int, process_id: int) -> bool:
    if keep < 1:
        raise BadInput(f"keep must be at least 1, not {keep}")
    return process_id == 0


def new_marker(step: int, processes: int, writer: str, files: dict[str, Any]) -> bytes:
    marker = {"step": step, "processes": processes, "writer": writer, "files": files}
    return json.dumps(marker).encode()


def read_marker(data: bytes) -> dict[str, Any] | None:
    """None when it is invalid."""
    try:
        marker = json.loads(data)
    except ValueError:
        return None
    valid = isinstance(marker, dict) and {"step", "processes", "writer", "files"} <= marker.keys()
    return marker if valid else None


class CheckpointStore(Protocol):
    """The checkpoints of one job, as one process of the gang sees them."""

    def latest(self) -> Checkpoint | None: ...
    def save(
        self, step: int, writer: Callable[[Path], None], *, wait: float = PARTS_TIMEOUT_SECONDS
    ) -> Checkpoint: ...
    def prune(self, keep: int) -> None: ...
