"""Checkpoints in a bucket: the same guarantees as in a folder, without renames.

Layout::

    step_00000120/{writer}/part_0/…     what each process wrote
    step_00000120/{writer}/part_0.json  its files; marks the part as complete
    step_00000120/COMPLETE              names the writer and every file; uploaded last
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
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
from tpufleet.runtime.gcs import Bucket, ObjectInfo, crc32c

_POLL_SECONDS = 0.5
_PARALLEL_TRANSFERS = 8
_HERE = "restored-"


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketCheckpoint(Checkpoint):
    """Its parts are taken from this host, or downloaded, and verified on first use."""

    bucket: Bucket
    marker: Mapping[str, Any]
    verified: set[int] = field(default_factory=set)

    def part(self, process_id: int) -> Path:
        name = f"part_{process_id}"
        folder = self.folder / name
        if process_id in self.verified:
            return folder
        files = [path for path in self.marker["files"] if path.startswith(f"{name}/")]
        if not self._is_here(folder, files):
            shutil.rmtree(folder, ignore_errors=True)
            draft = Path(tempfile.mkdtemp(dir=self.folder, prefix=".fetch-"))

            def download(path: str) -> None:
                self._download(path, draft / path.removeprefix(f"{name}/"))

            with ThreadPoolExecutor(_PARALLEL_TRANSFERS) as pool:
                list(pool.map(download, files))
            draft.rename(folder)
        self.verified.add(process_id)
        return folder

    def _is_here(self, folder: Path, files: Sequence[str]) -> bool:
        """As written by this attempt or an earlier one, or downloaded for one."""
        try:
            return folder.is_dir() and all(
                filesystem.sha256(self.folder / path) == self.marker["files"][path][1]
                for path in files
            )
        except OSError:
            return False

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
        keeps: bool = False,
    ) -> None:
        """`keeps`: what is in `scratch` is there in the next attempt on this host."""
        self._bucket = bucket
        self._process_id = process_id
        self._num_processes = num_processes
        self._writer = writer
        self._scratch = scratch  # for parts before upload and after download
        self._keeps = keeps

    def latest(self) -> Checkpoint | None:
        """The newest one whose files all exist with the size and CRC32C that were uploaded.
        Downloads are verified again."""
        objects = self._bucket.names("step_")
        for step in sorted(_committed_steps(objects), reverse=True):
            found = objects[f"step_{step:08d}/{MARKER}"]
            marker = self._kept_marker(step, found) or self._read_marker(step)
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
        if self._keeps:
            self._keep(step, marker)
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
        self._make_room()
        draft = Path(tempfile.mkdtemp(dir=self._folder(), prefix=".saving-"))

        def upload(path: Path) -> tuple[str, list[Any]]:
            return self._upload(base, f"{part}/{path.relative_to(draft)}", path)

        try:
            writer(draft)
            with ThreadPoolExecutor(_PARALLEL_TRANSFERS) as pool:
                files = dict(pool.map(upload, filesystem.list_files(draft)))
            self._bucket.write(f"{base}/{part}.json", json.dumps(files).encode())
            if self._keeps:
                folder = self._here(step, self._writer) / part
                shutil.rmtree(folder, ignore_errors=True)
                draft.rename(folder)
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
        return BucketCheckpoint(
            step=marker["step"],
            folder=self._here(marker["step"], marker["writer"]),
            processes=marker["processes"],
            bucket=self._bucket,
            marker=marker,
        )

    def _here(self, step: int, writer: str) -> Path:
        """What this host has of a checkpoint."""
        identity = f"{self._bucket.url}/{step}/{writer}"
        folder = self._folder() / f"{_HERE}{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
        folder.mkdir(exist_ok=True)
        return folder

    def _keep(self, step: int, marker: Mapping[str, Any]) -> None:
        """The newest alone."""
        newest = self._here(step, self._writer)
        with contextlib.suppress(
            OSError
        ):  # such as of a full disk: the checkpoint is in the bucket
            filesystem.write_durably(newest / MARKER, json.dumps(marker).encode())
        for folder in self._folder().glob(f"{_HERE}*"):
            if folder != newest:
                shutil.rmtree(folder, ignore_errors=True)

    def _kept_marker(self, step: int, found: ObjectInfo) -> dict[str, Any] | None:
        """Of the checkpoint of this step, if it is the one in the bucket."""
        if not self._keeps:
            return None
        for path in self._folder().glob(f"{_HERE}*/{MARKER}"):
            data = path.read_bytes()
            marker = read_marker(data)
            if marker and marker["step"] == step and found == ObjectInfo(len(data), crc32c(data)):
                return marker
        return None

    def _make_room(self) -> None:
        """What earlier attempts began, and what is kept, if the next part may not fit beside it."""
        if not self._keeps:
            return
        kept = list(self._folder().glob(f"{_HERE}*"))
        size = sum(path.stat().st_size for each in kept for path in filesystem.list_files(each))
        unfinished = list(self._folder().glob(".saving-*"))
        full = shutil.disk_usage(self._folder()).free < 2 * size
        for folder in (*unfinished, *(kept if full else ())):
            shutil.rmtree(folder, ignore_errors=True)

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
