"""Compare jobs: which fields, arguments, files and metrics differ."""

from __future__ import annotations

import difflib
import hashlib
import re
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import structs

from tpufleet.errors import BadInput, NotFound, busy
from tpufleet.model.api_types import CodeDifference, Comparison, FileDifference
from tpufleet.model.identifiers import check_range
from tpufleet.model.job import job_file
from tpufleet.model.job.jobs import Job
from tpufleet.model.job.metric_points import searchable_values
from tpufleet.service.files.snapshots import SnapshotFiles
from tpufleet.service.files.tar_reader import DAMAGED, TarReader
from tpufleet.service.jobs import metric_series, queries
from tpufleet.service.transport.limits import TooManyRequests
from tpufleet.stores.base import Store

MAX_JOBS = 20
MAX_FILE_BYTES = 256 * 1024  # larger files are only reported as different
MAX_FILE_LINES = 4_000  # as above
# Pairs of equal lines in two versions of a file: the work of `difflib`. Code has far fewer.
MAX_LINE_PAIRS = 50_000
MAX_FILE_DIFF_CHARACTERS = 100_000
# Of one comparison, however many jobs it has.
MAX_DIFF_CHARACTERS = 500_000
MAX_DIFFED_FILES = 500
MAX_DIFFED_BYTES = 8 * 1024 * 1024
MAX_DIFF_SECONDS = 10.0
MAX_UNPACKED_BYTES = 1024 * 1024 * 1024
_MAX_HEADERS_BYTES = 256 * 1024 * 1024  # of one snapshot, in addition
_CHUNK = 64 * 1024
MAX_LISTED_FILES = 2_000
MAX_TEXT_BYTES = 32 * 1024 * 1024  # of one snapshot in memory; of other files, only the digest is
_ARGUMENT = re.compile(r"(?:--?)?([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)
_UNCOMPARED = ("name", "tags", "notes")  # they are in the head of the table
_running = threading.Lock()  # one at a time: each takes memory and a processor


@dataclass(frozen=True, slots=True)
class _File:
    digest: str
    size: int
    content: bytes | None  # None: binary or large


@dataclass(slots=True)
class _Room:
    """What is left for one comparison."""

    unpacked: int = MAX_UNPACKED_BYTES
    listed: int = MAX_LISTED_FILES
    files: int = MAX_DIFFED_FILES
    bytes: int = MAX_DIFFED_BYTES
    characters: int = MAX_DIFF_CHARACTERS
    deadline: float = field(default_factory=lambda: time.monotonic() + MAX_DIFF_SECONDS)

    def take(self, size: int) -> bool:
        """Whether two versions of a file, together of this size, are still to be diffed."""
        left = self.files > 0 and size <= self.bytes and self.characters > 0
        if not left or time.monotonic() > self.deadline:
            return False
        self.files -= 1
        self.bytes -= size
        return True


def compare(store: Store, snapshots: SnapshotFiles, jobs: Sequence[Job]) -> Comparison:
    """The first job is what the code of the others is compared with."""
    check_range("number of jobs", len(jobs), 2, MAX_JOBS)
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
        code=_code_differences(snapshots, jobs),
    )


def flat_settings(job: Job) -> dict[str, str]:
    """The job file as `path: value`, and each `key=value` of the command by itself."""
    document = job_file.to_document(job.spec)
    for name in _UNCOMPARED:
        document.pop(name, None)
    # Written in full, so that a job that sets one of them does not differ in all of them.
    document["retries"] = structs.asdict(job.spec.retries)
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


def _code_differences(snapshots: SnapshotFiles, jobs: Sequence[Job]) -> tuple[CodeDifference, ...]:
    base, *others = jobs
    if all(other.snapshot == base.snapshot for other in others):
        return tuple(CodeDifference(job_id=other.id, same=True) for other in others)
    if not _running.acquire(blocking=False):
        raise TooManyRequests(busy("comparison"))
    try:
        room, before = _Room(), _Snapshot(snapshots, base)
        return tuple(_code_difference(snapshots, before, other, room) for other in others)
    finally:
        _running.release()


