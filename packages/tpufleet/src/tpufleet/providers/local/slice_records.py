"""The state of simulated slices, as files that outlive the server.

`<root>/<slice>/slice.json` is the record; `<root>/<slice>/<host>/` holds the host's token, notice,
log and work folder. Every write is an atomic rename. Writers hold the lock of the root, against
other threads and processes.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import msgspec

from tpufleet import deep_folders
from tpufleet.model.fleet.hosts import NoticeKind
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.jobs import Capacity
from tpufleet.model.values import encoding
from tpufleet.providers.local.fault_plan import PlannedFault
from tpufleet.providers.local.processes import ProcessId

log = logging.getLogger(__name__)

# What could not be deleted: an attempt may take long, and every request waits for it.
RETRY_DELETION_SECONDS = 600.0


class SliceRecord(msgspec.Struct, frozen=True, kw_only=True):
    id: SliceId
    number: int  # the n-th slice in this root
    order: str
    accelerator: str
    zone: str
    capacity: Capacity
    server_url: str
    fleet: str
    hosts: int
    chips_per_host: int
    port: int  # coordinator port of a gang whose first slice this is
    boot_at: datetime
    job_id: str | None = None
    pool: str | None = None
    missing: tuple[int, ...] = ()  # hosts that never boot
    planned: tuple[PlannedFault, ...] = ()  # not injected yet
    booting: bool = False  # agents may run that are not recorded yet
    agents: dict[int, ProcessId] = {}
    cgroups: dict[int, str] = {}  # folder of each host's control group
    killed: tuple[int, ...] = ()  # hosts killed by a fault
    notice: NoticeKind | None = None
    taken_at: datetime | None = None  # when the notice period ends
    taken: bool = False
    failed: str = ""  # why it cannot boot; empty if it can
    released: bool = False
    swept: bool = True  # False: processes may be left that must be killed

    @property
    def booted(self) -> bool:
        return bool(self.agents) or self.over or self.hosts_to_boot == ()

    @property
    def over(self) -> bool:
        return self.taken or self.released or bool(self.failed)

    @property
    def hosts_to_boot(self) -> tuple[int, ...]:
        skipped = (*self.missing, *self.killed)
        return tuple(index for index in range(self.hosts) if index not in skipped)

    @property
    def chips(self) -> int:
        return self.hosts * self.chips_per_host

    @property
    def holds_stock(self) -> bool:
        """Until it is preempted or removed: a slice that is being released still counts."""
        return not self.taken


class RootRecord(msgspec.Struct, frozen=True, kw_only=True):
    opened_at: datetime
    next_number: int = 0


class SliceRecords:
    """The folder `root`. Reading needs no lock."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._staging = root / ".staging"  # orders being written
        self._orders = root / ".orders"  # complete orders not moved into place yet
        self._trash = root / ".trash"
        self._retry_deletion_at: dict[Path, float] = {}
        self._cache: dict[SliceId, tuple[tuple[int, int, int], SliceRecord]] = {}
        root.mkdir(parents=True, exist_ok=True, mode=0o700)

    @contextmanager
    def lock(self) -> Iterator[None]:
        with (self.root / ".lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed
            yield

    def folder(self, slice_id: SliceId, host: int | None = None) -> Path:
        folder = self.root / slice_id
        return folder if host is None else folder / str(host)

    def all(self) -> list[SliceRecord]:
        """Every slice. Pending orders are read first: a slice that is moved meanwhile is seen twice
        rather than not at all."""
        pending = [folder for order in _inside(self._orders) for folder in _inside(order)]
        folders = [*pending, *_inside(self.root)]
        records: dict[SliceId, SliceRecord] = {}
        for folder in folders:
            if not folder.name.startswith("."):
                record = self._load(folder)
                if record is not None:
                    records[record.id] = record
        self._cache = {key: value for key, value in self._cache.copy().items() if key in records}
        return sorted(records.values(), key=lambda record: record.number)

    def get(self, slice_id: SliceId) -> SliceRecord | None:
        return self._load(self.root / slice_id)

    def save(self, record: SliceRecord) -> None:
        path, content = self.folder(record.id) / "slice.json", encoding.to_json(record)
        try:
            write_atomic(path, content)
        except OSError as error:
            # In place, which takes no space: to release a slice may be what makes room.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not path.exists():
                raise
            with path.open("r+b") as file:
                file.write(content)
                file.truncate()

    def root_record(self, now: datetime) -> RootRecord:
        """The record of the root itself, created on first use."""
        try:
            return encoding.from_json((self.root / ".root.json").read_bytes(), RootRecord)
        except FileNotFoundError:
            self.save_root(RootRecord(opened_at=now))
            return RootRecord(opened_at=now)

    def save_root(self, record: RootRecord) -> None:
        write_atomic(self.root / ".root.json", encoding.to_json(record))

    def add(self, records: Sequence[SliceRecord], tokens: Mapping[SliceId, str]) -> None:
        """All slices of an order or none: it exists from a single rename on."""
        staged = self._staging / records[0].order
        deep_folders.delete(staged)  # left by a server that died while writing
        for record in records:
            for index in range(record.hosts):
                host = staged / record.id / str(index)
                (host / "work").mkdir(parents=True, mode=0o700)
                write_atomic(host / "token", tokens[record.id].encode(), mode=0o600)
            write_atomic(staged / record.id / "slice.json", encoding.to_json(record))
        self._orders.mkdir(exist_ok=True)
        staged.rename(self._orders / staged.name)
        self.recover()

    def recover(self) -> None:
        """After a crash: move complete orders into place, delete incomplete ones."""
        for order in _inside(self._orders):
            for folder in _inside(order):
                folder.rename(self.root / folder.name)
            order.rmdir()
        for leftover in (*_inside(self._staging), *_inside(self._trash)):
            self._delete(leftover)

    def remove(self, slice_id: SliceId) -> None:
        """Disappears for readers at once; deleting the files may take longer."""
        self._trash.mkdir(exist_ok=True)
        # A name of its own: an earlier slice of this id may not be deleted yet.
        trash = self._trash / f"{slice_id}.{secrets.token_hex(4)}"
        try:
            self.folder(slice_id).rename(trash)
        except FileNotFoundError:
            return
        self._delete(trash)

    def _delete(self, folder: Path) -> None:
        """Jobs wrote to it. One that cannot be deleted must not keep the other slices waiting."""
        if time.monotonic() < self._retry_deletion_at.get(folder, 0.0):
            return
        try:
            deep_folders.delete(folder)
            self._retry_deletion_at.pop(folder, None)
        except OSError as error:
            self._retry_deletion_at[folder] = time.monotonic() + RETRY_DELETION_SECONDS
            log.warning("cannot delete %s; retrying in ten minutes: %s", folder, error)

    def _load(self, folder: Path) -> SliceRecord | None:
        path = folder / "slice.json"
        try:
            stat = path.stat()
            version = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            cached = self._cache.get(SliceId(folder.name))
            if cached is not None and cached[0] == version:
                return cached[1]
            record = encoding.from_json(path.read_bytes(), SliceRecord)
        except (FileNotFoundError, NotADirectoryError):
            return None
        self._cache[record.id] = (version, record)
        return record


def _inside(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []  # never created, or moved meanwhile


def write_atomic(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Atomically, and never readable by others."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    temporary.rename(path)
