"""Where results go that a document cannot hold: a folder, a bucket, or the control plane itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from tpufleet.errors import BadInput, Unreachable
from tpufleet.model.jobs import JobId

PREVIEW_CHARS = 1000  # characters of a large result that its document shows


class ResultStore(Protocol):
    def put(self, job_id: JobId, text: str) -> str:
        """The link under which the text is found."""
        ...

    def delete(self, job_id: JobId) -> None:
        """Success when there is none."""
        ...


def result_store(location: str | None, link: Callable[[JobId], str]) -> ResultStore:
    """`location` is gs://bucket/folder or a full path. Without one the result stays where the job
    handed it over, and `link` leads there."""
    if location is None:
        return ControlPlaneResults(link)
    parts = urlsplit(location)
    if parts.scheme == "gs" and parts.netloc:
        return BucketResults(parts.netloc, parts.path.strip("/"))
    if location.startswith("/"):
        return FolderResults(Path(location))
    raise BadInput(f"{location!r} is no place for results; write gs://bucket/folder or a full path")


def preview(text: str, url: str) -> str:
    """What the document says instead of the result."""
    return f"{text[:PREVIEW_CHARS]}\n… {len(text.encode())} bytes in all, at {url}"


class ControlPlaneResults:
    def __init__(self, link: Callable[[JobId], str]) -> None:
        self._link = link

    def put(self, job_id: JobId, text: str) -> str:
        return self._link(job_id)

    def delete(self, job_id: JobId) -> None:
        return  # it goes with the files of its job


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
            from google.cloud import storage
        except ImportError as error:
            raise BadInput(
                "the Cloud Storage client is not installed; run `pip install 'tpufleet[gcs]'`"
            ) from error
        self._bucket: Any = storage.Client().bucket(bucket)
        self._folder = folder

    def put(self, job_id: JobId, text: str) -> str:
        from google.api_core import exceptions

        blob = self._blob(job_id)
        try:
            # Once is enough: the text of a job never changes.
            blob.upload_from_string(text, content_type="text/plain", if_generation_match=0)
        except exceptions.PreconditionFailed:
            pass  # a bridge before us was here
        except exceptions.GoogleAPICallError as error:
            raise Unreachable(f"{blob.name} is not taken by its bucket: {error}") from error
        return f"gs://{self._bucket.name}/{blob.name}"

    def delete(self, job_id: JobId) -> None:
        from google.api_core import exceptions

        try:
            self._blob(job_id).delete()
        except exceptions.NotFound:
            return
        except exceptions.GoogleAPICallError as error:
            raise Unreachable(f"{self._bucket.name} drops nothing: {error}") from error

    def _blob(self, job_id: JobId) -> Any:
        return self._bucket.blob(f"{self._folder}/{job_id}.txt".lstrip("/"))
