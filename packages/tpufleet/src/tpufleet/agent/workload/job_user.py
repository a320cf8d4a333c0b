"""The user that jobs on simulated hosts of root run as, and what has to be done so that this user
can run Python where only root may enter the folders above it."""

from __future__ import annotations

import os
import pwd
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

import tpufleet

PACKAGES = Path(tpufleet.__file__).parents[1]  # the folder that tpufleet is imported from
UNPRIVILEGED_USER = "nobody"  # exists on every Linux, owns nothing, and may do nothing


class JobUser(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    uid: int
    gid: int
    covered: tuple[Path, ...] = ()  # folders that the user may not enter, as /root: replaced by …
    needed: tuple[Path, ...] = ()  # … these folders inside them, and nothing else

    @property
    def ids(self) -> tuple[int, int]:
        return self.uid, self.gid


def find_user(name: str, folders: Sequence[Path]) -> JobUser:
    """Raises ValueError when jobs cannot run as this user. They also need these `folders`, which
    will be given to them."""
    try:
        account = pwd.getpwnam(name)
    except KeyError:
        raise ValueError(f"no user named {name}") from None
    uid, gid = account.pw_uid, account.pw_gid
    required = _required_folders()
    for path in required:
        if not _may_enter(path, uid, gid):
            raise ValueError(f"{name} has no access to {path}, which Python needs")
    packages = [path for path in _package_folders() if _may_enter(path, uid, gid)]
    python = _outermost([*required, *packages, *_links_to_python()])
    covered: list[Path] = []
    for path in (*python, *(Path(os.path.realpath(folder)) for folder in folders)):
        closed = next((p for p in reversed(path.parents) if not _may_enter(p, uid, gid)), None)
        if closed is not None and closed not in covered:
            covered.append(closed)
    needed = [path for path in python if any(closed in path.parents for closed in covered)]
    return JobUser(name=name, uid=uid, gid=gid, covered=tuple(covered), needed=tuple(needed))


def python_folders() -> list[Path]:
    """What a job needs to run the Python of the agent, and to import what it can import. Links
    too."""
    return _outermost([*_required_folders(), *_package_folders(), *_links_to_python()])


def _required_folders() -> list[Path]:
    return [Path(os.path.realpath(each)) for each in (sys.prefix, sys.base_prefix, PACKAGES)]


def _package_folders() -> list[Path]:
    """Not the first of the list: it is the working directory, or that of the script."""
    names = {os.path.realpath(name) for name in sys.path[1:] if os.path.isdir(name)}
    return [Path(name) for name in names - {os.path.realpath(os.curdir)}]


def _links_to_python() -> Iterator[Path]:
    """Through which the Python of an environment is found, wherever they are."""
    folder, names = Path("/"), list(reversed(Path(sys.executable).parts[1:]))
    while names:
        path = Path(os.path.normpath(folder / names.pop()))
        if path.is_symlink():
            yield path
            names += [name for name in reversed(path.readlink().parts) if name != "/"]
            folder = Path("/") if path.readlink().is_absolute() else folder
        else:
            folder = path


def _outermost(paths: Sequence[Path]) -> list[Path]:
    """Those that do not lie in another one."""
    unique = set(paths)
    return sorted(path for path in unique if not unique.intersection(path.parents))


def _may_enter(folder: Path, uid: int, gid: int) -> bool:
    try:
        status = folder.stat()
    except FileNotFoundError:
        return True  # made later, by us
    if status.st_uid == uid:
        return bool(status.st_mode & stat.S_IXUSR)
    return bool(status.st_mode & (stat.S_IXGRP if status.st_gid == gid else stat.S_IXOTH))
