"""Backups: the database and the files that belong to it, in one archive with checksums.

A tar.gz of `database.jsonl`, files of the state folder under `home/` and `data/`, and at the end
`manifest.json`, which has the SHA-256 of every other member.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import re
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, cast

import tpufleet
from tpufleet import deep_folders
from tpufleet.compose import local_root, server_files
from tpufleet.config import Config
from tpufleet.errors import BadInput, exists, unwritable
from tpufleet.stores.base import ChangeSet, JobQuery, Store
from tpufleet.stores.open_store import open_database, open_store
from tpufleet.stores.sql import dump, schema_migrations

logger = logging.getLogger(__name__)

FORMAT = 1
_DATABASE, _MANIFEST = "database.jsonl", "manifest.json"
_RESTORED_FROM = "restored-from"  # in a restored state folder: the path of the original
# Patterns below the state folder and below `data`. `local` are records of simulated slices, without
# the working folders of their hosts.
_HOME_FILES = ("token", "port")
_DATA_FILES = (
    "secret", "snapshots/*.tar.gz", "results/*", "faults.yaml",
    "local/.root.json", "local/*/slice.json", "tpu-vm/**/*", "compute/**/*",
)  # fmt: skip
_CHECKPOINTS = "checkpoints"
_JOBS_PER_PAGE = 1_000
# A path has at most 4,096 bytes; the rest is left for the folder to restore into.
MAX_NAME_BYTES = 3072
MAX_NAMED_SKIPPED = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class BackupReport:
    file: str
    size: int
    sha256: str
    created_at: datetime
    version: str  # of tpufleet
    schema: int
    files: int
    rows: int
    home: str  # state folder that it was made of
    skipped: int  # files and folders that could not be read or restored
    first_skipped: tuple[str, ...]  # "NAME: REASON"


def before_migration(settings: Config, store_url: str, newest: int) -> Path | None:
    """Back up a database that is about to be migrated to the newest version, for the way back."""
    if store_url == "memory:" or (
        settings.store is None and not (settings.home / "fleet.db").exists()
    ):
        return None
    with contextlib.closing(open_database(store_url)) as database:
        version = schema_migrations.version(database)
    if not 0 < version < newest:
        return None
    folder = settings.home / "backups"
    folder.mkdir(mode=0o700, exist_ok=True)
    target = folder / f"schema-{version}-{datetime.now(UTC):%Y%m%dT%H%M%S}.tar.gz"
    create(settings, store_url, target, None)
    return target


def create(
    settings: Config, store_url: str, target: Path, optional: tuple[str, ...] | None
) -> BackupReport:
    """While servers are running. The database is read first: files that it refers to are kept.
    `optional=None`: only the database."""
    if target.exists():
        raise exists(target, "choose another name")
    database = store_url.partition("sqlite:///")[2]
    if database and not Path(database).exists():
        raise BadInput(
            f"no database at {database}: no server has run in this state folder\n"
            "  next: set TPUFLEET_HOME or TPUFLEET_STORE to those of the server"
        )
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "w+b") as file:
            manifest = _write(settings, store_url, file, optional)
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, target)  # fails if another one was created meanwhile
    except OSError as error:
        raise unwritable(target, error) from error
    finally:
        draft.unlink(missing_ok=True)
    return _report(target, manifest)


def verify(source: Path) -> BackupReport:
    """Raises BadInput unless it is complete and unchanged."""
    return _report(source, _verified_manifest(source))


def restore(settings: Config, store_url: str, source: Path) -> BackupReport:
    """Into an empty database and a state folder without a server. A file that others can read is
    refused: it has the credentials of the installation."""
    server_files.require_private(source)
    manifest = _verified_manifest(source)
    _require_targets(settings, manifest["sha256"].keys() - {_DATABASE})
    for folder in (settings.home, settings.data):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with server_files.exclusive_lock(settings.home):
        for name in ("data/secret", "home/token"):
            if name in manifest["sha256"] and (path := _target(settings, name)).exists():
                raise exists(path, "restore into a new TPUFLEET_HOME, or move the old folder away")
        with tarfile.open(source, "r:gz") as tar, contextlib.ExitStack() as stack:
            for member in tar:
                content = tar.extractfile(member)
                if content is None or member.name == _MANIFEST:
                    continue
                if member.name == _DATABASE:
                    database = open_database(store_url)
                    stack.callback(database.close)
                    lines = io.TextIOWrapper(content, encoding="utf-8")
                    dump.load_dump(database, lines, manifest["schema"])
                    # Before the files, so that a copy is known as one if they do not fit.
                    (settings.home / _RESTORED_FROM).write_text(manifest["home"])
                else:
                    _extract(content, _target(settings, member.name))
        with contextlib.closing(open_store(store_url)) as store:
            _move_checkpoints(store, manifest["data"], settings.data)
            local_root.forget(store)
    return _report(source, manifest)


def _move_checkpoints(store: Store, original: str, data: Path) -> None:
    """Jobs resume from the folder that checkpoints are restored into, not from the original's."""
    before, after = f"{original}/{_CHECKPOINTS}/", data / _CHECKPOINTS
    page = JobQuery(archived=None, limit=_JOBS_PER_PAGE)
    while jobs := store.jobs(page):
        moved = [
            replace(job, checkpoint=f"{after}/{job.checkpoint.removeprefix(before)}")
            for job in jobs
            if job.checkpoint.startswith(before)
        ]
        store.commit(ChangeSet(jobs=moved))
        page = replace(page, before=jobs[-1].id)


