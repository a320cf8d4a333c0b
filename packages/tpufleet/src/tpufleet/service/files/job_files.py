"""The files of a job: logs, result, checkpoints; on disk, in the bucket and in the store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tpufleet import deep_folders
from tpufleet.model import identifiers
from tpufleet.model.job.jobs import JobId
from tpufleet.service.files.bucket_files import Archive
from tpufleet.service.files.snapshots import SnapshotFiles
from tpufleet.stores.base import Store, StoredObject

FILES = ("logs", "results")
CHECKPOINTS = ("checkpoints",)
_COMPILED = "compiled"  # programs, which simulated hosts keep as long as the checkpoints


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFiles:
    """Only what the server created: a `checkpoint` location from the job file is never deleted."""

    state: Path
    snapshots: SnapshotFiles
    archive: Archive | None = None
    store: Store | None = None  # has the newest part of logs when servers share them

    def size(self, job_id: JobId, kinds: Sequence[str] = FILES) -> int:
        """Bytes of these kinds."""
        on_disk = sum(deep_folders.size(path) for path in self._paths(job_id, kinds))
        in_store = sum(each.size for each in self._chunks(job_id)) if "logs" in kinds else 0
        return on_disk + in_store + sum(size for _, size in self._objects(job_id, kinds))

    def delete(self, job_id: JobId, kinds: Sequence[str]) -> None:
        """Idempotent. `kinds`: `logs`, `results` and `checkpoints`."""
        for path in self._paths(job_id, kinds):
            deep_folders.delete(path)
        objects = [name for name, _ in self._objects(job_id, kinds)]
        if self.archive is not None and objects:
            self.archive.delete(objects)
        if self.store is not None and "logs" in kinds:
            self.store.delete_objects([each.name for each in self._chunks(job_id)])

    def _paths(self, job_id: JobId, kinds: Sequence[str]) -> Iterator[Path]:
        for kind in kinds:
            yield self.state / kind / identifiers.parse_job_id(job_id)
            if kind in CHECKPOINTS:
                yield self.state / _COMPILED / identifiers.parse_job_id(job_id)

    def _chunks(self, job_id: JobId) -> list[StoredObject]:
        if self.store is None:
            return []
        return self.store.objects(f"logs/{identifiers.parse_job_id(job_id)}/")

    def _objects(self, job_id: JobId, kinds: Sequence[str]) -> Iterator[tuple[str, int]]:
        """Objects in the bucket, with their sizes."""
        if self.archive is None:
            return
        for kind in kinds:
            for name, listed in self.archive.names(
                f"{kind}/{identifiers.parse_job_id(job_id)}/"
            ).items():
                yield name, listed.size
