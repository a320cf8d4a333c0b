"""Results: one file per job, stored as uploaded. The first upload of a job is its result."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tpufleet.errors import NotFound
from tpufleet.model.job.jobs import JobId
from tpufleet.service.files.bucket_files import Archive

MAX_RESULT_BYTES = 64 * 1024 * 1024


class ResultFiles:
    """With an archive, a result exists once the bucket has it, and is cached on disk."""

    def __init__(self, folder: Path, archive: Archive | None = None) -> None:
        self._folder = folder
        self._archive = archive

    def put(self, job_id: JobId, data: bytes) -> bool:
        """False when the job already has one, which is kept."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".upload-") as draft:
            draft.write(data)
            draft.flush()
            os.fsync(draft.fileno())
            return self._store(job_id, Path(draft.name))

    def _store(self, job_id: JobId, draft: Path) -> bool:
        if self._archive is not None:
            return self._archive.create(_object_name(job_id), draft)
        try:
            os.link(draft, self._path(job_id))
        except FileExistsError:
            return False
        return True

    def require(self, job_id: JobId) -> Path:
        path = self._path(job_id)
        if self._archive is not None:
            if not self._archive.has(_object_name(job_id)):  # another server may have deleted it
                path.unlink(missing_ok=True)
            elif not path.is_file():
                self._archive.download(_object_name(job_id), path)
        if not path.is_file():
            raise NotFound(
                f"job {job_id} has no result; a program creates one by writing the file `result` "
                "in TPUFLEET_RUN_DIR before it exits"
            )
        return path

    def delete(self, job_id: JobId) -> None:
        """Idempotent."""
        self._path(job_id).unlink(missing_ok=True)
        if self._archive is not None:
            self._archive.delete([_object_name(job_id)])

    def _path(self, job_id: JobId) -> Path:
        return self._folder / job_id


def _object_name(job_id: JobId) -> str:
    return f"results/{job_id}/result"