@contextlib.contextmanager
def original_stopped(home: Path) -> Iterator[None]:
    """Two servers would control the same simulated slices: one could stop those of the other. So
    the original is not started meanwhile either."""
    original = _original(home)
    with contextlib.ExitStack() as stack:
        if original is not None:
            try:
                stack.enter_context(server_files.exclusive_lock(original, home))
            except OSError:  # of another user
                logger.warning("cannot lock %s, from which this was restored", original)
        yield


def _original(home: Path) -> Path | None:
    """The state folder that this one was restored from, if it is on this machine."""
    try:
        original = Path((home / _RESTORED_FROM).read_text())
    except FileNotFoundError:
        return None
    return None if original == home.resolve() or not original.is_dir() else original


def _write(
    settings: Config, store_url: str, file: IO[bytes], optional: tuple[str, ...] | None
) -> dict[str, Any]:
    checksums: dict[str, str] = {}
    skipped: list[str] = []
    with (
        tarfile.open(fileobj=file, mode="w:gz", compresslevel=6) as tar,
        tempfile.TemporaryFile("w+", encoding="utf-8") as rows,
        contextlib.closing(open_database(store_url)) as database,
    ):
        schema = dump.write_dump(database, rows)
        rows.flush()
        rows.seek(0)
        count = sum(line.startswith("[") for line in rows)
        _add(tar, _DATABASE, cast(IO[bytes], rows.buffer), os.fstat(rows.fileno()), checksums)
        for name, path in _files(settings, optional):
            with contextlib.suppress(FileNotFoundError), path.open("rb") as content:
                _add(tar, name, content, os.fstat(content.fileno()), checksums)
        for folder in optional or ():
            for name, opened in _open_files(settings.data, folder, skipped):
                with opened:
                    _add(tar, name, opened, os.fstat(opened.fileno()), checksums)
        manifest = {
            "format": FORMAT,
            "created_at": datetime.now(UTC).isoformat(),
            "version": tpufleet.__version__,
            "schema": schema,
            "rows": count,
            "home": str(settings.home.resolve()),
            "data": str(settings.data),
            "skipped": len(skipped),
            "first_skipped": skipped[:MAX_NAMED_SKIPPED],
            "sha256": checksums,
        }
        text = json.dumps(manifest, indent=1).encode()
        entry = tarfile.TarInfo(_MANIFEST)
        entry.size, entry.mode = len(text), 0o600
        tar.addfile(entry, io.BytesIO(text))
    return manifest


def _files(settings: Config, optional: tuple[str, ...] | None) -> Iterator[tuple[str, Path]]:
    if optional is None:
        return
    for prefix, folder, chosen in (
        ("home", settings.home, _HOME_FILES), ("data", settings.data, _DATA_FILES),
    ):  # fmt: skip
        for pattern in chosen:
            for path in sorted(folder.glob(pattern)):
                if path.is_file() and not path.is_symlink():
                    yield f"{prefix}/{path.relative_to(folder)}", path


