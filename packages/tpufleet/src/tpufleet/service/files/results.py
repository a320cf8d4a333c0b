"""Results: one file per job, stored as uploaded. The first upload of a job is its result."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tpufleet.errors import NotFound
from tpufleet.model.job.jobs import JobId

MAX_RESULT_BYTES = 64 * 1024 * 1024


class ResultFiles:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, job_id: JobId, data: bytes) -> bool:
        """False when the job already has one, which is kept."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".upload-") as draft:
            draft.write(data)
            draft.flush()
            os.fsync(draft.fileno())
            return self._store(job_id, Path(draft.name))

    def _store(self, job_id: JobId, draft: Path) -> bool:
        try:
            os.link(draft, self._path(job_id))
        except FileExistsError:
            return False
        return True

    def require(self, job_id: JobId) -> Path:
        path = self._path(job_id)
        if not path.is_file():
            raise NotFound(
                f"job {job_id} has no result; a program creates one by writing the file `result` "
                "in TPUFLEET_RUN_DIR before it exits"
            )
        return path

    def delete(self, job_id: JobId) -> None:
        """Idempotent."""
        self._path(job_id).unlink(missing_ok=True)

    def _path(self, job_id: JobId) -> Path:
        return self._folder / job_id
