"""Snapshots of a folder: which files are included, and a reproducible archive of them.

Excluded: what `.gitignore` and `.tpuignore` exclude, `.git`, `__pycache__`, virtual environments,
and everything that is neither a file nor a symbolic link.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO

from tpufleet.errors import BadInput, Conflict, invalid, unreadable
from tpufleet.model.job.snapshots import (
    EXECUTABLE,
    LINK,
    REGULAR,
    SnapshotEntry,
    duplicate,
    not_stored,
    require_path,
    require_unpackable,
    snapshot_digest,
)

if TYPE_CHECKING:
    import pathspec

    from tpufleet.client.fleet import FleetClient

DEFAULT_LIMIT = 100 * 2**20
ALWAYS_EXCLUDED = frozenset({".git", "__pycache__"})
IGNORE_FILES = (".tpuignore", ".gitignore")  # the first one that matches wins

# (folder of the ignore file, its patterns), deepest first. For an ignore file above the snapshot:
# a NUL, then the path from there down to the snapshot.
Rules = tuple[tuple[str, "pathspec.GitIgnoreSpec"], ...]
_OUTSIDE = "\0"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """The content of a folder at the time of the scan."""

    folder: Path
    entries: tuple[SnapshotEntry, ...]  # sorted by path
    digest: str
    size: int  # of all files together
    added: Mapping[str, bytes] = field(default_factory=dict)  # files that are not in the folder


def scan(folder: str | os.PathLike[str], limit: int = DEFAULT_LIMIT) -> Scan:
    """Read-only. Raises BadInput when the folder is too large or unreadable, or a link points
    outside."""
    root = Path(folder).resolve()
    if not root.is_dir():
        raise invalid(str(folder), "a folder", "--workdir .", "workdir")
    try:
        files = sorted(_walk(root, "", _rules_above(root)), key=lambda item: item[0])
        _check_size(root, files, limit)
        entries = tuple(_entry(root, path, mode) for path, mode, _ in files)
    except OSError as error:
        hint = "make it readable, or exclude it in .tpuignore"
        raise unreadable(error.filename, error, "workdir", hint) from error
    size = sum(entry.size for entry in entries)
    return Scan(folder=root, entries=entries, digest=snapshot_digest(entries), size=size)


def with_files(scanned: Scan, files: Mapping[str, bytes]) -> Scan:
    """The same content with these files added, or in place of files of the same path."""
    added = {**scanned.added, **files}
    entries = [entry for entry in scanned.entries if entry.path not in files]
    for path, content in files.items():
        digest = hashlib.sha256(content).hexdigest()
        entries.append(SnapshotEntry(path=path, mode=REGULAR, size=len(content), sha256=digest))
    entries.sort(key=lambda entry: entry.path)
    return Scan(
        folder=scanned.folder,
        entries=tuple(entries),
        digest=snapshot_digest(entries),
        size=sum(entry.size for entry in entries),
        added=added,
    )


def upload(client: FleetClient, scanned: Scan) -> None:
    """Upload a snapshot unless the server has it."""
    if client.has_snapshot(scanned.digest):
        return
    with tempfile.TemporaryFile() as archive:
        pack(scanned, archive)
        archive.seek(0)
        client.put_snapshot(scanned.digest, archive)


def pack(scanned: Scan, out: BinaryIO) -> None:
    """Write a tar.gz whose bytes depend only on the content."""
    zipped = gzip.GzipFile(filename="", fileobj=out, mode="wb", compresslevel=6, mtime=0)
    with zipped, tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in scanned.entries:
            member = tarfile.TarInfo(entry.path)
            member.mode = entry.mode
            if entry.target is not None:
                member.type, member.linkname = tarfile.SYMTYPE, entry.target
                archive.addfile(member)
                continue
            content = scanned.added.get(entry.path)
            if content is None:
                content = _content(scanned.folder / entry.path)
            if hashlib.sha256(content).hexdigest() != entry.sha256:
                raise Conflict(f"{entry.path} changed while it was being packed; submit again")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def unpack(packed: IO[bytes], folder: str | os.PathLike[str]) -> None:
    """Extract into an empty folder. Raises BadInput when the archive would write outside of it."""
    root = Path(folder).resolve()
    entries = []
    try:
        with tarfile.open(fileobj=packed, mode="r:gz") as archive:
            for member in archive:
                target = root / require_path(member.name)
                if member.issym():
                    entries.append(SnapshotEntry(path=member.name, target=member.linkname))
                elif not member.isreg():
                    raise not_stored(member.name)
                else:
                    source = archive.extractfile(member)
                    assert source is not None  # true for regular files
                    entries.append(SnapshotEntry(path=member.name))
                    _write(target, source, EXECUTABLE if member.mode & 0o100 else REGULAR)
        require_unpackable(entries)
        # Links last, so that no file is written through one.
        for entry in entries:
            if entry.target is not None:
                target = root / entry.path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(entry.target)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadInput(f"snapshot: damaged archive: {error}") from error
    except (FileExistsError, NotADirectoryError) as error:
        raise duplicate(error.filename) from error


def _walk(root: Path, prefix: str, rules: Rules) -> Iterator[tuple[str, int, int]]:
    """Yield each file and link as (path, mode, size); the size of a link is -1."""
    rules = _rules_of(root, prefix) + rules
    with os.scandir(root / prefix) as items:
        for item in items:
            path = f"{prefix}{item.name}"
            if item.name in ALWAYS_EXCLUDED:
                continue
            if item.is_symlink():
                if not _ignored(path, rules):
                    yield path, LINK, -1
            elif item.is_dir():
                if _ignored(path + "/", rules) or os.path.exists(root / path / "pyvenv.cfg"):
                    continue
                yield from _walk(root, path + "/", rules)
            elif item.is_file() and not _ignored(path, rules):
                status = item.stat()
                yield path, EXECUTABLE if status.st_mode & 0o100 else REGULAR, status.st_size


def _rules_of(root: Path, prefix: str) -> Rules:
    rules = []
    for name in IGNORE_FILES:
        file = root / prefix / name
        if file.is_file():
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            rules.append((prefix, _patterns(lines, file)))
    return tuple(rules)


def _patterns(lines: list[str], file: Path) -> pathspec.GitIgnoreSpec:
    import pathspec  # not in servers and agents, which unpack only

    try:
        return pathspec.GitIgnoreSpec.from_lines(lines)
    except ValueError as error:
        raise BadInput(f"workdir: invalid pattern in {file}: {error}") from error


def _rules_above(root: Path) -> Rules:
    """The ignore files of the enclosing git repository, as git applies them."""
    top = next((up for up in (root, *root.parents) if (up / ".git").exists()), root)
    if top == root:
        return ()
    below: list[Rules] = []
    part = ""
    for name in root.relative_to(top).parts:
        below.insert(0, _rules_of(top, part))
        part += name + "/"
    rules = tuple(rule for level in below for rule in level)
    # A folder that is itself ignored was chosen on purpose: then only its own ignore files apply.
    if any(_ignored(part[: end + 1], rules) for end, sign in enumerate(part) if sign == "/"):
        return ()
    return tuple((_OUTSIDE + part[len(where) :], spec) for where, spec in rules)


def _ignored(path: str, rules: Rules) -> bool:
    for where, spec in rules:
        relative = where[1:] + path if where.startswith(_OUTSIDE) else path[len(where) :]
        verdict = spec.check_file(relative).include
        if verdict is not None:
            return verdict
    return False


def _check_size(root: Path, files: list[tuple[str, int, int]], limit: int) -> None:
    total = sum(max(size, 0) for _, _, size in files)
    if total <= limit:
        return
    largest = sorted(files, key=lambda item: -item[2])[:5]
    lines = "\n".join(f"  {_format_size(size):>9}  {path}" for path, _, size in largest)
    raise BadInput(
        f"workdir: {root} is {_format_size(total)}, more than the limit of {_format_size(limit)}; "
        f"largest files:\n{lines}\n"
        "Exclude files that the job does not need in .tpuignore (same syntax as .gitignore), "
        "or raise TPUFLEET_SNAPSHOT_LIMIT."
    )


def _format_size(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"


def _entry(root: Path, path: str, mode: int) -> SnapshotEntry:
    if mode != LINK:
        content = _content(root / path)
        digest = hashlib.sha256(content).hexdigest()
        return SnapshotEntry(path=path, mode=mode, size=len(content), sha256=digest)
    target = os.readlink(root / path)
    if os.path.isabs(target) or not Path(os.path.realpath(root / path)).is_relative_to(root):
        raise BadInput(
            f"workdir: the link {path} points outside ({target}); "
            "replace it with a copy, or exclude it in .tpuignore"
        )
    return SnapshotEntry(path=path, mode=LINK, target=target)


def _content(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _write(target: Path, source: IO[bytes], mode: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "xb") as file:
        while block := source.read(2**20):
            file.write(block)
    target.chmod(mode)
