"""The working directory at submit: which files belong to it, packed so that equal trees are equal.

Left out: whatever `.gitignore` and `.tpuignore` files say, `.git`, `__pycache__`, virtual
environments, and anything that is neither file nor link.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pathspec

from tpufleet.errors import BadInput, Conflict
from tpufleet.model.snapshots import EXECUTABLE, LINK, REGULAR, SnapshotEntry, snapshot_digest

DEFAULT_LIMIT = 100 * 2**20
NEVER = frozenset({".git", "__pycache__"})
IGNORE_FILES = (".tpuignore", ".gitignore")  # the first one that has an opinion wins

# (folder of the ignore file, its patterns), deepest first. For a file above the snapshot's own
# folder: a NUL, then the way from there down to the snapshot.
Rules = tuple[tuple[str, pathspec.GitIgnoreSpec], ...]
_OUTSIDE = "\0"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """What a folder held when it was looked at."""

    folder: Path
    entries: tuple[SnapshotEntry, ...]  # sorted by path
    digest: str
    size: int  # of all files together


def scan(folder: str | os.PathLike[str], limit: int = DEFAULT_LIMIT) -> Scan:
    """Changes nothing. BadInput when the folder is too large, unreadable, or links lead out."""
    root = Path(folder).resolve()
    if not root.is_dir():
        raise BadInput(f"workdir: {folder} is not a folder; name one, or use --workdir")
    try:
        found = sorted(_walk(root, "", _rules_above(root)), key=lambda item: item[0])
        _refuse_too_large(root, found, limit)
        entries = tuple(_entry(root, path, mode) for path, mode, _ in found)
    except OSError as error:
        raise BadInput(
            f"workdir: cannot read {error.filename}: {error.strerror}; "
            "make it readable, or name it in .tpuignore"
        ) from error
    size = sum(entry.size for entry in entries)
    return Scan(folder=root, entries=entries, digest=snapshot_digest(entries), size=size)


def pack(scanned: Scan, out: BinaryIO) -> None:
    """A tar.gz whose bytes depend on the content alone."""
    zipped = gzip.GzipFile(filename="", fileobj=out, mode="wb", compresslevel=6, mtime=0)
    with zipped, tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in scanned.entries:
            member = tarfile.TarInfo(entry.path)
            member.mode = entry.mode
            if entry.target is not None:
                member.type, member.linkname = tarfile.SYMTYPE, entry.target
                archive.addfile(member)
                continue
            content = _content(scanned.folder / entry.path)
            if hashlib.sha256(content).hexdigest() != entry.sha256:
                raise Conflict(f"{entry.path} changed while it was being packed; submit again")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def unpack(packed: BinaryIO, folder: str | os.PathLike[str]) -> None:
    """Into an empty folder. BadInput, whoever made the archive, when it reaches outside of it."""
    root = Path(folder).resolve()
    links = []
    try:
        with tarfile.open(fileobj=packed, mode="r:gz") as archive:
            for member in archive:
                target = root / _inside(member.name)
                if member.issym():
                    links.append((target, member.linkname))
                elif member.isdir():
                    target.mkdir(parents=True, exist_ok=True)
                elif not member.isreg():
                    raise BadInput(f"snapshot: {member.name!r} is neither a file nor a link")
                else:
                    source = archive.extractfile(member)
                    assert source is not None  # regular members always have content
                    _write(target, source, EXECUTABLE if member.mode & 0o100 else REGULAR)
        # Links come last, so that no file is ever written through one.
        for target, linkname in links:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(linkname)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadInput(f"snapshot: damaged archive: {error}") from error
    except (FileExistsError, NotADirectoryError) as error:
        raise BadInput(f"snapshot: {error.filename} is in it twice, or already there") from error
    for target, linkname in links:
        if os.path.isabs(linkname) or not Path(os.path.realpath(target)).is_relative_to(root):
            target.unlink()
            raise BadInput(f"snapshot: the link {target.name!r} leads outside")


def _walk(root: Path, inside: str, rules: Rules) -> Iterator[tuple[str, int, int]]:
    """Each file and link as (path, mode, size); -1 is the size of a link."""
    rules = _rules_of(root, inside) + rules
    with os.scandir(root / inside) as items:
        for item in items:
            path = f"{inside}{item.name}"
            if item.name in NEVER:
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


def _rules_of(root: Path, inside: str) -> Rules:
    found = []
    for name in IGNORE_FILES:
        file = root / inside / name
        if file.is_file():
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            found.append((inside, _patterns(lines, file)))
    return tuple(found)


def _patterns(lines: list[str], file: Path) -> pathspec.GitIgnoreSpec:
    try:
        return pathspec.GitIgnoreSpec.from_lines(lines)
    except ValueError as error:
        raise BadInput(f"workdir: {file} has a pattern that git would not take: {error}") from error


def _rules_above(root: Path) -> Rules:
    """The ignore files of the repository that the folder is part of, as git applies them."""
    top = next((up for up in (root, *root.parents) if (up / ".git").exists()), root)
    if top == root:
        return ()
    below: list[Rules] = []
    part = ""
    for name in root.relative_to(top).parts:
        below.insert(0, _rules_of(top, part))
        part += name + "/"
    rules = tuple(rule for level in below for rule in level)
    # A folder that is itself ignored was named on purpose: then only its own files count.
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


def _refuse_too_large(root: Path, found: list[tuple[str, int, int]], limit: int) -> None:
    total = sum(max(size, 0) for _, _, size in found)
    if total <= limit:
        return
    largest = sorted(found, key=lambda item: -item[2])[:5]
    lines = "\n".join(f"  {_amount(size):>9}  {path}" for path, _, size in largest)
    raise BadInput(
        f"workdir: {root} holds {_amount(total)}, more than the limit of {_amount(limit)}. "
        f"The largest files:\n{lines}\n"
        "Name what the job does not need in .tpuignore (written like .gitignore), "
        "or raise TPUFLEET_SNAPSHOT_LIMIT."
    )


def _amount(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"


def _entry(root: Path, path: str, mode: int) -> SnapshotEntry:
    if mode != LINK:
        content = _content(root / path)
        digest = hashlib.sha256(content).hexdigest()
        return SnapshotEntry(path=path, mode=mode, size=len(content), sha256=digest)
    target = os.readlink(root / path)
    if os.path.isabs(target) or not Path(os.path.realpath(root / path)).is_relative_to(root):
        raise BadInput(
            f"workdir: the link {path} leads outside ({target}); "
            "copy what it points to, or name it in .tpuignore"
        )
    return SnapshotEntry(path=path, mode=LINK, target=target)


def _content(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _inside(name: str) -> str:
    parts = name.split("/")
    if name.startswith("/") or not name or any(part in ("", ".", "..") for part in parts):
        raise BadInput(f"snapshot: the path {name!r} leads outside")
    return name


def _write(target: Path, source: io.BufferedIOBase | BinaryIO, mode: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "xb") as file:
        while block := source.read(2**20):
            file.write(block)
    target.chmod(mode)
