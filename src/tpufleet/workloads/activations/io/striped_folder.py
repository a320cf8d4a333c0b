"""Datasets whose shards are divided among folders on several disks, which write and read at once.

Everything but the shards is in the first folder, with the list of the others. A shard may be in any
of them: it is looked for where it would be written, then in the others, so that disks can be added
and files moved.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import urlsplit

from tpufleet.errors import BadInput, Conflict, NotFound
from tpufleet.workloads.activations.io.shard_writer import DraftFile, MemoryFile
from tpufleet.workloads.activations.io.storage import LocalFolder, open_storage

STRIPES_FILE = "stripes.json"  # in the first folder: the id of the dataset, and the other folders
MARKER = "stripe.json"  # in each of the others: an empty mount point has none
SHARDS = "shards/"
# Of a shard. Several are written at a time, so that all disks are busy.
FILE_BYTES = 64 << 20
LOW_SPACE = 2 << 30  # a disk with less is passed over while another one has more


@dataclass(frozen=True, kw_only=True, slots=True)
class StripeStatus:
    """One of the folders of a dataset."""

    folder: Path
    missing: bool
    shards: int = 0
    bytes: int = 0
    free: int = 0


class StripedFolder(LocalFolder):
    """A folder with the records and some of the shards, and folders with the other shards."""

    file_bytes: int | None = FILE_BYTES

    def __init__(self, path: str | Path, disk: str = "auto"):
        super().__init__(path, disk)
        self._id, self.others = _read_list(self)

    @cached_property
    def _folders(self) -> list[LocalFolder]:
        """Of all disks, which have to be there."""
        for folder in self.others:
            try:
                owner = _owner(folder)
            except OSError as error:
                raise NotFound(self._lost(folder, str(error))) from error
            if owner is None:
                raise NotFound(self._lost(folder, f"no {MARKER} there"))
            if owner != self._id:
                raise Conflict(f"{folder} holds shards of another dataset than {self.url}")
        first = LocalFolder(self.path, self._disk)
        return [first, *(LocalFolder(folder, self._disk) for folder in self.others)]

    def _lost(self, folder: Path, reason: str) -> str:
        return (
            f"{folder}, which holds shards of {self.url}, is missing ({reason}); mount its disk. "
            f"If it is lost, run `tpu extract stripe {self.url} --without {folder}`, then "
            f"`tpu extract repair {self.url}`"
        )

    def new_shard(self, name: str, draft: str) -> DraftFile | MemoryFile:
        free = [shutil.disk_usage(folder.path).free for folder in self._folders]
        return self._folders[choose_folder(name, free)].new_shard(name, draft)

    def write_mode(self) -> str:
        modes = {folder.write_mode() for folder in self._folders}
        return modes.pop() if len(modes) == 1 else "mixed"

    def upload(self, draft: Path, name: str) -> None:
        if not name.startswith(SHARDS):
            super().upload(draft, name)
            return
        own = next(folder for folder in self._folders if draft.is_relative_to(folder.path))
        own.upload(draft, name)

    def delete(self, name: str) -> None:
        if not name.startswith(SHARDS):
            super().delete(name)
            return
        for folder in self._folders:
            folder.delete(name)

    def read(self, name: str) -> bytes:
        return self._holder(name).read(name) if name.startswith(SHARDS) else super().read(name)

    def read_range(self, name: str, start: int, size: int) -> bytes:
        if not name.startswith(SHARDS):
            return super().read_range(name, start, size)
        return self._holder(name).read_range(name, start, size)

    def names(self, prefix: str, start: str = "", end: str = "") -> list[str]:
        if not prefix.startswith(SHARDS):
            return super().names(prefix, start, end)
        listed = (folder.names(prefix, start, end) for folder in self._folders)
        return sorted({name for names in listed for name in names})

    def fullest_disk(self) -> Path:
        return min(
            (folder.path for folder in self._folders), key=lambda path: shutil.disk_usage(path).free
        )

    def _existing(self, name: str) -> Path:
        return (
            self._holder(name).path / name if name.startswith(SHARDS) else super()._existing(name)
        )

    def _holder(self, name: str) -> LocalFolder:
        first = folder_number(name, len(self._folders))
        for folder in (*self._folders[first:], *self._folders[:first]):
            if (folder.path / name).exists():
                return folder
        raise NotFound(f"{name} is in none of the {len(self._folders)} folders of {self.url}")


def local_folder(url: str) -> LocalFolder:
    """The folder of a dataset, which may have others. Buckets have none."""
    bucket = urlsplit(url).scheme not in ("", "file")
    storage = None if bucket else open_storage(url)
    if not isinstance(storage, LocalFolder):
        raise BadInput(f"{url} is in a bucket, whose shards are on no disks; expected a folder")
    return storage


def stripes(out: LocalFolder) -> list[StripeStatus]:
    """What is in each folder of a dataset, also of disks that are missing."""
    if not is_striped(out):
        return [_status(out.path)]
    dataset, others = _read_list(out)
    return [_status(out.path), *(_status(folder, dataset) for folder in others)]


def folder_number(name: str, count: int) -> int:
    """Round-robin: shards of one unit are on different disks, and so are first ones of units."""
    unit, _, *rest = [int(number) for number in re.findall(r"\d+", name)] or [0, 0]
    return (unit + sum(rest)) % count


def choose_folder(name: str, free: Sequence[int]) -> int:
    """The folder for a new shard. `free` are the free bytes of each."""
    first = folder_number(name, len(free))
    order = (*range(first, len(free)), *range(first))
    return next((number for number in order if free[number] >= LOW_SPACE), first)


def is_striped(folder: LocalFolder) -> bool:
    return (folder.path / STRIPES_FILE).exists()


def set_folders(out: LocalFolder, folders: Sequence[str | Path]) -> StripedFolder:
    """Divide the shards of a dataset among its own folder and these. Shards that are stored stay
    where they are, so a folder that holds some can only be left out once its disk is lost."""
    wanted, dataset = check_folders(out, folders)
    for folder in wanted:
        if _owner(folder) != dataset:
            marker = {"dataset": dataset, "of": out.url}
            LocalFolder(folder).replace(MARKER, json.dumps(marker).encode())
    body = {"dataset": dataset, "folders": [str(folder) for folder in wanted]}
    out.replace(STRIPES_FILE, json.dumps(body, indent=2).encode())
    return StripedFolder(out.path)


def leave_out(out: LocalFolder, folders: Sequence[str | Path]) -> StripedFolder:
    """Use the folders of a dataset but these, whose disks are lost or whose shards were moved."""
    others = _read_list(out)[1] if is_striped(out) else []
    unwanted = [Path(folder).absolute() for folder in folders]
    for folder in unwanted:
        if folder not in others:
            raise BadInput(
                f"{folder} is not one of the folders of {out.url}; "
                f"`tpu extract stripe {out.url}` shows them"
            )
    return set_folders(out, [folder for folder in others if folder not in unwanted])


def check_folders(out: LocalFolder, folders: Sequence[str | Path]) -> tuple[list[Path], str]:
    """The folders as absolute paths and the id of the dataset, or an error if they cannot be
    used."""
    wanted = [Path(folder).absolute() for folder in folders]
    if len({out.path, *wanted}) <= len(wanted):
        raise BadInput("each folder of a dataset has to be named once, without OUT itself")
    for folder in wanted:
        if folder.is_relative_to(out.path) or out.path.is_relative_to(folder):
            raise BadInput(f"{folder} and {out.path} have to be separate folders, on two disks")
    dataset, before = _read_list(out) if is_striped(out) else (uuid.uuid4().hex, [])
    for folder in before:
        status = _status(folder, dataset)
        if folder not in wanted and status.shards:
            raise Conflict(
                f"{folder} holds {status.shards:,} shards of {out.url}; move them first, such as "
                f"with `mv {folder}/shards/* {out.path}/shards/`"
            )
    for folder in wanted:
        if _owner(folder) not in (None, dataset) and not _is_unused(folder, out):
            raise Conflict(f"{folder} holds shards of another dataset; choose another folder")
    return wanted, dataset


def _read_list(out: LocalFolder) -> tuple[str, list[Path]]:
    try:
        body = json.loads((out.path / STRIPES_FILE).read_bytes())
        return body["dataset"], [Path(folder) for folder in body["folders"]]
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{out.path / STRIPES_FILE} cannot be read: {error}") from error


def _is_unused(folder: Path, out: LocalFolder) -> bool:
    """Whether a marked folder is that of an earlier call which could not write the list."""
    marker = json.loads((folder / MARKER).read_bytes())
    return marker.get("of") == out.url and not any(folder.glob(f"{SHARDS}*"))


def _owner(folder: Path) -> str | None:
    """The id of the dataset that a folder belongs to, or None."""
    try:
        return json.loads((folder / MARKER).read_bytes())["dataset"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{folder / MARKER} cannot be read: {error}") from error


def _status(folder: Path, dataset: str | None = None) -> StripeStatus:
    """`dataset` None: of the folder with the records."""
    try:
        missing = dataset is not None and _owner(folder) != dataset
    except OSError:  # its disk cannot be read
        missing = True
    if missing:
        return StripeStatus(folder=folder, missing=True)
    sizes = []
    if (folder / SHARDS).is_dir():
        with os.scandir(folder / SHARDS) as entries:
            sizes = [entry.stat().st_size for entry in entries if entry.is_file()]
    return StripeStatus(
        folder=folder,
        missing=False,
        shards=len(sizes),
        bytes=sum(sizes),
        free=shutil.disk_usage(folder).free,
    )
