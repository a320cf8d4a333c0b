"""Checkpoints that are whole or not there: each process writes its part, process 0 commits.

    step_00000120/            complete: renamed from a temporary folder
      part_0/ part_1/ …       what each process wrote
      COMPLETE                sizes and sha256 of every file, checked when read

All processes must see the same folder.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from tpufleet.errors import BadInput, FleetError, Temporary
from tpufleet.runtime import filesystem, progress_file
from tpufleet.runtime.context import Context, context

MARKER = "COMPLETE"
PARTS_TIMEOUT_SECONDS = 600.0  # how long one process waits for the others to write their parts
_LOOK_SECONDS = 0.02
# A checkpoint that is about to be replaced stays readable until the new one is in its place.
_STEP = re.compile(r"(?:\.replaced-)?step_(\d{8,})")


class CheckpointIncomplete(FleetError, Temporary):
    """Another process did not write its part in time. The checkpoint before this one stands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    step: int
    folder: Path
    processes: int  # that wrote it

    def part(self, process_id: int) -> Path:
        return self.folder / f"part_{process_id}"


def latest() -> Checkpoint | None:
    """The newest whole one. Damaged ones are passed over. Every process reads and checks all
    parts, so all come to the same answer."""
    return open_checkpoints(context()).latest()


def save(
    step: int, writer: Callable[[Path], None], *, wait: float = PARTS_TIMEOUT_SECONDS
) -> Checkpoint:
    """Call `writer(folder)` to write this process's part, and return when all parts are
    committed. Every process must call it with the same step."""
    return open_checkpoints(context()).save(step, writer, wait=wait)


def prune(keep: int) -> None:
    """Delete all but the newest `keep`, and what crashed saves left. Only process 0 acts."""
    open_checkpoints(context()).prune(keep)


class CheckpointStore(Protocol):
    """Checkpoints, wherever they are."""

    def latest(self) -> Checkpoint | None: ...
    def save(
        self, step: int, writer: Callable[[Path], None], *, wait: float = PARTS_TIMEOUT_SECONDS
    ) -> Checkpoint: ...
    def prune(self, keep: int) -> None: ...


def open_checkpoints(here: Context) -> CheckpointStore:
    if here.checkpoint_dir.startswith("gs://"):
        return _in_bucket(here)
    if "://" in here.checkpoint_dir:
        raise BadInput(f"checkpoints need a folder or gs://; {here.checkpoint_dir} is neither")
    return FolderCheckpoints(
        Path(here.checkpoint_dir),
        process_id=here.process_id,
        num_processes=here.num_processes,
        writer=f"{here.job_id}.{here.attempt}",
    )


@cache
def _in_bucket(here: Context) -> CheckpointStore:
    from tpufleet.runtime.bucket_checkpoints import BucketCheckpoints  # brings Google's client
    from tpufleet.runtime.gcs import Bucket

    return BucketCheckpoints(
        Bucket(here.checkpoint_dir),
        process_id=here.process_id,
        num_processes=here.num_processes,
        writer=f"{here.job_id}.{here.attempt}",
        scratch=here.log_dir.parent / "checkpoints" if here.run_dir is not None else None,
    )


