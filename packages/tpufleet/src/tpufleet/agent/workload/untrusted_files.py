"""Files whose paths a job chooses or can change. The agent may read more than the job, so it checks
what it has opened, and not a path that may lead elsewhere a moment later."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path

from tpufleet import deep_folders

# Without O_NONBLOCK, opening a pipe would wait for its other end.
READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Their content describes the process that reads them, which is the agent.
KERNEL_FOLDERS = (Path("/proc"), Path("/sys"))


class NotAllowed(OSError):
    """The job has no right to this file or folder."""

    def __init__(self) -> None:
        super().__init__(errno.EACCES, "the job may not read it")


def read_named_by_job(
    path: Path, limit: int, hidden: Sequence[Path], user: tuple[int, int] | None
) -> bytes:
    """Read a file that the job names. Links are followed, as those of secrets in pods, but never to
    a hidden folder, nor to what the user of the job may not read."""
    descriptor = os.open(path, READ_FLAGS)
    with open(descriptor, "rb") as file:
        status, real = _regular(descriptor, limit), real_path(descriptor, path)
        _refuse_hidden(real, hidden)
        if user is not None and not _readable_by(user, status, real):
            raise NotAllowed
        return file.read(limit)


def list_named_by_job(
    path: Path,
    hidden: Sequence[Path] = (),
    user: tuple[int, int] | None = None,
    granted: Path | None = None,
) -> list[str]:
    """Names in a folder that the job names; those of folders end with a slash. Only what the job
    itself may list. It may list the `granted` folder wherever that is."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        real = real_path(descriptor, path)
        above = list(real.parents)
        if granted is not None and (real == granted or granted in above):
            above = above[: above.index(granted) + 1] if granted in above else []
        else:
            _refuse_hidden(real, hidden)
        if user is not None:
            status = os.fstat(descriptor)
            needed = [(status, stat.S_IROTH), (status, stat.S_IXOTH)]
            needed += [(os.stat(folder), stat.S_IXOTH) for folder in above]
            if not all(_permits(user, each, bit) for each, bit in needed):
                raise NotAllowed
        with os.scandir(descriptor) as entries:
            # Links are not followed.
            return [
                f"{each.name}/" if each.is_dir(follow_symlinks=False) else each.name
                for each in entries
            ]
    finally:
        os.close(descriptor)


def _refuse_hidden(real: Path, hidden: Sequence[Path]) -> None:
    refused = [*(Path(os.path.realpath(each)) for each in hidden), *KERNEL_FOLDERS]
    if any(real == each or each in real.parents for each in refused):
        raise NotAllowed


def read_below(root: Path, name: str, limit: int) -> tuple[os.stat_result, bytes]:
    """Read a regular file below a folder in which the job may write."""
    with open(open_below(root, name, READ_FLAGS), "rb") as file:
        return _regular(file.fileno(), limit), file.read(limit)


def open_below(root: Path, name: str, flags: int, mode: int = 0o600) -> int:
    """Open a file without following any link below `root`."""
    *folders, last = Path(name).parts
    parent = os.open(root, FOLDER_FLAGS)
    try:
        for folder in folders:
            above, parent = parent, os.open(folder, FOLDER_FLAGS, dir_fd=parent)
            os.close(above)
        return os.open(last, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=parent)
    finally:
        os.close(parent)


def open_folder(path: Path) -> int:
    """Open a folder by its real path. OSError when a link leads elsewhere."""
    descriptor = os.open(path, FOLDER_FLAGS)
    if real_path(descriptor, path) != path:
        os.close(descriptor)
        raise OSError(errno.ELOOP, f"{path} is a link")
    return descriptor


def write_below(root: Path, name: Path, data: bytes) -> None:
    """Write a file without following any link below `root`; what is in its way is deleted. A file
    that has this content already is not touched."""
    folder = os.open(root, FOLDER_FLAGS)
    try:
        for part in name.parts[:-1]:
            above, folder = folder, _require_folder(part, folder)
            os.close(above)
        if _content(name.name, folder, len(data)) != data:
            draft = f".{name.name}.{secrets.token_hex(8)}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(draft, flags, 0o644, dir_fd=folder), "wb") as file:
                file.write(data)
            _delete(name.name, folder)
            os.replace(draft, name.name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.close(folder)


def _require_folder(name: str, parent: int) -> int:
    try:
        return os.open(name, FOLDER_FLAGS, dir_fd=parent)
    except OSError:  # not there, or a link or a file of a job
        _delete(name, parent)
        os.mkdir(name, dir_fd=parent)
        return os.open(name, FOLDER_FLAGS, dir_fd=parent)


def _content(name: str, folder: int, size: int) -> bytes | None:
    """Of a regular file of this size that has no other name."""
    try:
        with open(os.open(name, READ_FLAGS | os.O_NOFOLLOW, dir_fd=folder), "rb") as file:
            status = os.fstat(file.fileno())
            plain = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
            return file.read() if plain and status.st_size == size else None
    except OSError:
        return None


def _delete(name: str, folder: int) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return
    except OSError:  # a folder
        deep_folders.delete(name, dir_fd=folder)


def make_folder_below(root: Path, name: Path) -> Path:
    """Create a folder, and those above it, without following any link below `root`."""
    parent = os.open(root, FOLDER_FLAGS)
    try:
        for folder in name.parts:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, dir_fd=parent)
            above, parent = parent, os.open(folder, FOLDER_FLAGS, dir_fd=parent)
            os.close(above)
    finally:
        os.close(parent)
    return root / name


def real_path(descriptor: int, path: Path) -> Path:
    """Of an open file. Systems without /proc have no isolated jobs either."""
    try:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    except FileNotFoundError:
        return Path(os.path.realpath(path))


def _regular(descriptor: int, limit: int) -> os.stat_result:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
        raise OSError(errno.EINVAL, f"not a regular file of at most {limit} bytes")
    return status


def _readable_by(user: tuple[int, int], status: os.stat_result, real: Path) -> bool:
    return _permits(user, status, stat.S_IROTH) and all(
        _permits(user, os.stat(folder), stat.S_IXOTH) for folder in real.parents
    )


def _permits(user: tuple[int, int], status: os.stat_result, bit: int) -> bool:
    """`bit` is that of others; those of the group and of the owner are 3 and 6 bits higher."""
    if status.st_uid == user[0]:
        return bool(status.st_mode & bit << 6)
    if status.st_gid == user[1]:
        return bool(status.st_mode & bit << 3)
    return bool(status.st_mode & bit)
