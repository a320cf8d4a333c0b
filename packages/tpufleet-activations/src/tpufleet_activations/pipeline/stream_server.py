"""The extractor's side of streams: units are run when readers ask for them, and nothing is stored.

A reader that is slow holds the pipeline back: rows are sent by the thread that would write them.
Readers of one extractor therefore advance together.
"""

from __future__ import annotations

import hmac
import logging
import mmap
import os
import queue
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from tpufleet.runtime.units import Claim
from tpufleet_activations import plans
from tpufleet_activations.io import dtypes, shards
from tpufleet_activations.io.unit_writer import StoredSample
from tpufleet_activations.pipeline.gangs import Outcome, ShardFiles
from tpufleet_activations.streams import addresses, protocol
from tpufleet_activations.streams.live_rows import SAMPLES

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
SLOTS = 4  # frames in shared memory that the reader has not copied yet
MOST_READERS = 256  # connections, also of those that have not shown their token


class StreamServer:
    """Takes the place of a coordinator: units come from readers instead of the storage."""

    part, parts = 0, 1

    def __init__(
        self,
        address: addresses.Address,
        credentials: addresses.Credentials | None,
        plan: plans.ExtractionPlan,
        should_stop: Callable[[], bool],
    ):
        self._plan, self._should_stop = plan, should_stop
        self._token = credentials.token() if credentials else ""
        self._context = credentials.server_context() if credentials else None
        self._path = address.path
        self._listener = addresses.listen(address)
        self.port = 0 if address.path else self._listener.getsockname()[1]
        self._requests: queue.SimpleQueue[tuple[_Reader, protocol.Request]] = queue.SimpleQueue()
        self._claimed: dict[int, tuple[_Reader, protocol.Request]] = {}
        self._readers: set[_Reader] = set()
        self._done: set[int] = set()  # ranks that have all their rows
        self._world_size = 0
        self._lock = threading.Lock()
        self._places = threading.Semaphore(MOST_READERS)
        threading.Thread(target=self._accept, name="stream-accept", daemon=True).start()

    def claims(self) -> Iterator[Claim | None]:
        """Units that readers ask for, until each rank has its rows. None: nobody does now."""
        number = 0
        while not self._should_stop() and not self._all_done():
            try:
                reader, request = self._requests.get(timeout=POLL_SECONDS)
            except queue.Empty:
                yield None
                continue
            if reader.lost:
                continue
            number += 1
            self._claimed[number] = reader, request
            yield Claim(unit=request.unit, token=number, worker="", nonce=str(number), at=0.0)

    def should_stop(self) -> bool:
        return self._should_stop()

    def commit(self, claim: Claim, files: ShardFiles, outcome: Outcome) -> None:
        """The reader has been told that the unit is complete."""

    def open_writer(self, claim: Claim, samples: Sequence[StoredSample]) -> StreamWriter:
        reader, request = self._claimed.pop(claim.token)
        return StreamWriter(reader, request, samples)

    def close(self) -> None:
        with suppress(OSError):  # not on every system
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes up the thread that accepts
        self._listener.close()
        if self._path:
            Path(self._path).unlink(missing_ok=True)
        with self._lock:
            readers = list(self._readers)
        for reader in readers:
            reader.close()

    def _all_done(self) -> bool:
        with self._lock:
            return 0 < self._world_size <= len(self._done)

    def _accept(self) -> None:
        while True:
            try:
                opened, _ = self._listener.accept()
            except OSError:
                return  # closed
            if not self._places.acquire(blocking=False):
                opened.close()
                continue
            threading.Thread(
                target=self._serve, args=(opened,), name="stream-reader", daemon=True
            ).start()

    def _serve(self, opened: socket.socket) -> None:
        reader: _Reader | None = None
        try:
            protocol.keep_alive(opened)
            opened.settimeout(addresses.HANDSHAKE_SECONDS)
            if self._context is not None:
                opened = self._context.wrap_socket(opened, server_side=True)
            reader = self._welcome(opened)
            if reader is not None:
                opened.settimeout(None)
                self._receive(reader)
        except (OSError, ssl.SSLError) as error:
            log.info("a reader of the stream is gone: %s", error)
        finally:
            if reader is not None:
                reader.close()
                with self._lock:
                    self._readers.discard(reader)
            opened.close()
            self._places.release()

    def _welcome(self, opened: socket.socket) -> _Reader | None:
        """None if it was refused."""
        hello = protocol.receive(opened, protocol.MOST_FIRST_HEADER).message
        if not isinstance(hello, protocol.Hello):
            raise protocol.BrokenFrame(hello)
        shared = hello.shared_memory and bool(self._path)
        if (refused := self._refusal(hello)) is not None:
            if shared:
                opened.sendall(b"\0")
            protocol.send(opened, refused)
            return None
        reader = _Reader(opened, self._plan, hello.sites, shared)
        with self._lock:
            self._readers.add(reader)
            self._world_size = hello.world_size
            self._done.discard(hello.rank)
            reader.rank = hello.rank
        return reader

    def _refusal(self, hello: protocol.Hello) -> protocol.Refused | None:
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            return protocol.Refused(reason="the extractor has another token", unauthorized=True)
        if hello.version != protocol.VERSION:
            return protocol.Refused(
                reason=f"the extractor speaks version {protocol.VERSION} of streams, not "
                f"{hello.version}; install the same version of tpufleet on both machines"
            )
        absent = [site for site in hello.sites if site not in self._plan.sites]
        if absent:
            stored = ", ".join(self._plan.sites)
            return protocol.Refused(reason=f"site {absent[0]} is not in the plan; sites: {stored}")
        return None

    def _receive(self, reader: _Reader) -> None:
        while True:
            message = protocol.receive(reader.socket, protocol.MOST_FIRST_HEADER).message
            if isinstance(message, protocol.Free) and 0 <= message.slot < SLOTS:
                reader.freed(message.slot)
            elif isinstance(message, protocol.Done):
                with self._lock:
                    self._done.add(reader.rank)
                return
            elif isinstance(message, protocol.Request) and reader.may_ask(message, self._plan):
                self._requests.put((reader, message))
            else:
                raise protocol.BrokenFrame(message)


