"""Checkpoints in an object store: the same promises as in a folder, without renames.

step_00000120/{writer}/part_0/…   what each process wrote
step_00000120/{writer}/part_0.json  its files: where this is, the part is whole
step_00000120/COMPLETE            names the writer and every file; uploaded last
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
from pathlib import Path
from typing import Any

from tpufleet.errors import BadInput, FleetError, NotFound
from tpufleet.runtime import filesystem, progress_file
from tpufleet.runtime.checkpoints import (
    MARKER,
    PARTS_TIMEOUT_SECONDS,
    Checkpoint,
    CheckpointIncomplete,
)
from tpufleet.runtime.gcs import Bucket, ObjectInfo

_LOOK_SECONDS = 0.5
_SIDE_BY_SIDE = 8  # transfers


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketCheckpoint(Checkpoint):
    """Its parts are fetched when they are asked for, and checked then."""

    bucket: Bucket
    marker: Mapping[str, Any]

    def part(self, process_id: int) -> Path:
        name = f"part_{process_id}"
        folder = self.folder / name
        if not folder.is_dir():
            draft = Path(tempfile.mkdtemp(dir=self.folder, prefix=".fetch-"))
            files = [path for path in self.marker["files"] if path.startswith(f"{name}/")]
            with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:
                fetch = lambda path: self._fetch(path, draft / path.removeprefix(f"{name}/"))
                list(pool.map(fetch, files))
            draft.rename(folder)
        return folder

    def _fetch(self, path: str, target: Path) -> None:
        source = f"step_{self.step:08d}/{self.marker['writer']}/{path}"
        self.bucket.download(source, target)
        if filesystem.sha256(target) != self.marker["files"][path][1]:
            raise FleetError(f"{self.bucket.url}/{source} is damaged")


class BucketCheckpoints:
    """The checkpoints below one place, as one process of a gang sees them."""

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
        self._scratch = scratch  # where parts are put before upload and after download

    def latest(self) -> Checkpoint | None:
        """The newest whose files are all there with the content that was uploaded, as far as the
        store knows. What is fetched is checked once more."""
        objects = self._bucket.list_objects("step_")
        for step in sorted(_steps(objects), reverse=True):
            marker = self._marker(step)
            if marker is not None and _complete(step, marker, objects):
                return self._checkpoint(marker)
        return None

    def save(
        self, step: int, writer: Callable[[Path], None], *, wait: float = PARTS_TIMEOUT_SECONDS
    ) -> Checkpoint:
        marker = self._marker(step)
        if marker is None or marker.get("writer") != self._writer:
            self._write_part(step, writer)
            deadline = time.monotonic() + wait
            if self._process_id == 0:
                self._commit(step, deadline)
            marker = self._await_commit(step, deadline)
        progress_file.report_checkpoint(step)
        return self._checkpoint(marker)

    def prune(self, keep: int) -> None:
        if keep < 1:
            raise BadInput(f"at least one checkpoint must be kept, not {keep}")
        if self._process_id != 0:
            return
        objects = self._bucket.list_objects("step_")
        whole = [step for step in sorted(_steps(objects), reverse=True) if self._marker(step)]
        for step in whole[keep:]:
            # Without its marker it is no checkpoint any more, however little of it is gone.
            self._bucket.delete([f"step_{step:08d}/{MARKER}"])
            self._bucket.delete([name for name in objects if name.startswith(f"step_{step:08d}/")])

    def _write_part(self, step: int, writer: Callable[[Path], None]) -> None:
        base, part = f"step_{step:08d}/{self._writer}", f"part_{self._process_id}"
        draft = Path(tempfile.mkdtemp(dir=self._folder(), prefix=".saving-"))
        try:
            writer(draft)
            with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:
                put = lambda path: self._put(base, f"{part}/{path.relative_to(draft)}", path)
                found = dict(pool.map(put, filesystem.list_files(draft)))
            self._bucket.write(f"{base}/{part}.json", json.dumps(found).encode())
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def _put(self, base: str, name: str, path: Path) -> tuple[str, list[Any]]:
        sha256 = filesystem.sha256(path)
        listed = self._bucket.upload(f"{base}/{name}", path)
        return name, [listed.size, sha256, listed.crc32c]

    def _commit(self, step: int, deadline: float) -> None:
        base = f"step_{step:08d}/{self._writer}"
        found: dict[str, Any] = {}
        for index in range(self._num_processes):
            found |= json.loads(self._await(f"{base}/part_{index}.json", deadline))
        marker = {
            "step": step,
            "processes": self._num_processes,
            "writer": self._writer,
            "files": found,
        }
        self._bucket.write(f"step_{step:08d}/{MARKER}", json.dumps(marker).encode())

    def _await(self, name: str, deadline: float) -> bytes:
        while True:
            try:
                return self._bucket.read(name)
            except NotFound:
                if time.monotonic() > deadline:
                    raise CheckpointIncomplete(
                        f"gave up waiting for {self._bucket.url}/{name}"
                    ) from None
                time.sleep(_LOOK_SECONDS)

    def _await_commit(self, step: int, deadline: float) -> Mapping[str, Any]:
        while True:
            marker = self._marker(step)
            if marker is not None and marker.get("writer") == self._writer:
                return marker
            if time.monotonic() > deadline:
                raise CheckpointIncomplete(f"gave up waiting for the commit of step {step}")
            time.sleep(_LOOK_SECONDS)

    def _marker(self, step: int) -> dict[str, Any] | None:
        try:
            marker = json.loads(self._bucket.read(f"step_{step:08d}/{MARKER}"))
        except (NotFound, ValueError):
            return None
        known = isinstance(marker, dict) and {"step", "processes", "writer", "files"} <= set(marker)
        return marker if known else None

    def _checkpoint(self, marker: Mapping[str, Any]) -> Checkpoint:
        told = f"{self._bucket.url}/{marker['step']}/{marker['writer']}"
        folder = self._folder() / f"restored-{hashlib.sha256(told.encode()).hexdigest()[:16]}"
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


def _steps(objects: Mapping[str, ObjectInfo]) -> set[int]:
    found = set()
    for name in objects:
        step, _, rest = name.partition("/")
        if rest == MARKER and step.removeprefix("step_").isdecimal():
            found.add(int(step.removeprefix("step_")))
    return found


def _complete(step: int, marker: Mapping[str, Any], objects: Mapping[str, ObjectInfo]) -> bool:
    base = f"step_{step:08d}/{marker['writer']}"
    return all(
        objects.get(f"{base}/{path}") == ObjectInfo(size, crc32c)
        for path, (size, _, crc32c) in marker["files"].items()
    )
