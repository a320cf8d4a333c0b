"""Compare jobs: which fields, arguments, files and metrics differ."""

from __future__ import annotations

import difflib
import re
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tpufleet.errors import BadInput, NotFound
from tpufleet.model import job_file
from tpufleet.model.api_types import CodeDifference, Comparison, FileDifference
from tpufleet.model.jobs import Job
from tpufleet.model.metric_points import searchable_values
from tpufleet.service import metric_series, queries
from tpufleet.service.files.snapshots import SnapshotFiles
from tpufleet.stores.base import Store

MAX_JOBS = 20
MAX_FILE_BYTES = 256 * 1024  # larger files are only reported as different
MAX_DIFF_CHARACTERS = 200_000  # of one pair of snapshots
_ARGUMENT = re.compile(r"(?:--?)?([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)
_UNCOMPARED = ("name", "tags", "notes")  # they are in the head of the table


def compare(store: Store, snapshots: SnapshotFiles, jobs: Sequence[Job]) -> Comparison:
    """The first job is what the code of the others is compared with."""
    if not 2 <= len(jobs) <= MAX_JOBS:
        raise BadInput(f"jobs: name 2 to {MAX_JOBS} jobs to compare, not {len(jobs)}")
    settings = [flat_settings(job) for job in jobs]
    series = [metric_series.series(store, job) for job in jobs]
    last = [
        searchable_values(each.points[-1].step, each.points[-1].values) if each.points else {}
        for each in series
    ]
    return Comparison(
        jobs=tuple(queries.job_rows(store, jobs)),
        config=_differing(settings),
        metrics=_by_name(last),
        code=tuple(_code_difference(snapshots, jobs[0], other) for other in jobs[1:]),
    )


def flat_settings(job: Job) -> dict[str, str]:
    """The job file as `path: value`, and each `key=value` of the command by itself."""
    document = job_file.to_document(job.spec)
    for name in _UNCOMPARED:
        document.pop(name, None)
    # Written in full, so that a job that sets one of them does not differ in all of them.
    document["retries"] = asdict(job.spec.retries)
    command = document.pop("command", [])
    arguments = [command] if isinstance(command, str) else list(command)
    rest: list[str] = []
    flat: dict[str, str] = {}
    for argument in arguments:
        pair = _ARGUMENT.fullmatch(argument)
        if pair:
            flat[pair[1]] = pair[2]
        else:
            rest.append(argument)
    return {"command": " ".join(rest), **flat, **_flattened(document, "")}


def _flattened(value: Any, path: str) -> dict[str, str]:
    if isinstance(value, Mapping):
        parts = (_flattened(item, f"{path}.{key}".lstrip(".")) for key, item in value.items())
        return {name: text for part in parts for name, text in part.items()}
    if isinstance(value, (list, tuple)):
        return {path: ", ".join(map(str, value))}
    return {path: str(value)}


def _differing(settings: Sequence[Mapping[str, str]]) -> dict[str, tuple[str | None, ...]]:
    names = dict.fromkeys(name for each in settings for name in each)
    rows = {name: tuple(each.get(name) for each in settings) for name in names}
    return {name: row for name, row in rows.items() if len(set(row)) > 1}


def _by_name(last: Sequence[Mapping[str, float]]) -> dict[str, tuple[float | None, ...]]:
    names = dict.fromkeys(name for each in last for name in each)
    return {name: tuple(each.get(name) for each in last) for name in names}


def _code_difference(snapshots: SnapshotFiles, base: Job, other: Job) -> CodeDifference:
    if base.snapshot == other.snapshot:
        return CodeDifference(job_id=other.id, same=True)
    try:
        before, after = (_files(snapshots, job) for job in (base, other))
    except NotFound as error:
        return CodeDifference(job_id=other.id, same=False, message=str(error))
    files, room = [], MAX_DIFF_CHARACTERS
    for path in sorted(before.keys() | after.keys()):
        if before.get(path) != after.get(path):
            difference = _file_difference(path, before.get(path), after.get(path), room)
            room -= len(difference.diff)
            files.append(difference)
    return CodeDifference(job_id=other.id, same=not files, files=tuple(files))


def _file_difference(
    path: str, before: bytes | None, after: bytes | None, room: int
) -> FileDifference:
    change = "added" if before is None else "deleted" if after is None else "changed"
    old, new = _text(before), _text(after)
    if old is None or new is None:
        return FileDifference(path=path, change=change, diff="")
    lines = difflib.unified_diff(
        old.splitlines(), new.splitlines(), f"a/{path}", f"b/{path}", lineterm=""
    )
    diff = "\n".join(lines)
    return FileDifference(path=path, change=change, diff=diff if len(diff) <= room else "")


def _text(content: bytes | None) -> str | None:
    """None for what is not text, or too large to show."""
    if content is None:
        return ""
    if len(content) > MAX_FILE_BYTES or b"\0" in content:
        return None
    return content.decode(errors="replace")


def _files(snapshots: SnapshotFiles, job: Job) -> dict[str, bytes]:
    if job.snapshot is None:
        return {}
    return _read(snapshots.require(job.snapshot))


def _read(archive: Path) -> dict[str, bytes]:
    """Content by path; of a large file, enough to see that it differs."""
    files: dict[str, bytes] = {}
    with tarfile.open(archive, "r:*") as tar:
        for member in tar:
            content = tar.extractfile(member) if member.isfile() else None
            if content is not None:
                size = f"{member.size}".encode()
                large = member.size > MAX_FILE_BYTES
                data = content.read(MAX_FILE_BYTES + 1)
                files[member.name] = b"\0" + size + data if large else data
            elif member.issym():
                files[member.name] = f"→ {member.linkname}".encode()
    return files