class _Reader:
    """A connection that was welcomed. Several threads send on it, each whole messages."""

    def __init__(
        self,
        opened: socket.socket,
        plan: plans.ExtractionPlan,
        sites: tuple[str, ...],
        shared: bool,
    ):
        self.socket, self.sites, self.rank = opened, sites, 0
        self.lost = False
        self.tensors: tuple[tuple[str, str, int], ...] = (
            (SAMPLES, "I64", 0),
            (shards.TOKENS, "I32", 0),
            (shards.POSITIONS, "I32", 0),
            *((site, dtypes.site_dtype(site, plan.dtype), plan.widths[site]) for site in sites),
        )
        row = protocol.Rows(unit=0, row=0, count=1, tensors=self.tensors)
        self.rows_per_frame = protocol.rows_per_frame(row.size)
        self._slot_bytes = protocol.slot_bytes(row.size)
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._outstanding = 0
        self._lock, self._counting = threading.Lock(), threading.Lock()
        self._memory = self._share() if shared else None
        slots = SLOTS if self._memory is not None else 0
        welcome = protocol.Welcome(plan=plan.to_json(), slots=slots, slot_bytes=self._slot_bytes)
        protocol.send(opened, welcome)

    def _share(self) -> mmap.mmap | None:
        """Memory that the reader maps too, and that is gone with the processes; None where the
        system has no such memory."""
        create = getattr(os, "memfd_create", None)
        if create is None:
            self.socket.sendall(b"\0")
            return None
        descriptor = create("tpufleet-stream")
        try:
            os.ftruncate(descriptor, SLOTS * self._slot_bytes)
            memory = mmap.mmap(descriptor, SLOTS * self._slot_bytes)
            socket.send_fds(self.socket, [b"\0"], [descriptor])
        finally:
            os.close(descriptor)
        for slot in range(SLOTS):
            self._free.put(slot)
        return memory

    def may_ask(self, request: protocol.Request, plan: plans.ExtractionPlan) -> bool:
        with self._counting:
            self._outstanding += 1
            few = self._outstanding <= 2 * protocol.WINDOW
        return few and 0 <= request.unit < plan.units and request.row >= 0

    def freed(self, slot: int) -> None:
        self._free.put(slot)

    def send_rows(self, unit: int, row: int, tensors: Mapping[str, Sequence[np.ndarray]]) -> None:
        """Waits while the reader is slow. Nothing is sent to one that is gone."""
        count = sum(map(len, tensors[SAMPLES]))
        message = protocol.Rows(unit=unit, row=row, count=count, tensors=self.tensors)
        views = [
            np.ascontiguousarray(part).reshape(-1).view(np.uint8)
            for name, _, _ in self.tensors
            for part in tensors[name]
        ]
        if self._memory is None:
            self._send(message, [view.data for view in views])
            return
        slot = self._take_slot()
        if slot is None:
            return
        at = slot * self._slot_bytes
        target = np.frombuffer(self._memory, np.uint8)
        for view in views:
            target[at : at + len(view)] = view
            at += len(view)
        self._send(protocol.Rows(**{**_fields(message), "slot": slot}))

    def send_end(self, unit: int, rows: int) -> None:
        with self._counting:
            self._outstanding -= 1
        self._send(protocol.UnitEnd(unit=unit, rows=rows))

    def close(self) -> None:
        self.lost = True
        try:
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes up a thread that sends
        except OSError:
            return  # closed already

    def _take_slot(self) -> int | None:
        while not self.lost:
            try:
                return self._free.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
        return None

    def _send(self, message: protocol.Message, views: Sequence[memoryview] = ()) -> None:
        if self.lost:
            return
        try:
            with self._lock:
                protocol.send(self.socket, message, views)
        except OSError as error:
            log.info("a reader of the stream is gone: %s", error)
            self.close()


