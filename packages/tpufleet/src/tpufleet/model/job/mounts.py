"""Buckets that a job sees as folders, through Cloud Storage FUSE."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from tpufleet import schema
from tpufleet.errors import invalid
from tpufleet.schema import about

_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
# On GKE the CSI driver mounts buckets, before the container starts.
MOUNTED_BY_PROVIDER = frozenset({"gke"})
# Exit status on a host that cannot mount (EX_UNAVAILABLE of sysexits.h), and what the line that
# says why begins with.
FAILED, ERROR_PREFIX = 69, "mounts: "


def _parse_bucket(value: Any) -> str:
    name = str(value).removeprefix("gs://").rstrip("/")
    if not _BUCKET.fullmatch(name):
        raise invalid(name, "the name of a bucket", "my-data")
    return name


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    bucket: Annotated[
        str,
        schema.custom("bucket", _parse_bucket, {"type": "string"}),
        about("Its name, without gs://.", example="my-data"),
    ]
    path: Annotated[
        str,
        schema.text(
            "absolute path without ..",
            r"(?!.*/\.\.)(/[A-Za-z0-9._-]+)+",
            example="/data",
        ),
        about("Folder on every host.", example="/data"),
    ]
    read_only: Annotated[bool, about("Writing fails.")] = False

    @classmethod
    def expand(cls, value: Any) -> Any:
        """`my-data:/data` or `my-data:/data:ro`."""
        if not isinstance(value, str):
            return value
        bucket, _, rest = value.removeprefix("gs://").partition(":")
        folder = rest.removesuffix(":ro")
        return {"bucket": bucket, "path": folder, "read_only": folder != rest}


def mounted_command(mounts: Sequence[Mount], command: Sequence[str]) -> tuple[str, ...]:
    """A command that mounts the buckets and then becomes `command`. A mount that an earlier attempt
    left behind is replaced; gcsfuse ends with the processes of the attempt."""
    if not mounts:
        return tuple(command)
    lines = [
        f"command -v gcsfuse >/dev/null || {{ echo '{ERROR_PREFIX}gcsfuse is not installed on this "
        "host; see https://cloud.google.com/storage/docs/cloud-storage-fuse/install' >&2; "
        f"exit {FAILED}; }}"
    ]
    for mount in mounts:
        path = shlex.quote(mount.path)
        mode = "-o ro " if mount.read_only else ""
        lines += [
            f"{{ fusermount3 -u -z {path} || fusermount -u -z {path}; }} 2>/dev/null || true",
            f"mkdir -p {path} || {{ echo 'mounts: {mount.path} cannot be made on this host; use a "
            "folder below /mnt/buckets' >&2; exit 1; }",
            f"gcsfuse --implicit-dirs {mode}{shlex.quote(mount.bucket)} {path}",
        ]
    script = "\n".join([*lines, 'exec "$@"'])
    return ("bash", "-euo", "pipefail", "-c", script, "mounts", *command)