def _open_files(data: Path, kind: str, skipped: list[str]) -> Iterator[tuple[str, IO[bytes]]]:
    """Regular files below a folder that jobs write to. What cannot be read or restored is added to
    `skipped`."""

    def skip(name: str, reason: str | None) -> None:
        # Names of jobs are shown on the terminal of an admin.
        shown = "".join(each if each.isprintable() else "?" for each in name[:100])
        skipped.append(f"{shown}{'…' if len(name) > 100 else ''}: {reason}")

    def fits(name: str) -> bool:
        if len(os.fsencode(f"{prefix}/{name}")) <= MAX_NAME_BYTES:
            return True
        skip(f"{prefix}/{name}", "the path is too long")
        return False

    def on_error(error: OSError) -> None:
        skip(f"data/{kind}/…/{error.filename}", error.strerror)

    # The folder itself may be a link to another disk.
    for folder in deep_folders.walk((data / kind).resolve(), on_error=on_error):
        prefix = "/".join(("data", kind, *folder.names))
        folder.folders[:] = sorted(filter(fits, folder.folders))
        for name in sorted(filter(fits, folder.files)):
            try:
                file = _open_regular(name, folder.descriptor)
            except FileNotFoundError:
                continue
            except OSError as error:
                skip(f"{prefix}/{name}", error.strerror)
                continue
            if file is not None:
                yield f"{prefix}/{name}", file


def _open_regular(name: str, folder: int) -> IO[bytes] | None:
    """None for links, pipes and the like."""
    if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        return None
    # Without O_NONBLOCK, opening a pipe that took its place would wait for its other end.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return open(os.open(name, flags, dir_fd=folder), "rb")


def _add(
    tar: tarfile.TarFile,
    name: str,
    content: IO[bytes],
    status: os.stat_result,
    checksums: dict[str, str],
) -> None:
    """A file that grows meanwhile, as logs do, is cut at its size at the beginning; one that
    shrinks is filled with zeros."""
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.mtime = status.st_size, 0o600, int(status.st_mtime)
    content.seek(0)
    reader = _HashingReader(content)
    tar.addfile(entry, reader)  # only `read` is called
    checksums[name] = reader.hash.hexdigest()


class _HashingReader:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.hash = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        data += bytes(max(0, size - len(data)))
        self.hash.update(data)
        return data


def _verified_manifest(source: Path) -> dict[str, Any]:
    found: dict[str, str] = {}
    manifest: dict[str, Any] = {}
    try:
        with tarfile.open(source, "r:gz") as tar:
            for member in tar:
                content = tar.extractfile(member) if member.isreg() else None
                if content is None:
                    found[member.name] = ""  # no file, and in no manifest
                elif member.name == _MANIFEST:
                    manifest = json.loads(content.read())
                else:
                    found[member.name] = hashlib.file_digest(content, "sha256").hexdigest()  # type: ignore[arg-type]  # a BufferedReader
        if manifest.get("format") != FORMAT:
            known = f"format {manifest.get('format')}" if manifest else "no manifest"
            raise ValueError(known)
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise BadInput(f"{source} is not a complete backup: {error}") from error
    expected = manifest["sha256"]
    wrong = [name for name in expected | found if found.get(name) != expected.get(name)]
    if wrong:
        raise BadInput(f"{source} is damaged: the checksum of {min(wrong)} does not match")
    return manifest


def _require_targets(settings: Config, names: Collection[str]) -> None:
    """Raises BadInput unless all files can be written, each of them inside the state folder."""
    for name in names:
        _target(settings, name)
        if any(name[: each.start()] in names for each in re.finditer("/", name)):
            raise _unsafe(name)


def _unsafe(name: str) -> BadInput:
    return BadInput(f"the backup contains {name!r}, which is no file of the state folder")


def _target(settings: Config, name: str) -> Path:
    prefix, _, relative = name.partition("/")
    folder = {"home": settings.home, "data": settings.data}.get(prefix)
    if folder is None or "\0" in name or not {"", ".", ".."}.isdisjoint(relative.split("/")):
        raise _unsafe(name)
    return folder / relative


def _extract(content: IO[bytes], path: Path) -> None:
    missing, folder = [], path.parent
    while not folder.exists():  # `parents=True` is recursive
        missing.append(folder)
        folder = folder.parent
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with open(os.open(path, flags, 0o600), "wb") as file:
        shutil.copyfileobj(content, file)


def _report(path: Path, manifest: dict[str, Any]) -> BackupReport:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return BackupReport(
        file=str(path),
        size=path.stat().st_size,
        sha256=digest,
        created_at=datetime.fromisoformat(manifest["created_at"]),
        version=manifest["version"],
        schema=manifest["schema"],
        files=len(manifest["sha256"]) - 1,
        rows=manifest["rows"],
        home=manifest["home"],
        skipped=manifest["skipped"],
        first_skipped=tuple(manifest["first_skipped"]),
    )
