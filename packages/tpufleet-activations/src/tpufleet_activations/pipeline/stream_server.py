"""The extractor's side of streams: units are run when readers ask for them, and nothing is stored.

A reader that is slow holds the pipeline back: the thread that would write rows waits for room in
its queue. Only while another reader has none, which may come after these, more rows are queued:
ranks that train together take a step when each has its batch.
"""

from __future__ import annotations

import hmac
import logging
import mmap
import os
import selectors
import socket
import ssl
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from tpufleet.backoff import Backoff
from tpufleet.errors import unexpected
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
QUEUED_BYTES = 2 * protocol.FRAME_BYTES  # for a reader, before the pipeline waits
MOST_READERS = 256  # connections, also of those that have not shown their token
# Without a reader, the extractor ends: a trainer that stopped early, or before the extractor was
# started again, does not come back. Long enough for one that is started again.
IDLE_SECONDS = 1800.0


class StreamServer:
    """Takes the place of a coordinator: units come from readers instead of the storage."""

    part, parts = 0, 1

    def __init__(
        self,
        address: addresses.Address,
        credentials: addresses.Credentials | None,
        plan: plans.ExtractionPlan,
        should_stop: Callable[[], bool],
        *,
        idle_seconds: float = IDLE_SECONDS,
    ):
        self._plan, self._should_stop, self._idle = plan, should_stop, idle_seconds
        self._token = credentials.token() if credentials else ""
        self._context = credentials.server_context() if credentials else None
        self._path = address.path
        self._listener = addresses.listen(address)
        self.port = 0 if address.path else self._listener.getsockname()[1]
        self._changed = threading.Condition()
        self._claimed: dict[int, tuple[_Reader, protocol.Request]] = {}
        self._readers: dict[_Reader, None] = {}  # the one whose unit was claimed last is the last
        self._alone_since = time.monotonic()
        self._done: set[tuple[int, int]] = set()  # rank and world size of those with all their rows
        self._world_sizes: set[int] = set()
        self._places = threading.Semaphore(MOST_READERS)
        self._closed = threading.Event()
        threading.Thread(target=self._accept, name="stream-accept", daemon=True).start()

    def claims(self) -> Iterator[Claim | None]:
        """Units that readers ask for, each in turn, until every rank has its rows. None: no
        reader asks now."""
        number = 0
        while not self._should_stop():
            claim = None
            with self._changed:
                reader = self._changed.wait_for(self._next_reader, POLL_SECONDS)
                if reader is not None:
                    self._readers[reader] = self._readers.pop(reader)
                    number += 1
                    request = reader.requests.popleft()
                    self._claimed[number] = reader, request
                    nonce = str(number)
                    claim = Claim(unit=request.unit, token=number, worker="", nonce=nonce, at=0.0)
                elif self._ended():
                    return
            yield claim

    def should_stop(self) -> bool:
        return self._should_stop()

    def commit(self, claim: Claim, files: ShardFiles, outcome: Outcome) -> None:
        """The reader has been told that the unit is complete."""

    def open_writer(self, claim: Claim, samples: Sequence[StoredSample]) -> StreamWriter:
        reader, request = self._claimed.pop(claim.token)
        return StreamWriter(reader, request, samples, partial(self._put, reader))

    def close(self) -> None:
        self._closed.set()
        with suppress(OSError):  # not on every system
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes up the thread that accepts
        self._listener.close()
        if self._path:
            Path(self._path).unlink(missing_ok=True)
        with self._changed:
            for reader in self._readers:
                reader.close()

    def _next_reader(self) -> _Reader | None:
        return next((reader for reader in self._readers if reader.requests), None)

    def _ended(self) -> bool:
        if self._readers:
            return False
        done = Counter(size for _, size in self._done)
        if self._world_sizes and all(done[size] >= size for size in self._world_sizes):
            return True
        if time.monotonic() - self._alone_since < self._idle:
            return False
        log.warning("no reader for %.0f min; for more rows, start it again", self._idle / 60)
        return True

    def _put(self, reader: _Reader, message: protocol.Message, parts: Sequence[np.ndarray]) -> None:
        """Waits while the reader is slow. Nothing is sent to one that is gone."""
        with self._changed:
            while not self._changed.wait_for(partial(self._has_room, reader), POLL_SECONDS):
                pass
            reader.put(message, parts)

    def _has_room(self, reader: _Reader) -> bool:
        room = reader.lost or reader.queued < QUEUED_BYTES or self._should_stop()
        return room or any(other.lacks_rows for other in self._readers)

    def _accept(self) -> None:
        backoff = Backoff(first=POLL_SECONDS, longest=5.0)
        while not self._closed.is_set():
            try:
                opened, _ = self._listener.accept()
            except OSError as error:  # such as too many open files
                if not self._closed.is_set():
                    log.warning("%s: %s", unexpected("accepting readers"), error)
                    self._closed.wait(backoff.failed())
                continue
            backoff.succeeded()
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
                self._exchange(reader)
        except (OSError, ssl.SSLError) as error:
            log.info("a reader of the stream is gone: %s", error)
        finally:
            if reader is not None:
                with self._changed:
                    reader.drop()
                    self._readers.pop(reader, None)
                    self._alone_since = time.monotonic()
                    self._changed.notify_all()
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
        if not hello.sites or not 0 <= hello.rank < hello.world_size:
            raise protocol.BrokenFrame((hello.sites, hello.rank, hello.world_size))
        reader = _Reader(opened, self._plan, hello.sites, shared)
        with self._changed:
            if not self._readers and hello.world_size not in self._world_sizes:
                self._world_sizes.clear()  # of a training that goes on with other ranks
            self._readers[reader] = None
            self._world_sizes.add(hello.world_size)
            self._done.discard((hello.rank, hello.world_size))
        reader.rank = hello.rank, hello.world_size
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

    def _exchange(self, reader: _Reader) -> None:
        """Until the reader has all its rows. One thread receives and sends: a TLS connection may
        not be used by two."""
        while True:
            with self._changed:
                frame = reader.next_frame()
            if reader.has_sent(wait=frame is None):
                message = protocol.receive(reader.socket, protocol.MOST_FIRST_HEADER).message
                with self._changed:
                    if isinstance(message, protocol.Done):
                        self._done.add(reader.rank)
                        return
                    reader.take(message, self._plan)
                    self._changed.notify_all()
            elif frame is not None:
                reader.send(frame)
                with self._changed:
                    reader.sent()
                    self._changed.notify_all()


