"""Measures, walks and deletes folders that jobs write to: at any depth, and while they change.

A job can nest folders deeper than Python can recurse, and deeper than any path can name. So a walk
holds one open folder, goes down by name and up by `..`, and never follows a symbolic link.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_DELETE_ATTEMPTS = 3
# Something was added, replaced or moved meanwhile: another attempt may succeed.
_CHANGED = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.ELOOP, errno.ESTALE})

OnError = Callable[[OSError], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class WalkedFolder:
    """Valid until the walk goes on."""

    names: list[str]  # from the root to this folder; empty: the root itself
    descriptor: int
    folders: list[str]  # in it; the walk enters those that are left in the list
    files: list[str]  # everything else, links too


def walk(
    root: str | os.PathLike[str],
    *,
    dir_fd: int | None = None,
    on_error: OnError = lambda error: None,
    on_left: Callable[[str, int], None] = lambda name, parent: None,
    make_writable: bool = False,
) -> Iterator[WalkedFolder]:
    """Each folder before those in it. Folders that cannot be read are passed to `on_error` and left
    out; those that vanish meanwhile are left out. `on_left` gets the name of a folder that the walk
    has left, and the descriptor of the folder above it. `make_writable` changes the mode of folders
    that their owner, if that is this user, may not read or write."""
    try:
        current = _open(os.fspath(root), dir_fd, make_writable)
    except FileNotFoundError:
        return
    except OSError as error:
        on_error(error)
        return
    names: list[str] = []
    identities: list[tuple[int, int]] = []  # of the folders above
    pending: list[list[str]] = []  # folders to enter, of this folder and of each above
    try:
        while True:
            if len(pending) == len(names):
                folders, files = _entries(current, on_error)
                yield WalkedFolder(names=names, descriptor=current, folders=folders, files=files)
                pending.append(folders[::-1])
            if pending[-1]:
                name = pending[-1].pop()
                try:
                    child = _open(name, current, make_writable)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    on_error(error)
                    continue
                identities.append(_identity(current))
                names.append(name)
                current = _replace(current, child)
            elif names:
                parent = os.open("..", _FOLDER_FLAGS, dir_fd=current)
                current = _replace(current, parent)
                if _identity(current) != identities.pop():
                    raise OSError(errno.ESTALE, "the folder was moved meanwhile", names[-1])
                pending.pop()
                on_left(names.pop(), current)
            else:
                return
    except OSError as error:  # the way up is lost
        on_error(error)
    finally:
        os.close(current)


def delete(path: str | os.PathLike[str], *, dir_fd: int | None = None) -> None:
    """Delete a folder with everything in it; or the file or link at this path. Nothing happens when
    there is none. What cannot be deleted is left, and its first error is raised at the end."""
    for attempt in range(_DELETE_ATTEMPTS):
        error = _delete_once(os.fspath(path), dir_fd)
        if error is None:
            return
        if error.errno not in _CHANGED or attempt == _DELETE_ATTEMPTS - 1:
            raise error


def size(path: Path) -> int:
    """Bytes of all files below a folder, or of the file at this path. What vanishes or cannot be
    read counts as nothing."""
    status = _status(path)
    if status is None or not stat.S_ISDIR(status.st_mode):
        return status.st_size if status is not None and stat.S_ISREG(status.st_mode) else 0
    return sum(
        status.st_size
        for folder in walk(path)
        for name in folder.files
        if (status := _status(name, folder.descriptor)) is not None
    )


def disk_usage(path: Path) -> int:
    """Bytes that everything below a folder takes on the disk."""
    used = 0
    for folder in walk(path):
        for name in (*folder.folders, *folder.files):
            status = _status(name, folder.descriptor)
            used += status.st_blocks * 512 if status is not None else 0
    return used


def _delete_once(path: str, dir_fd: int | None) -> OSError | None:
    errors: list[OSError] = []

    def remove(function: Callable[..., None], name: str, parent: int | None) -> None:
        try:
            function(name, dir_fd=parent)
        except FileNotFoundError:
            pass
        except OSError as error:
            errors.append(error)

    status = _status(path, dir_fd)
    if status is None:
        return None
    if not stat.S_ISDIR(status.st_mode):
        remove(os.unlink, path, dir_fd)
        return errors[0] if errors else None
    for folder in walk(
        path,
        dir_fd=dir_fd,
        on_error=errors.append,
        on_left=lambda name, parent: remove(os.rmdir, name, parent),
        make_writable=True,
    ):
        for name in folder.files:
            remove(os.unlink, name, folder.descriptor)
    remove(os.rmdir, path, dir_fd)
    return errors[0] if errors else None


def _status(path: str | os.PathLike[str], dir_fd: int | None = None) -> os.stat_result | None:
    try:
        return os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
    except OSError:  # deleted meanwhile, or not readable
        return None


def _entries(descriptor: int, on_error: OnError) -> tuple[list[str], list[str]]:
    folders: list[str] = []
    files: list[str] = []
    try:
        with os.scandir(descriptor) as entries:
            for entry in entries:
                (folders if entry.is_dir(follow_symlinks=False) else files).append(entry.name)
    except OSError as error:
        on_error(error)
    return folders, files


def _open(name: str, dir_fd: int | None, make_writable: bool) -> int:
    try:
        descriptor = os.open(name, _FOLDER_FLAGS, dir_fd=dir_fd)
    except PermissionError:
        if not make_writable or not hasattr(os, "O_PATH"):
            raise
        # By descriptor: `chmod` would follow a link that takes the place of the folder.
        handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=dir_fd)
        try:
            os.chmod(f"/proc/self/fd/{handle}", stat.S_IRWXU)
        finally:
            os.close(handle)
        descriptor = os.open(name, _FOLDER_FLAGS, dir_fd=dir_fd)
    if make_writable and ~os.fstat(descriptor).st_mode & stat.S_IRWXU:
        with contextlib.suppress(OSError):  # of another user
            os.fchmod(descriptor, stat.S_IRWXU)
    return descriptor


def _replace(current: int, following: int) -> int:
    os.close(current)
    return following


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
