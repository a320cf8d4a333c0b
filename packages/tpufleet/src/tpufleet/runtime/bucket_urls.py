"""Locations in buckets, `gs://bucket/folder`."""

from __future__ import annotations

from urllib.parse import urlsplit


def split_bucket_url(url: str) -> tuple[str, str, str]:
    """Scheme, bucket and name; the scheme is empty for a path. A name may contain `#` and `?`,
    which mean something else to `urlsplit`."""
    scheme = urlsplit(url).scheme
    rest = url[len(scheme) + 1 :] if scheme else url
    if not rest.startswith("//"):
        return scheme, "", rest
    bucket, _, name = rest[2:].partition("/")
    return scheme, bucket, name
