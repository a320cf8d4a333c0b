"""Buckets that a job sees as folders, through Cloud Storage FUSE."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
PATH = re.compile(r"(/[A-Za-z0-9._-]+)+")
# On GKE the CSI driver mounts buckets, before the container starts.
MOUNTED_BY_PROVIDER = frozenset({"gke"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    bucket: str  # its name, without gs://
    path: str  # absolute, on every host
    read_only: bool = False


def mounted_command(mounts: Sequence[Mount], command: Sequence[str]) -> tuple[str, ...]:
    """A command that mounts the buckets and then becomes `command`. A mount that an earlier attempt
    left behind is replaced; gcsfuse ends with the processes of the attempt."""
    if not mounts:
        return tuple(command)
    lines = [
        "command -v gcsfuse >/dev/null || { echo 'mounts: gcsfuse is not installed on this host; "
        "see https://cloud.google.com/storage/docs/cloud-storage-fuse/install' >&2; exit 1; }"
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
