"""The rows of units that an extractor computes on request, in the order of the request.

A thread receives them ahead, up to a limit. While the extractor is away it tries to connect again,
and asks for what it has not received yet.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tpufleet.backoff import Backoff
from tpufleet.errors import (
    FleetError,
    NoAnswer,
    NotFound,
    Unauthorized,
    UntrustedCertificate,
)
from tpufleet_activations import plans
from tpufleet_activations.io import shards
from tpufleet_activations.io.aligned_memory import MemoryPool
from tpufleet_activations.io.dataset_reader import RowSpan
from tpufleet_activations.streams import addresses, protocol

log = logging.getLogger(__name__)

FIRST_RETRY, LONGEST_RETRY = 0.1, 5.0
PATIENT_FAILURES = 5  # until it is said that nobody answers
MOST_BROKEN = 5
DONE_SECONDS = 30.0  # for an extractor that was started again to come back
SAMPLES = "samples"  # the sample of each row


@dataclass(frozen=True)
class Chunk:
    """Rows of a unit that arrived together."""

    row: int
    tensors: dict[str, np.ndarray]
    count: int


@dataclass
class _Unit:
    """A unit that the extractor was asked for."""

    received: int  # its rows up to this one
    chunks: deque[Chunk] = field(default_factory=deque)  # not used yet
    complete: bool = False


@dataclass
class _Connection:
    socket: socket.socket
    memory: mmap.mmap | None = None
    slot_bytes: int = 0

    def close(self) -> None:
        self.socket.close()


class LiveRows:
    """What `shuffling.RowReader` reads from, like a dataset. Chunks stand for files, and are freed
    when nobody refers to them."""

    def __init__(
        self,
        address: str,
        sites: Sequence[str],
        *,
        credentials: str | None = None,
        rank: int = 0,
        world_size: int = 1,
        patience: float = 600.0,
    ):
        """`patience`: seconds without an extractor until that is an error."""
        self._address = addresses.parse(address)
        self._credentials = addresses.needed(self._address, credentials)
        token = self._credentials.token() if self._credentials else ""
        self._hello = protocol.Hello(
            version=protocol.VERSION,
            token=token,
            sites=tuple(sites),
            rank=rank,
            world_size=world_size,
            shared_memory=bool(self._address.path),
        )
        self._patience = patience
        self.memory = MemoryPool()
        self._changed = threading.Condition()
        self._order: list[int] = []
        self._first_row = 0
        self._begun = 0  # units of the order that were asked for
        self._units: dict[int, _Unit] = {}
        self._head: int | None = None  # the unit whose rows are being used
        self._waiting = self._closed = False
        self._bytes, self._most_bytes = 0, 0  # received and not used yet
        self._error: BaseException | None = None
        self._backoff = Backoff(first=FIRST_RETRY, longest=LONGEST_RETRY)
        self._broken = 0  # connections in a row that ended with a broken frame
        self._thread: threading.Thread | None = None
        self._plan: plans.ExtractionPlan | None = None
        self._connection: _Connection | None = self._connect()

    @property
    def plan(self) -> plans.ExtractionPlan:
        assert self._plan is not None  # there was a connection
        return self._plan

    @property
    def sites(self) -> tuple[str, ...]:
        return self.plan.sites

    def start(self, order: Sequence[int], first_row: int, most_bytes: int) -> None:
        """Receive these units, the first from a row on, up to so many bytes ahead."""
        self._order, self._first_row, self._most_bytes = list(order), first_row, most_bytes
        self._thread = threading.Thread(target=self._run, name="stream-reader", daemon=True)
        self._thread.start()

    def unit_blocks(self, unit: int, start: int, height: int) -> Iterator[RowSpan]:
        """Waits for the rows. Units in the order of `start`."""
        while (chunk := self._next_chunk(unit)) is not None:
            for first in range(0, chunk.count, height):
                yield RowSpan(unit, chunk, first, min(first + height, chunk.count))

    def rows(self, unit: int, file: Chunk, name: str, start: int, stop: int) -> np.ndarray:
        return file.tensors[name][start:stop]

    def row_samples(self, unit: int, file: Chunk, start: int, stop: int) -> np.ndarray:
        return file.tensors[SAMPLES][start:stop]

    def read_rows_to(self, unit: int, file: Any, site: str, start: int, rows: np.ndarray) -> bool:
        return False

    def close(self) -> None:
        """If all rows were received, the extractor is told so first."""
        if self._thread is not None and self._complete():
            self._thread.join(DONE_SECONDS)
        with self._changed:
            self._closed = True
            connection = self._connection
            self._changed.notify_all()
        if connection is not None:
            # Wakes up a thread that reads from it, which closes it.
            protocol.shut_down(connection.socket)
            if self._thread is None:
                connection.close()
        if self._thread is not None:
            self._thread.join()

    def _next_chunk(self, unit: int) -> Chunk | None:
        """None: the unit has no more rows."""
        with self._changed:
            self._head = unit
            while True:
                own = self._units.get(unit)
                if own is not None and own.chunks:
                    chunk = own.chunks.popleft()
                    self._bytes -= _size(chunk)
                    self._changed.notify_all()
                    return chunk
                if own is not None and own.complete:
                    del self._units[unit]
                    self._changed.notify_all()
                    return None
                if self._error is not None:
                    raise self._error
                self._waiting = True
                self._changed.notify_all()
                self._changed.wait()
                self._waiting = False

    def _run(self) -> None:
        """Receive until all units are complete, over as many connections as it takes."""
        try:
            while not self._closed:
                try:
                    self._connection = self._connection or self._connect()
                    self._receive_all(self._connection)
                    return
                except OSError as error:
                    if self._connection is not None:
                        self._connection.close()
                        self._connection = None
                    self._broken += isinstance(error, protocol.BrokenFrame)
                    if self._broken > MOST_BROKEN:
                        raise
        except BaseException as error:
            with self._changed:
                self._error = error
        finally:
            if self._connection is not None:
                self._connection.close()
            with self._changed:
                self._error = self._error or protocol.Closed()
                self._changed.notify_all()

    def _receive_all(self, connection: _Connection) -> None:
        with self._changed:
            wanted = [unit for unit, own in self._units.items() if not own.complete]
        for unit in wanted:
            self._ask(connection, unit)
        while True:
            self._ask_ahead(connection)
            with self._changed:
                self._changed.wait_for(self._may_receive)
                if self._closed or self._complete():
                    break
                if all(own.complete for own in self._units.values()):
                    continue  # one was used up, so that the next one can be asked for
            self._take(connection, protocol.receive(connection.socket))
        if self._complete():
            protocol.send(connection.socket, protocol.Done())

    def _complete(self) -> bool:
        return self._begun == len(self._order) and all(o.complete for o in self._units.values())

    def _may_receive(self) -> bool:
        """Beyond the limit, only while the rows that are used next are missing."""
        own = None if self._head is None else self._units.get(self._head)
        missing = self._waiting and not (own is not None and (own.chunks or own.complete))
        room = self._bytes < self._most_bytes or missing
        asked = any(not own.complete for own in self._units.values())
        more = len(self._units) < protocol.WINDOW and self._begun < len(self._order)
        return self._closed or self._complete() or (room and (asked or more))

    def _ask_ahead(self, connection: _Connection) -> None:
        while self._begun < len(self._order):
            with self._changed:
                if len(self._units) >= protocol.WINDOW:
                    return
                unit = self._order[self._begun]
                self._units[unit] = _Unit(0 if self._begun else self._first_row)
                self._begun += 1
            self._ask(connection, unit)

    def _ask(self, connection: _Connection, unit: int) -> None:
        request = protocol.Request(unit=unit, row=self._units[unit].received)
        protocol.send(connection.socket, request)

    def _take(self, connection: _Connection, received: protocol.Received) -> None:
        message, data = received
        if isinstance(message, protocol.Refused):
            raise _refusal(message)
        if not isinstance(message, protocol.Rows | protocol.UnitEnd):
            raise protocol.BrokenFrame(message)
        self._backoff.succeeded()
        self._broken = 0
        own = self._units.get(message.unit)
        expected = None if own is None or own.complete else own.received
        first = message.row if isinstance(message, protocol.Rows) else message.rows
        if own is None or first != expected:
            raise protocol.BrokenFrame(message)
        if isinstance(message, protocol.UnitEnd):
            with self._changed:
                own.complete = True
                self._changed.notify_all()
            return
        if data is None:
            data = self._copy_slot(connection, message)
        chunk = Chunk(message.row, message.unpack(data), message.count)
        if not {*self._hello.sites, SAMPLES, shards.TOKENS, shards.POSITIONS} <= set(chunk.tensors):
            raise protocol.BrokenFrame(message)
        with self._changed:
            own.chunks.append(chunk)
            own.received += message.count
            self._bytes += _size(chunk)
            self._changed.notify_all()

    def _copy_slot(self, connection: _Connection, message: protocol.Rows) -> np.ndarray:
        start = message.slot * connection.slot_bytes
        memory = connection.memory
        if memory is None or message.size > connection.slot_bytes or start >= len(memory):
            raise protocol.BrokenFrame(message)
        data = np.frombuffer(memory, np.uint8, message.size, start).copy()
        protocol.send(connection.socket, protocol.Free(slot=message.slot))
        return data

    def _connect(self) -> _Connection:
        """Wait for an extractor: it may be starting, or be started again."""
        until = time.monotonic() + self._patience
        while True:
            try:
                return self._connect_once()
            except OSError as error:
                left = until - time.monotonic()
                if left <= 0 or self._closed:
                    raise self._no_answer(error) from error
                if self._backoff.failures == PATIENT_FAILURES:
                    log.warning("%s; trying for %.0f s", self._no_answer(error), left)
                with self._changed:
                    delay = min(self._backoff.failed(), left)
                    self._changed.wait_for(lambda: self._closed, delay)

    def _connect_once(self) -> _Connection:
        try:
            opened = addresses.connect(self._address, self._credentials)
        except ssl.SSLCertVerificationError as error:
            raise UntrustedCertificate(
                f"{self._address} has another certificate than the credentials: "
                f"{error.verify_message}; copy cert.pem of the extractor"
            ) from error
        try:
            protocol.keep_alive(opened)
            opened.settimeout(addresses.HANDSHAKE_SECONDS)
            protocol.send(opened, self._hello)
            descriptors: list[int] = []
            if self._hello.shared_memory:
                answer, descriptors, _, _ = socket.recv_fds(opened, 1, 1)
                if not answer:
                    raise protocol.Closed
            welcome = protocol.receive(opened).message
            if isinstance(welcome, protocol.Refused):
                raise _refusal(welcome)
            if not isinstance(welcome, protocol.Welcome):
                raise protocol.BrokenFrame(welcome)
            opened.settimeout(None)
            self._use_plan(plans.from_json(welcome.plan))
            return _Connection(opened, _map(descriptors, welcome), welcome.slot_bytes)
        except BaseException:
            opened.close()
            raise

    def _use_plan(self, plan: plans.ExtractionPlan) -> None:
        if self._plan is not None and self._plan.identity != plan.identity:
            changes = "; ".join(plans.differences(self._plan, plan))
            raise plans.other_dataset(self._address, changes)
        self._plan = plan

    def _no_answer(self, error: object) -> NoAnswer:
        return NoAnswer(
            f"no extractor answers at {self._address}: {error}\n"
            f"  next: start it with `tpu extract run OUT --stream {self._address}`"
        )


def _refusal(message: protocol.Refused) -> FleetError:
    return (Unauthorized if message.unauthorized else NotFound)(message.reason)


def _map(descriptors: list[int], welcome: protocol.Welcome) -> mmap.mmap | None:
    if not descriptors:
        return None
    with os.fdopen(descriptors[0], "rb") as file:
        size = welcome.slots * welcome.slot_bytes
        return mmap.mmap(file.fileno(), size, mmap.MAP_SHARED, mmap.PROT_READ)


def _size(chunk: Chunk) -> int:
    return sum(values.nbytes for values in chunk.tensors.values())
