"""Where results go that a document cannot hold: a folder, a bucket, or the control plane itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tpufleet.errors import BadInput, Unreachable
from tpufleet.model.jobs import JobId

Keep = Callable[[JobId, str], str]  # the link under which the text is found
HEAD = 1000  # characters of a large result that its document shows


def keeper(location: str | None, link: Callable[[JobId], str]) -> Keep:
    """`location` is gs://bucket/folder or a full path. Without one the result stays where the job
    handed it over, and `link` leads there."""
    if location is None:
        return lambda job_id, text: link(job_id)
    parts = urlsplit(location)
    if parts.scheme == "gs" and parts.netloc:
        return _in_bucket(parts.netloc, parts.path.strip("/"))
    if location.startswith("/"):
        return _in_folder(Path(location))
    raise BadInput(f"{location!r} is no place for results; write gs://bucket/folder or a full path")


def shown(text: str, url: str) -> str:
    """What the document says instead of the result."""
    return f"{text[:HEAD]}\n… {len(text.encode())} bytes in all, at {url}"


def _in_folder(folder: Path) -> Keep:
    def keep(job_id: JobId, text: str) -> str:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{job_id}.txt"
        draft = path.with_name(f".{path.name}")
        draft.write_text(text)
        draft.replace(path)
        return path.as_uri()

    return keep


def _in_bucket(bucket: str, folder: str) -> Keep:
    try:
        from google.api_core import exceptions
        from google.cloud import storage
    except ImportError as error:
        raise BadInput(
            "the Cloud Storage client is not installed; run `pip install 'tpufleet[gcs]'`"
        ) from error
    target: Any = storage.Client().bucket(bucket)

    def keep(job_id: JobId, text: str) -> str:
        blob = target.blob(f"{folder}/{job_id}.txt".lstrip("/"))
        try:
            # Once is enough: the text of a job never changes.
            blob.upload_from_string(text, content_type="text/plain", if_generation_match=0)
        except exceptions.PreconditionFailed:
            pass  # a bridge before us was here
        except exceptions.GoogleAPICallError as error:
            raise Unreachable(f"{bucket} does not take the result: {error}") from error
        return f"gs://{bucket}/{blob.name}"

    return keep
