"""Stores results that are too large for a document: in a folder, a bucket or the control plane."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from tpufleet.errors import BadInput, Unreachable, install_command
from tpufleet.model.job.jobs import JobId

PREVIEW_CHARS = 1000  # characters of a large result that its document shows


class ResultStore(Protocol):
    def put(self, job_id: JobId, text: str) -> str:
        """Returns the URL of the stored text."""
        ...

    def delete(self, job_id: JobId) -> None:
        """Succeeds when there is none."""
        ...


def result_store(location: str | None, link: Callable[[JobId], str]) -> ResultStore:
    """`location` is gs://bucket/folder or an absolute path. Without one, the result stays in the
    control plane, at `link`."""
    if location is None:
        return ControlPlaneResults(link)
    bucket, _, folder = location.removeprefix("gs://").partition("/")
    if location.startswith("gs://") and bucket:
        return BucketResults(bucket, folder.strip("/"))
    if location.startswith("/"):
        return FolderResults(Path(location))
    raise BadInput(
        f"invalid results location {location!r}; expected gs://bucket/folder or an absolute path"
    )


def preview(text: str, url: str, limit: int) -> str:
    """What the document contains instead of the result, in at most `limit` bytes."""
    note = f"\n… {len(text.encode())} bytes in total, at {url}"
    return truncate(text[:PREVIEW_CHARS], limit - len(note.encode())) + truncate(note, limit)


def truncate(text: str, limit: int) -> str:
    """The beginning of the text, in at most `limit` bytes."""
    return text.encode()[: max(0, limit)].decode(errors="ignore")


class ControlPlaneResults:
    def __init__(self, link: Callable[[JobId], str]) -> None:
        self._link = link

    def put(self, job_id: JobId, text: str) -> str:
        return self._link(job_id)

    def delete(self, job_id: JobId) -> None:
        return  # deleted with the files of its job


class FolderResults:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, job_id: JobId, text: str) -> str:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(job_id)
        draft = path.with_name(f".{path.name}")
        draft.write_text(text)
        draft.replace(path)
        return path.as_uri()

    def delete(self, job_id: JobId) -> None:
        self._path(job_id).unlink(missing_ok=True)

    def _path(self, job_id: JobId) -> Path:
        return self._folder / f"{job_id}.txt"


class BucketResults:
    def __init__(self, bucket: str, folder: str) -> None:
        try:
            from google.cloud import storage  # type: ignore[attr-defined]  # the extra is optional
        except ImportError as error:
            raise BadInput(
                "the Cloud Storage client is not installed\n"
                f"  next: {install_command('tpufleet[gcs]')}"
            ) from error
        self._bucket: Any = storage.Client(project=None).bucket(bucket)
        self._folder = folder

    def put(self, job_id: JobId, text: str) -> str:
        from google.api_core import exceptions

        blob = self._blob(job_id)
        try:
            # The result of a job never changes, so it is written once.
            blob.upload_from_string(text, content_type="text/plain", if_generation_match=0)
        except exceptions.PreconditionFailed:
            pass  # already written by another bridge
        except exceptions.GoogleAPICallError as error:
            raise self._unreachable(error) from error
        return f"gs://{self._bucket.name}/{blob.name}"

    def delete(self, job_id: JobId) -> None:
        from google.api_core import exceptions

        try:
            self._blob(job_id).delete()
        except exceptions.NotFound:
            return
        except exceptions.GoogleAPICallError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> Unreachable:
        return Unreachable(f"bucket {self._bucket.name}: {error}")

    def _blob(self, job_id: JobId) -> Any:
        return self._bucket.blob(f"{self._folder}/{job_id}.txt".lstrip("/"))
