"""The output of an attempt: from a pipe into a local file, and from there to the control plane.

The file is the truth. It is shipped by byte offset, so an outage costs neither memory nor order.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from tpufleet.agent import threads
from tpufleet.clocks import jittered
from tpufleet.errors import FleetError

CHUNK_BYTES = 256 * 1024
READ_BYTES = 64 * 1024
PIPE_BYTES = 1024 * 1024  # what Linux lets a process raise the size of a pipe to
SLOWEST_RETRY_SECONDS = 5.0
SLOWEST_LAST_RETRY_SECONDS = 1.0  # when somebody waits for the rest
GATHER_SECONDS = 0.1  # between chunks when little is written, so that each line is no request
TAIL_BYTES = 256 * 1024


class LogFile:
    """Appended to by the pump and by the agent itself."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._lock = threading.Lock()
        self._at_line_start = True
        self._lost = 0
        self.size = 0
        self.grew = threading.Event()

    def append(self, data: bytes) -> None:
        with self._lock:
            self._append(data)

    def note(self, message: str) -> None:
        """A line of the agent's own, never in the middle of a line of the program's."""
        with self._lock:
            start = b"" if self._at_line_start else b"\n"
            self._append(start + f"[tpufleet] {message}\n".encode())

    def close(self) -> None:
        with self._lock:
            os.close(self._file)

    def _append(self, data: bytes) -> None:
        """A full disk must not hang the program on its pipe: count what is lost, and say so."""
        if self._lost:
            note = f"\n[tpufleet] {self._lost} bytes of output were lost here: no room on disk\n"
            data = note.encode() + data
        left = memoryview(data)
        while left:
            try:
                written = os.write(self._file, left)
            except OSError:
                if not self._lost:
                    threads.log_exception(f"cannot write {self.path}")
                self._lost += len(left)
                return
            self.size += written
            left = left[written:]
        self._lost = 0
        if data:
            self._at_line_start = data.endswith(b"\n")
            self.grew.set()

    def tail(self, lines: int, since: int = 0) -> list[str]:
        """The last lines after the byte `since`. Progress bars count each redraw as a line."""
        with self.path.open("rb") as file:
            file.seek(max(since, self.size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
        return text.replace("\r", "\n").split("\n")[-lines:]


class PipeReader:
    """Copies a pipe into the log. A pipe and not the file itself is what the program writes to:
    `echo … > /dev/stderr` would truncate a file."""

    def __init__(self, log: LogFile) -> None:
        self._log = log
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._wake_reader, self._wake_writer = os.pipe()
        self._lock = threading.Lock()
        self._thread = threads.start("pump", self._copy)

    def flush(self) -> None:
        """Take over all that was written until now, so that what is noted next comes after it."""
        with self._lock:
            # More than a pipe can hold came later, from something left running.
            for _ in range(PIPE_BYTES // READ_BYTES + 1):
                if not self._take():
                    return

    def close(self) -> None:
        """Called when no process of ours can write more. One that is not ours but holds the pipe
        open is not waited for."""
        os.close(self.writer)
        os.close(self._wake_writer)
        self._thread.join()
        self.flush()
        os.close(self._reader)
        os.close(self._wake_reader)

    def _copy(self) -> None:
        while True:
            ready, _, _ = select.select([self._reader, self._wake_reader], [], [])
            if self._wake_reader in ready:
                return
            with self._lock:
                self._take()

    def _take(self) -> bool:
        try:
            data = os.read(self._reader, READ_BYTES)
        except BlockingIOError:
            return False
        self._log.append(data)
        return bool(data)


class LogShipper:
    """Sends the log on. `send(offset, data)` answers how many bytes the other side has now."""

    def __init__(self, log: LogFile, send: Callable[[int, bytes], int]) -> None:
        self._log = log
        self._send = send
        self._offset = 0
        self._moved_at = time.monotonic()
        self._closing = threading.Event()
        self._complete = threading.Event()
        self._thread = threads.start("shipper", self._run)

    def drain(self, timeout: float, paused: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all is shipped, for as long as it moves within `patience` seconds. Time in
        which it is excused for not moving does not count."""
        self._moved_at = max(self._moved_at, time.monotonic())
        self._closing.set()
        self._log.grew.set()
        while time.monotonic() - self._moved_at < timeout:
            if self._complete.wait(timeout=0.05):
                return True
            if paused():
                self._moved_at = time.monotonic()
        return self._complete.is_set()

    @property
    def unsent_bytes(self) -> int:
        return self._log.size - self._offset

    def abandon(self) -> None:
        """Stop trying; the file is about to be deleted."""
        self._complete.set()
        self._closing.set()
        self._log.grew.set()

    def _run(self) -> None:
        failures = 0
        with self._log.path.open("rb") as file:
            while not self._complete.is_set():
                try:
                    stuck = not self._ship(file)
                except FleetError as error:
                    stuck = True
                    if failures == 0:
                        threads.log(f"the log is kept back: {error}")
                except Exception:
                    stuck = True
                    threads.log_exception("the log could not be shipped; trying again")
                failures = failures + 1 if stuck else 0
                if failures:
                    self._pause(failures)

    def _ship(self, file: BinaryIO) -> bool:
        """Whether it moves. What the other side says it has decides, also when it lost some."""
        file.seek(self._offset)
        data = file.read(CHUNK_BYTES)
        if not data:
            self._rest()
            return True
        before, there = self._offset, self._send(self._offset, data)
        self._offset = max(0, min(there, self._log.size))
        if self._offset <= before:
            return False
        self._moved_at = time.monotonic()
        return True

    def _rest(self) -> None:
        if self._closing.is_set():
            if self._offset >= self._log.size:
                self._complete.set()
            return
        self._log.grew.wait()
        self._log.grew.clear()
        self._closing.wait(GATHER_SECONDS)

    def _pause(self, failures: int) -> None:
        slowest = SLOWEST_LAST_RETRY_SECONDS if self._closing.is_set() else SLOWEST_RETRY_SECONDS
        longest = min(slowest, 0.1 * 2 ** min(failures, 10))
        self._complete.wait(jittered(longest))