class _Snapshot:
    """The files of one job, read once."""

    def __init__(self, snapshots: SnapshotFiles, job: Job) -> None:
        self.digest = job.snapshot
        self._snapshots = snapshots
        self._files: dict[str, _File] | None = None

    def files(self, room: _Room) -> dict[str, _File]:
        if self._files is None:
            path = None if self.digest is None else self._snapshots.require(self.digest)
            self._files = {} if path is None else _read(path, room)
        return self._files


def _code_difference(
    snapshots: SnapshotFiles, base: _Snapshot, other: Job, room: _Room
) -> CodeDifference:
    if base.digest == other.snapshot:
        return CodeDifference(job_id=other.id, same=True)
    try:
        before, after = base.files(room), _Snapshot(snapshots, other).files(room)
    except (*DAMAGED, NotFound, BadInput) as error:
        return CodeDifference(job_id=other.id, same=False, message=str(error))
    paths = [
        path
        for path in sorted(before.keys() | after.keys())
        if _digest(before.get(path)) != _digest(after.get(path))
    ]
    listed = paths[: room.listed]
    room.listed -= len(listed)
    files = tuple(
        _file_difference(path, before.get(path), after.get(path), room) for path in listed
    )
    more = len(paths) - len(listed)
    message = f"{more} more files differ" if more else ""
    return CodeDifference(job_id=other.id, same=not paths, files=files, message=message)


def _digest(file: _File | None) -> str | None:
    return None if file is None else file.digest


def _file_difference(
    path: str, before: _File | None, after: _File | None, room: _Room
) -> FileDifference:
    change = "added" if before is None else "deleted" if after is None else "changed"
    missing = _File("", 0, b"")
    old, new = (each or missing for each in (before, after))
    if old.content is None or new.content is None or not room.take(old.size + new.size):
        return FileDifference(path=path, change=change, diff="")
    old_lines = old.content.decode(errors="replace").splitlines()
    new_lines = new.content.decode(errors="replace").splitlines()
    too_long = max(len(old_lines), len(new_lines)) > MAX_FILE_LINES
    if too_long or _line_pairs(old_lines, new_lines) > MAX_LINE_PAIRS:
        return FileDifference(path=path, change=change, diff="")
    diff = _joined(
        difflib.unified_diff(old_lines, new_lines, f"a/{path}", f"b/{path}", lineterm=""),
        min(room.characters, MAX_FILE_DIFF_CHARACTERS),
    )
    room.characters -= len(diff)
    return FileDifference(path=path, change=change, diff=diff)


def _line_pairs(old: Sequence[str], new: Sequence[str]) -> int:
    """Without the lines that `difflib` leaves out because they are frequent."""
    frequent = len(new) // 100 + 1 if len(new) >= 200 else len(new)
    counts = Counter(new)
    return sum(
        count * counts[line] for line, count in Counter(old).items() if counts[line] <= frequent
    )


def _joined(lines: Iterable[str], most: int) -> str:
    """Empty when it is longer."""
    kept, size = [], 0
    for line in lines:
        size += len(line) + 1
        if size > most:
            return ""
        kept.append(line)
    return "\n".join(kept)


def _read(archive: Path, room: _Room) -> dict[str, _File]:
    """By path."""
    files: dict[str, _File] = {}
    text_left = MAX_TEXT_BYTES
    with archive.open("rb") as packed:
        tar = TarReader(packed, room.unpacked + _MAX_HEADERS_BYTES)
        while (entry := tar.next_entry()) is not None:
            room.unpacked -= entry.size + tarfile.BLOCKSIZE
            if room.unpacked < 0:
                most = MAX_UNPACKED_BYTES // 2**20
                raise BadInput(f"the snapshots have more than {most} MiB when unpacked")
            if entry.issym():
                data = f"→ {entry.linkname}".encode("utf-8", "surrogateescape")
                files[entry.name] = _File(hashlib.sha256(data).hexdigest(), len(data), data)
            elif entry.isreg() and entry.size > min(MAX_FILE_BYTES, text_left):
                sha256 = hashlib.sha256()
                while data := tar.read(_CHUNK):
                    sha256.update(data)
                files[entry.name] = _File(sha256.hexdigest(), entry.size, None)
            elif entry.isreg():
                data = tar.read(entry.size)
                text = None if b"\0" in data else data
                text_left -= 0 if text is None else len(data)
                files[entry.name] = _File(hashlib.sha256(data).hexdigest(), len(data), text)
    return files
