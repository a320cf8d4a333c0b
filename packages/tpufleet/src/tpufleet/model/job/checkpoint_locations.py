"""Checkpoint locations: how they are spelled, and which ones can be used."""

from __future__ import annotations

import posixpath
import re

# Buckets that checkpoints can be written to.
SCHEMES = ("gs", "s3")
# https://cloud.google.com/storage/docs/buckets#naming, without its lengths.
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]*")


def spelled(location: str) -> str:
    """Equal for spellings of one location, without dots and double slashes; links on disk are not
    resolved. POSIX, and thus normpath, keeps two slashes at the start of a path."""
    scheme, separator, path = location.rpartition("://")
    if separator:
        return f"{scheme}{separator}{posixpath.normpath(path)}"
    return "/" + posixpath.normpath(path).lstrip("/")


def location_error(location: str) -> str | None:
    """Why no job can keep its checkpoints there; None if one can."""
    if not location.isprintable():
        return "contains a line break or control character; remove it"
    scheme, separator, path = location.partition("://")
    if not separator:
        return None
    if scheme not in SCHEMES:
        return f"is not a bucket or a folder; use {SCHEMES[0]}://bucket/folder or an absolute path"
    bucket, *folders = path.removesuffix("/").split("/")
    if not _BUCKET.fullmatch(bucket):
        return f"has no valid bucket; use {scheme}://bucket/folder"
    if not folders:
        return f"is a whole bucket; use a folder in it, such as {scheme}://{bucket}/run-1"
    if not {"", ".", ".."}.isdisjoint(folders):
        return "has an empty part, `.` or `..`; write the path without them"
    return None
