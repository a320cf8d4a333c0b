"""What checkpoints in folders and in buckets have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tpufleet.errors import FleetError, Temporary

MARKER = "COMPLETE"
MAX_STEP = 2**53  # as of reported progress; larger numbers in names are no steps
PARTS_TIMEOUT_SECONDS = 600.0  # how long one process waits for the parts of the others


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


class CheckpointStore(Protocol):
    """The checkpoints of one job, as one process of the gang sees them."""

    def latest(self) -> Checkpoint | None: ...
    def save(
        self, step: int, writer: Callable[[Path], None], *, wait: float = PARTS_TIMEOUT_SECONDS
    ) -> Checkpoint: ...
    def prune(self, keep: int) -> None: ...