class FolderCheckpoints:
    """The checkpoints in one folder, as one process of a gang sees them."""

    def __init__(
        self, folder: Path, *, process_id: int = 0, num_processes: int = 1, writer: str = "alone"
    ) -> None:
        self._folder = folder
        self._process_id = process_id
        self._num_processes = num_processes
        self._writer = writer  # tells our unfinished folders from those of other attempts

    def latest(self) -> Checkpoint | None:
        for name in self._names():
            found = self._read(self._folder / name)
            if found and self._whole(found.folder):
                return found
        return None

    def save(
        self, step: int, writer: Callable[[Path], None], *, wait: float = PARTS_TIMEOUT_SECONDS
    ) -> Checkpoint:
        final = self._folder / f"step_{step:08d}"
        if not self._is_ours(final):
            unfinished = self._unfinished(step)
            self._write_part(unfinished, writer)
            deadline = time.monotonic() + wait
            if self._process_id == 0:
                self._commit(step, unfinished, final, deadline)
            else:
                self._await(lambda: self._is_ours(final), deadline, f"the commit of step {step}")
        progress_file.report_checkpoint(step)
        return Checkpoint(step=step, folder=final, processes=self._num_processes)

    def prune(self, keep: int) -> None:
        if keep < 1:
            raise BadInput(f"at least one checkpoint must be kept, not {keep}")
        if self._process_id != 0:
            return
        whole = [name for name in self._names() if self._complete(self._folder / name)]
        for name in whole[keep:]:
            filesystem.remove_folder(self._folder / name)
        for name in filesystem.list_names(self._folder):
            # The other processes may be saving the next step already.
            ours = name.startswith(f".saving-{self._writer}-step_")
            if name.startswith((".trash-", ".saving-")) and not ours:
                filesystem.remove_folder(self._folder / name)

    def _names(self) -> list[str]:
        """Newest first; of two of one step, the one in its place before the one replaced."""
        found = [name for name in filesystem.list_names(self._folder) if _STEP.fullmatch(name)]
        return sorted(found, key=lambda name: (_number(name), name[0] != "."), reverse=True)

    def _unfinished(self, step: int) -> Path:
        return self._folder / f".saving-{self._writer}-step_{step:08d}"

    def _write_part(self, unfinished: Path, writer: Callable[[Path], None]) -> None:
        """The part, then its list of files: where the list is, the part is whole."""
        part = unfinished / f"part_{self._process_id}"
        listing = _listing(unfinished, self._process_id)
        listing.unlink(missing_ok=True)
        if part.exists():
            filesystem.remove_folder(part)
        part.mkdir(parents=True)
        writer(part)
        found = {}
        for path in filesystem.list_files(part):
            filesystem.fsync(path)
            found[str(path.relative_to(unfinished))] = [
                path.stat().st_size,
                filesystem.sha256(path),
            ]
        for folder in (part, *(path for path in part.rglob("*") if path.is_dir())):
            filesystem.fsync(folder)
        filesystem.write_durably(listing, json.dumps(found).encode())

    def _commit(self, step: int, unfinished: Path, final: Path, deadline: float) -> None:
        listings = [_listing(unfinished, index) for index in range(self._num_processes)]
        self._await(
            lambda: all(listing.exists() for listing in listings), deadline, f"parts of step {step}"
        )
        found: dict[str, Any] = {}
        for listing in listings:
            found |= json.loads(listing.read_bytes())
            listing.unlink()
        marker = {
            "step": step,
            "processes": self._num_processes,
            "writer": self._writer,
            "files": found,
        }
        filesystem.write_durably(unfinished / MARKER, json.dumps(marker).encode())
        self._put(unfinished, final)

    def _put(self, unfinished: Path, final: Path) -> None:
        """In place of one of an earlier attempt, if need be; at no moment is there neither."""
        replaced = final.with_name(f".replaced-{final.name}")
        if final.exists():
            filesystem.remove_folder(replaced)
            filesystem.publish(final, replaced)
        filesystem.publish(unfinished, final)
        filesystem.remove_folder(replaced)

    def _await(self, done: Callable[[], bool], deadline: float, what: str) -> None:
        while not done():
            if time.monotonic() > deadline:
                raise CheckpointIncomplete(f"gave up waiting for {what} in {self._folder}")
            time.sleep(_LOOK_SECONDS)

    def _is_ours(self, final: Path) -> bool:
        marker = _marker(final)
        return marker is not None and marker.get("writer") == self._writer

    def _read(self, folder: Path) -> Checkpoint | None:
        marker = _marker(folder)
        if marker is None:
            return None
        return Checkpoint(step=marker["step"], folder=folder, processes=marker["processes"])

    def _complete(self, folder: Path) -> bool:
        """Every file is there in its size."""
        marker = _marker(folder)
        try:
            return marker is not None and all(
                (folder / name).stat().st_size == size
                for name, (size, _) in marker["files"].items()
            )
        except OSError:
            return False

    def _whole(self, folder: Path) -> bool:
        """Every file holds what was written."""
        marker = _marker(folder)
        return (
            marker is not None
            and self._complete(folder)
            and all(
                filesystem.sha256(folder / name) == sha256
                for name, (_, sha256) in marker["files"].items()
            )
        )


def _number(name: str) -> int:
    return int(name.rpartition("_")[2])


def _listing(unfinished: Path, process_id: int) -> Path:
    return unfinished / f"part_{process_id}.json"


def _marker(folder: Path) -> dict[str, Any] | None:
    """None where there is none, or none that can be read."""
    try:
        marker = json.loads((folder / MARKER).read_bytes())
    except (OSError, ValueError):
        return None
    known = isinstance(marker, dict) and {"step", "processes", "files"} <= marker.keys()
    return marker if known else None