def _fields(message: protocol.Rows) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


class StreamWriter:
    """Sends a unit to the reader that asked for it, as `UnitWriter` writes one."""

    def __init__(self, reader: _Reader, request: protocol.Request, samples: Sequence[StoredSample]):
        self._reader, self._unit, self._from = reader, request.unit, request.row
        none = np.empty(0, np.int32)
        lengths = [len(sample.tokens) for sample in samples]
        numbers = np.array([sample.sample for sample in samples], np.int64)
        self.rows = sum(lengths)
        self._labels: dict[str, np.ndarray] = {
            SAMPLES: numbers.repeat(lengths),
            shards.TOKENS: np.concatenate([none, *(s.tokens for s in samples)]).astype(np.int32),
            shards.POSITIONS: np.concatenate([none, *(s.positions for s in samples)]).astype(
                np.int32
            ),
        }
        self._arrived: Counter[str] = Counter()  # rows of each site
        self._waiting: dict[str, list[np.ndarray]] = {site: [] for site in reader.sites}
        self._sent = 0

    def append(self, site: str, *parts: np.ndarray) -> None:
        """Send the rows whose sites are all there."""
        if site not in self._waiting:
            return
        self._waiting[site] += parts
        self._arrived[site] += sum(map(len, parts))
        ready = min(self._arrived[name] for name in self._waiting)
        if ready > self._sent and all(n == ready for n in self._arrived.values()):
            self._send(ready)

    def finish(self) -> ShardFiles:
        if self._sent != self.rows:
            raise shards.wrong_rows(f"unit {self._unit}", self.rows)
        self._reader.send_end(self._unit, max(self.rows, self._from))
        return []

    def abandon(self) -> None:
        self._waiting.clear()

    def _send(self, ready: int) -> None:
        frame = self._reader.rows_per_frame
        for start in range(max(self._sent, self._from), ready, frame):
            stop = min(start + frame, ready)
            tensors = {name: [values[start:stop]] for name, values in self._labels.items()}
            for site, parts in self._waiting.items():
                tensors[site] = _slice(parts, start - self._sent, stop - self._sent)
            self._reader.send_rows(self._unit, start, tensors)
        self._sent = ready
        self._waiting = {site: [] for site in self._waiting}


def _slice(parts: Sequence[np.ndarray], start: int, stop: int) -> list[np.ndarray]:
    """Rows start … stop of the parts, one after the other."""
    ends = accumulate(map(len, parts))
    cuts = [
        part[max(start - end + len(part), 0) : max(stop - end + len(part), 0)]
        for part, end in zip(parts, ends, strict=True)
    ]
    return [cut for cut in cuts if len(cut)]
