"""Checkpoints in a folder that all processes share.

Layout::

    step_00000120/            complete: renamed from a temporary folder
      part_0/ part_1/ …       what each process wrote
      COMPLETE                size and sha256 of every file, verified when read
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpufleet.runtime import filesystem, progress_file
from tpufleet.runtime.checkpoints.types import (
    MARKER,
    MAX_STEP,
    PARTS_TIMEOUT_SECONDS,
    Checkpoint,
    may_prune,
    new_marker,
    read_marker,
    saving,
    wait_for,
)

_POLL_SECONDS = 0.02
# A checkpoint that is being replaced stays readable until the new one is in place.
_STEP = re.compile(r"(?:\.replaced-)?step_(\d{8,16})")


class FolderCheckpoints:
    """The checkpoints in one folder, as one process of a gang sees them."""

    def __init__(
        self, folder: Path, *, process_id: int = 0, num_processes: int = 1, writer: str = "alone"
    ) -> None:
        self._folder = folder
        self._process_id = process_id
        self._num_processes = num_processes
        self._writer = writer  # distinguishes unfinished folders of different attempts

    def latest(self) -> Checkpoint | None:
        for name in self._names():
            checkpoint = self._read(self._folder / name)
            if checkpoint and self._is_intact(checkpoint.folder):
                return checkpoint
        return None

    def save(
        self, step: int, writer: Callable[[Path], None], *, wait: float = PARTS_TIMEOUT_SECONDS
    ) -> Checkpoint:
        final = self._folder / f"step_{step:08d}"
        if not self._is_ours(final):
            unfinished = self._folder / f".saving-{self._writer}-step_{step:08d}"
            # A part that is written needs its process no more; process 0 commits.
            with saving():
                self._write_part(unfinished, writer)
                deadline = time.monotonic() + wait
                if self._process_id == 0:
                    self._commit(step, unfinished, final, deadline)
                    progress_file.report_checkpoint(step)
            if self._process_id != 0:
                what = f"the commit of step {step} in {self._folder}"
                wait_for(lambda: self._is_ours(final) or None, deadline, _POLL_SECONDS, what)
        progress_file.report_checkpoint(step)
        return Checkpoint(step=step, folder=final, processes=self._num_processes)

    def prune(self, keep: int) -> None:
        if not may_prune(keep, self._process_id):
            return
        complete = [name for name in self._names() if self._is_complete(self._folder / name)]
        for name in complete[keep:]:
            filesystem.remove_folder(self._folder / name)
        for name in filesystem.list_names(self._folder):
            # The other processes may already be saving the next step.
            ours = name.startswith(f".saving-{self._writer}-step_")
            if name.startswith((".trash-", ".saving-")) and not ours:
                filesystem.remove_folder(self._folder / name)

    def _names(self) -> list[str]:
        """Newest first; of two of one step, the one in place before the one being replaced."""
        names = [name for name in filesystem.list_names(self._folder) if _is_step(name)]
        return sorted(names, key=lambda name: (_step(name), name[0] != "."), reverse=True)

    def _write_part(self, unfinished: Path, writer: Callable[[Path], None]) -> None:
        """Write the part, then its list of files: the list marks the part as complete."""
        part = unfinished / f"part_{self._process_id}"
        listing = _listing(unfinished, self._process_id)
        listing.unlink(missing_ok=True)
        if part.exists():
            filesystem.remove_folder(part)
        part.mkdir(parents=True)
        writer(part)
        files = {}
        for path in filesystem.list_files(part):
            filesystem.fsync(path)
            name = str(path.relative_to(unfinished))
            files[name] = [path.stat().st_size, filesystem.sha256(path)]
        for folder in (part, *(path for path in part.rglob("*") if path.is_dir())):
            filesystem.fsync(folder)
        filesystem.write_durably(listing, json.dumps(files).encode())

    def _commit(self, step: int, unfinished: Path, final: Path, deadline: float) -> None:
        listings = [_listing(unfinished, index) for index in range(self._num_processes)]
        wait_for(
            lambda: all(listing.exists() for listing in listings) or None,
            deadline,
            _POLL_SECONDS,
            f"all parts of step {step} in {self._folder}",
        )
        files: dict[str, Any] = {}
        for listing in listings:
            files |= json.loads(listing.read_bytes())
            listing.unlink()
        marker = new_marker(step, self._num_processes, self._writer, files)
        filesystem.write_durably(unfinished / MARKER, marker)
        self._publish(unfinished, final)

    def _publish(self, unfinished: Path, final: Path) -> None:
        """Replace the checkpoint of an earlier attempt, if any; one of the two exists at any
        time."""
        replaced = final.with_name(f".replaced-{final.name}")
        if final.exists():
            filesystem.remove_folder(replaced)
            filesystem.publish(final, replaced)
        filesystem.publish(unfinished, final)
        filesystem.remove_folder(replaced)

    def _is_ours(self, final: Path) -> bool:
        marker = _read_marker(final)
        return marker is not None and marker.get("writer") == self._writer

    def _read(self, folder: Path) -> Checkpoint | None:
        marker = _read_marker(folder)
        if marker is None:
            return None
        return Checkpoint(step=marker["step"], folder=folder, processes=marker["processes"])

    def _is_complete(self, folder: Path) -> bool:
        """Every file exists and has its recorded size."""
        marker = _read_marker(folder)
        try:
            return marker is not None and all(
                (folder / name).stat().st_size == size
                for name, (size, _) in marker["files"].items()
            )
        except OSError:
            return False

    def _is_intact(self, folder: Path) -> bool:
        """Every file has its recorded content."""
        marker = _read_marker(folder)
        return (
            marker is not None
            and self._is_complete(folder)
            and all(
                filesystem.sha256(folder / name) == sha256
                for name, (_, sha256) in marker["files"].items()
            )
        )


def _is_step(name: str) -> bool:
    return _STEP.fullmatch(name) is not None and _step(name) <= MAX_STEP


def _step(name: str) -> int:
    return int(name.rpartition("_")[2])


def _listing(unfinished: Path, process_id: int) -> Path:
    return unfinished / f"part_{process_id}.json"


def _read_marker(folder: Path) -> dict[str, Any] | None:
    """None when it does not exist or is invalid."""
    try:
        return read_marker((folder / MARKER).read_bytes())
    except OSError:
        return None