class _Frame(NamedTuple):
    message: protocol.Message
    views: list[np.ndarray]  # bytes

    @property
    def size(self) -> int:
        return sum(map(len, self.views))


class _Reader:
    """A connection that was welcomed, and what is to be sent on it."""

    def __init__(
        self,
        opened: socket.socket,
        plan: plans.ExtractionPlan,
        sites: tuple[str, ...],
        shared: bool,
    ):
        self.socket, self.sites, self.rank = opened, sites, (0, 1)
        self.requests: deque[protocol.Request] = deque()
        self.queued = 0  # bytes
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
        self._free: list[int] = []
        self._frames: deque[_Frame] = deque()
        self._outstanding = 0  # units that were asked for and are not complete
        self._memory = self._share() if shared else None
        slots = SLOTS if self._memory is not None else 0
        welcome = protocol.Welcome(plan=plan.to_json(), slots=slots, slot_bytes=self._slot_bytes)
        protocol.send(opened, welcome)
        self._waker, self._woken = socket.socketpair()
        self._ready = selectors.DefaultSelector()
        for each in (opened, self._woken):
            self._ready.register(each, selectors.EVENT_READ)

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
        self._free += range(SLOTS)
        return memory

    @property
    def lacks_rows(self) -> bool:
        return bool(self._outstanding) and not self._frames

    def take(self, message: protocol.Message, plan: plans.ExtractionPlan) -> None:
        if isinstance(message, protocol.Free) and 0 <= message.slot < SLOTS:
            self._free.append(message.slot)
        elif (
            isinstance(message, protocol.Request)
            and self._outstanding < 2 * protocol.WINDOW
            and 0 <= message.unit < plan.units
            and message.row >= 0
        ):
            self._outstanding += 1
            self.requests.append(message)
        else:
            raise protocol.BrokenFrame(message)

    def put(self, message: protocol.Message, parts: Sequence[np.ndarray]) -> None:
        if self.lost:
            return
        if isinstance(message, protocol.UnitEnd):
            self._outstanding -= 1
        if not self._frames:
            self._waker.send(b"\0")
        views = [np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts]
        self._frames.append(_Frame(message, views))
        self.queued += self._frames[-1].size

    def next_frame(self) -> _Frame | None:
        """None also while the reader has not copied the slots."""
        if not self._frames or (self._memory and not self._free and self._frames[0].views):
            return None
        return self._frames[0]

    def has_sent(self, *, wait: bool) -> bool:
        """A message, or its connection was closed. `wait` also ends when there is a frame."""
        if isinstance(self.socket, ssl.SSLSocket) and self.socket.pending():
            return True
        ready = {key.fileobj for key, _ in self._ready.select(None if wait else 0)}
        if self._woken in ready:
            self._woken.recv(64)
        return self.socket in ready

    def send(self, frame: _Frame) -> None:
        message, views = frame
        if self._memory is None or not isinstance(message, protocol.Rows):
            protocol.send(self.socket, message, [view.data for view in views])
            return
        slot = self._free.pop()
        at = slot * self._slot_bytes
        target = np.frombuffer(self._memory, np.uint8)
        for view in views:
            target[at : at + len(view)] = view
            at += len(view)
        protocol.send(self.socket, msgspec.structs.replace(message, slot=slot))

    def sent(self) -> None:
        self.queued -= self._frames.popleft().size

    def close(self) -> None:
        protocol.shut_down(self.socket)  # wakes up its thread

    def drop(self) -> None:
        """By its thread, which ends."""
        self.lost = True
        self._frames.clear()
        self._ready.close()
        self._waker.close()
        self._woken.close()


class StreamWriter:
    """Sends a unit to the reader that asked for it, as `UnitWriter` writes one."""

    def __init__(
        self,
        reader: _Reader,
        request: protocol.Request,
        samples: Sequence[StoredSample],
        put: Callable[[protocol.Message, Sequence[np.ndarray]], None],
    ):
        self._reader, self._put = reader, put
        self._unit, self._from = request.unit, request.row
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
        self._put(protocol.UnitEnd(unit=self._unit, rows=max(self.rows, self._from)), [])
        return []

    def abandon(self) -> None:
        self._waiting.clear()

    def _send(self, ready: int) -> None:
        frame = self._reader.rows_per_frame
        for start in range(max(self._sent, self._from), ready, frame):
            stop = min(start + frame, ready)
            parts = [values[start:stop] for values in self._labels.values()]
            for waiting in self._waiting.values():
                parts += _slice(waiting, start - self._sent, stop - self._sent)
            tensors = self._reader.tensors
            rows = protocol.Rows(unit=self._unit, row=start, count=stop - start, tensors=tensors)
            self._put(rows, parts)
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
