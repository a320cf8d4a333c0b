"""Checkpoints in a bucket: the same guarantees as in a folder, without renames.

Layout::

    step_00000120/{writer}/part_0/…     what each process wrote
    step_00000120/{writer}/part_0.json  its files; marks the part as complete
    step_00000120/COMPLETE              names the writer and every file; uploaded last
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tpufleet.errors import FleetError, NotFound
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
from tpufleet.runtime.gcs import Bucket, ObjectInfo

_POLL_SECONDS = 0.5
_PARALLEL_TRANSFERS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketCheckpoint(Checkpoint):
    """Its parts are downloaded and verified on first use."""

    bucket: Bucket
    marker: Mapping[str, Any]

    def part(self, process_id: int) -> Path:
        name = f"part_{process_id}"
        folder = self.folder / name
        if not folder.is_dir():
            draft = Path(tempfile.mkdtemp(dir=self.folder, prefix=".fetch-"))
            files = [path for path in self.marker["files"] if path.startswith(f"{name}/")]

            def download(path: str) -> None:
                self._download(path, draft / path.removeprefix(f"{name}/"))

            with ThreadPoolExecutor(_PARALLEL_TRANSFERS) as pool:
                list(pool.map(download, files))
            draft.rename(folder)
        return folder

    def _download(self, path: str, target: Path) -> None:
        source = f"step_{self.step:08d}/{self.marker['writer']}/{path}"
        self.bucket.download(source, target)
        if filesystem.sha256(target) != self.marker["files"][path][1]:
            raise FleetError(f"{self.bucket.url}/{source} is damaged: its sha256 does not match")


class BucketCheckpoints:
    """The checkpoints below one prefix, as one process of a gang sees them."""

    def __init__(
        self,
        bucket: Bucket,
        *,
        process_id: int = 0,
        num_processes: int = 1,
        writer: str = "alone",
        scratch: Path | None = None,
    ) -> None:
        self._bucket = bucket
        self._process_id = process_id
        self._num_processes = num_processes
        self._writer = writer
        self._scratch = scratch  # for parts before upload and after download

    def latest(self) -> Checkpoint | None:
        """The newest one whose files all exist with the size and CRC32C that were uploaded.
        Downloads are verified again."""
        objects = self._bucket.names("step_")
        for step in sorted(_committed_steps(objects), reverse=True):
            marker = self._read_marker(step)
            if marker is not None and _is_complete(step, marker, objects):
                return self._checkpoint(marker)
        return None

    def save(
        self, step: int, writer: Callable[[Path], None], *, wait: float = PARTS_TIMEOUT_SECONDS
    ) -> Checkpoint:
        marker = self._own_marker(step)
        if marker is None:
            with saving():
                self._write_part(step, writer)
                deadline = time.monotonic() + wait
                if self._process_id == 0:
                    self._commit(step, deadline)
                    progress_file.report_checkpoint(step)
            what = f"the commit of step {step} in {self._bucket.url}"
            marker = wait_for(lambda: self._own_marker(step), deadline, _POLL_SECONDS, what)
        progress_file.report_checkpoint(step)
        return self._checkpoint(marker)

    def prune(self, keep: int) -> None:
        if not may_prune(keep, self._process_id):
            return
        objects = self._bucket.names("step_")
        steps = sorted(_committed_steps(objects), reverse=True)
        complete = [step for step in steps if self._read_marker(step)]
        for step in complete[keep:]:
            # First the marker: without it the rest is not a checkpoint.
            self._bucket.delete([f"step_{step:08d}/{MARKER}"])
            self._bucket.delete([name for name in objects if name.startswith(f"step_{step:08d}/")])

    def _write_part(self, step: int, writer: Callable[[Path], None]) -> None:
        base, part = f"step_{step:08d}/{self._writer}", f"part_{self._process_id}"
        draft = Path(tempfile.mkdtemp(dir=self._folder(), prefix=".saving-"))

        def upload(path: Path) -> tuple[str, list[Any]]:
            return self._upload(base, f"{part}/{path.relative_to(draft)}", path)

        try:
            writer(draft)
            with ThreadPoolExecutor(_PARALLEL_TRANSFERS) as pool:
                files = dict(pool.map(upload, filesystem.list_files(draft)))
            self._bucket.write(f"{base}/{part}.json", json.dumps(files).encode())
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def _upload(self, base: str, name: str, path: Path) -> tuple[str, list[Any]]:
        sha256 = filesystem.sha256(path)
        info = self._bucket.upload(f"{base}/{name}", path)
        return name, [info.size, sha256, info.crc32c]

    def _commit(self, step: int, deadline: float) -> None:
        base = f"step_{step:08d}/{self._writer}"
        files: dict[str, Any] = {}
        for index in range(self._num_processes):
            name = f"{base}/part_{index}.json"
            find, what = partial(self._find, name), f"{self._bucket.url}/{name}"
            files |= json.loads(wait_for(find, deadline, _POLL_SECONDS, what))
        marker = new_marker(step, self._num_processes, self._writer, files)
        self._bucket.write(f"step_{step:08d}/{MARKER}", marker)

    def _own_marker(self, step: int) -> dict[str, Any] | None:
        marker = self._read_marker(step)
        return marker if marker is not None and marker["writer"] == self._writer else None

    def _read_marker(self, step: int) -> dict[str, Any] | None:
        return read_marker(self._find(f"step_{step:08d}/{MARKER}") or b"")

    def _find(self, name: str) -> bytes | None:
        try:
            return self._bucket.read(name)
        except NotFound:
            return None

    def _checkpoint(self, marker: Mapping[str, Any]) -> Checkpoint:
        identity = f"{self._bucket.url}/{marker['step']}/{marker['writer']}"
        folder = self._folder() / f"restored-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
        folder.mkdir(exist_ok=True)
        return BucketCheckpoint(
            step=marker["step"],
            folder=folder,
            processes=marker["processes"],
            bucket=self._bucket,
            marker=marker,
        )

    def _folder(self) -> Path:
        if self._scratch is None:
            self._scratch = Path(tempfile.mkdtemp(prefix="tpufleet-checkpoints-"))
        self._scratch.mkdir(parents=True, exist_ok=True)
        return self._scratch


def _committed_steps(objects: Mapping[str, ObjectInfo]) -> set[int]:
    steps = set()
    for name in objects:
        step, _, rest = name.partition("/")
        digits = step.removeprefix("step_")
        if rest == MARKER and digits.isdecimal() and len(digits) <= 16 and int(digits) <= MAX_STEP:
            steps.add(int(digits))
    return steps


def _is_complete(step: int, marker: Mapping[str, Any], objects: Mapping[str, ObjectInfo]) -> bool:
    base = f"step_{step:08d}/{marker['writer']}"
    return all(
        objects.get(f"{base}/{path}") == ObjectInfo(size, crc32c)
        for path, (size, _, crc32c) in marker["files"].items()
    )
