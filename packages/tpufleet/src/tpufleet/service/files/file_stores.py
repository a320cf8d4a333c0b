"""Where a server keeps the files of jobs: on its disk, in a bucket, or shared with others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tpufleet.clocks import Clock
from tpufleet.service.files.bucket_files import ArchivedLogs
from tpufleet.service.files.job_files import JobFiles
from tpufleet.service.files.logs import DEFAULT_LIMIT, LogFiles
from tpufleet.service.files.results import ResultFiles
from tpufleet.service.files.secrets import JobSecrets
from tpufleet.service.files.shared_logs import SegmentArchive, SharedLogs
from tpufleet.service.files.snapshots import SnapshotFiles
from tpufleet.stores.base import Store

DEFAULT_SNAPSHOT_LIMIT = 512 * 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class FileStores:
    state: Path  # the folder of this server
    snapshots: SnapshotFiles
    logs: LogFiles
    results: ResultFiles
    secrets: JobSecrets
    jobs: JobFiles  # all files of a job, to be measured and deleted


def open_file_stores(
    state: Path,
    store: Store,
    clock: Clock,
    keys: Sequence[bytes],
    *,
    archive: SegmentArchive | None = None,
    shared: bool = False,
    snapshot_limit: int = DEFAULT_SNAPSHOT_LIMIT,
    log_limit: int = DEFAULT_LIMIT,
) -> FileStores:
    """`keys` encrypt secrets, with the first. `archive`: a bucket that keeps snapshots, results and
    logs. `shared`: other servers, with disks of their own, use this store and archive."""
    if archive is None:
        logs = LogFiles(state / "logs", log_limit)
    elif shared:
        logs = SharedLogs(store, archive, clock, log_limit)
    else:
        logs = ArchivedLogs(state / "logs", archive, log_limit)
    snapshots = SnapshotFiles(state / "snapshots", snapshot_limit, archive)
    return FileStores(
        state=state,
        snapshots=snapshots,
        logs=logs,
        results=ResultFiles(state / "results", archive),
        secrets=JobSecrets(store, keys, clock),
        jobs=JobFiles(
            state=state,
            snapshots=snapshots,
            archive=archive,
            store=store if shared else None,
        ),
    )
