"""Stores results that are too large for a document: in a bucket or the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tpufleet.errors import invalid
from tpufleet.model.job.jobs import JobId
from tpufleet.runtime.gcs import Bucket

PREVIEW_CHARS = 1000  # characters of a large result that its document shows


class ResultStore(Protocol):
    def put(self, job_id: JobId, text: str) -> str:
        """Returns the URL of the stored text."""
        ...

    def delete(self, job_id: JobId) -> None:
        """Succeeds when there is none."""
        ...


def result_store(location: str | None, link: Callable[[JobId], str]) -> ResultStore:
    """`location` is gs://bucket/folder. Without one, the result stays in the server, at `link`."""
    if location is None:
        return ControlPlaneResults(link)
    if location.startswith("gs://"):
        return BucketResults(location)
    raise invalid(location, "a location of results", "gs://bucket/folder")


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


class BucketResults:
    def __init__(self, location: str) -> None:
        self._bucket = Bucket(location)

    def put(self, job_id: JobId, text: str) -> str:
        name = f"{job_id}.txt"
        if not self._bucket.has(name):  # the result of a job never changes
            self._bucket.write(name, text.encode())
        return f"{self._bucket.url}/{name}"

    def delete(self, job_id: JobId) -> None:
        self._bucket.delete([f"{job_id}.txt"])
