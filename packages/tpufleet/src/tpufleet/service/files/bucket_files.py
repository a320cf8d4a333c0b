"""The bucket in which snapshots, results and logs survive the loss of this disk; and its logs."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from tpufleet.errors import NotFound
from tpufleet.model.fleet.hosts import HostId
from tpufleet.model.job.attempts import AttemptId
from tpufleet.service.files.log_segments import FOLDER_SUFFIX, SegmentedLog
from tpufleet.service.files.logs import DEFAULT_LIMIT, LogFiles
from tpufleet.service.operations.background import log_failure

log = logging.getLogger(__name__)

UPLOAD_INTERVAL = 10.0  # seconds of log that may be lost with this machine


class ArchivedObject(Protocol):
    @property
    def size(self) -> int: ...


class Archive(Protocol):
    """The operations that are needed of a bucket."""

    def has(self, name: str) -> bool: ...
    def names(self, prefix: str = "") -> Mapping[str, ArchivedObject]: ...
    def create(self, name: str, path: Path) -> bool: ...
    def upload(self, name: str, path: Path) -> object: ...
    def download(self, name: str, path: Path) -> None: ...
    def delete(self, names: list[str]) -> None: ...


class ArchivedLogs(LogFiles):
    """For one server: appended on disk, copied to the bucket every few seconds, fetched if the
    disk does not have them."""

    def __init__(self, folder: Path, archive: Archive, limit: int = DEFAULT_LIMIT) -> None:
        super().__init__(folder, limit)
        self._archive = archive
        self._uploaded: dict[str, int] = {}  # name → size in the bucket
        self._checked: set[Path] = set()
        self._lock = threading.Lock()

    def path(self, attempt: AttemptId, host: HostId) -> Path:
        path = super().path(attempt, host)
        if path not in self._checked and not path.exists():
            self._fetch(path)
        self._checked.add(path)
        return path

    def upload_changes(self) -> int:
        """Upload every file of a log that has grown, and delete what was deleted here; return how
        many."""
        count = 0
        with self._lock:
            for log in sorted(self._folder.glob("*/*/*.log")):
                for segment in SegmentedLog(log).segments():
                    name = self._name(segment.path)
                    if segment.size and self._uploaded.get(name) != segment.size:
                        self._archive.upload(name, segment.path)
                        self._uploaded[name] = segment.size
                        count += 1
            count += self._delete_dropped()
        return count

    def _delete_dropped(self) -> int:
        """Segments that were deleted at the limit of their job. The files of a job that is purged
        are deleted there."""
        names = [
            name
            for name in self._uploaded
            if f".log{FOLDER_SUFFIX}/" in name and not self._path_of(name).exists()
        ]
        if names:
            self._archive.delete(names)
        for name in names:
            del self._uploaded[name]
        return len(names)

    def upload_until(self, stopping: threading.Event) -> None:
        """Upload in a loop until `stopping` is set, and once more then. Runs in its own thread."""
        while True:
            last = stopping.wait(UPLOAD_INTERVAL)
            try:
                self.upload_changes()
            except Exception as error:
                log_failure(log, "upload logs to the bucket", error)
            if last:
                return

    def _fetch(self, path: Path) -> None:
        """With its segments; the first file last, because the log exists with it."""
        names = self._archive.names(self._name(path))
        for name in sorted(names, reverse=True):
            own = name == self._name(path) or name.startswith(self._name(path) + FOLDER_SUFFIX)
            if own:
                self._fetch_file(name)

    def _fetch_file(self, name: str) -> None:
        path = self._path_of(name)
        draft = path.with_name(f".{path.name}.fetched")
        try:
            self._archive.download(name, draft)
        except NotFound:
            return
        try:
            os.link(draft, path)  # unless it was created meanwhile
        except FileExistsError:
            return
        finally:
            draft.unlink(missing_ok=True)

    def _name(self, path: Path) -> str:
        return f"logs/{path.relative_to(self._folder)}"

    def _path_of(self, name: str) -> Path:
        return self._folder / name.removeprefix("logs/")
