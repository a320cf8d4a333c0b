"""The output of an attempt: read from a pipe, appended to a local file, shipped to the server.

The file is the source of truth. It is shipped by byte offset, so an outage costs neither memory nor
order. While the disk is full, the newest output is kept in memory and shipped from there.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tpufleet.agent import threads
from tpufleet.agent.workload.exit_diagnosis import AGENT_LINE_PREFIX
from tpufleet.backoff import Backoff
from tpufleet.errors import FleetError, Temporary
from tpufleet.model.values.redaction import Redactor

CHUNK_BYTES = 256 * 1024
READ_BYTES = 64 * 1024
PIPE_BYTES = 1024 * 1024  # the largest pipe that Linux lets an unprivileged process have
INITIAL_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.2, 5.0
MAX_CLOSING_RETRY_SECONDS = 1.0  # while `drain` waits
BATCH_SECONDS = 0.1  # pause between chunks, so that not every line becomes a request
TAIL_BYTES = 256 * 1024
ECHO_WAIT_SECONDS = 0.1
# What a full disk may cost in memory, which on simulated hosts is that of the server's machine.
MAX_UNWRITTEN_BYTES = 16 * 2**20


class LogFile:
    """Appended to by the pipe reader and by the agent itself, and read through the same descriptor:
    the job may replace the file at `path`. `echo` is a descriptor that gets a copy, such as the
    standard output of a pod, for `kubectl logs`."""

    def __init__(self, path: Path, echo: int | None = None, *, existing: bool = False) -> None:
        """`existing`: of an earlier agent. OSError if it is missing, or the job has replaced it."""
        self.path = path
        self._echo = echo
        flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(path, flags | (os.O_NONBLOCK if existing else os.O_CREAT), 0o600)
        self._closed = False
        self._lock = threading.Lock()
        self._at_line_start = True
        self._written = 0  # bytes of the file
        self._unwritten = bytearray()  # what follows them
        self._lost_bytes = 0
        self._disk_full = False
        self.grew = threading.Event()
        if existing:
            self._continue()

    def _continue(self) -> None:
        status = os.fstat(self._file)
        own = status.st_uid == os.geteuid() and status.st_nlink == 1
        if not own or not stat.S_ISREG(status.st_mode):
            os.close(self._file)
            raise OSError(errno.EINVAL, "not the file that the agent created")
        self._written = status.st_size
        last = os.pread(self._file, 1, max(self._written - 1, 0))
        self._at_line_start = last in (b"", b"\n")

    @property
    def size(self) -> int:
        return self._written + len(self._unwritten)

    def append(self, data: bytes) -> None:
        with self._lock:
            self._append(data)

    def read(self, offset: int, size: int) -> bytes:
        """Nothing once it is closed."""
        with self._lock:
            if self._closed:
                return b""
            data = os.pread(self._file, size, offset)
            return data + self._read_unwritten(offset + len(data), size - len(data))

    def read_unwritten(self, offset: int, size: int) -> bytes:
        """Of what the disk had no room for; also once it is closed."""
        with self._lock:
            return self._read_unwritten(offset, size)

    def duplicate(self) -> int:
        """A descriptor of the same file that stays open."""
        return os.dup(self._file)

    def note(self, message: str) -> None:
        """Append a line of the agent's own, never in the middle of a line of the program's."""
        with self._lock:
            start = b"" if self._at_line_start else b"\n"
            self._append(start + f"{AGENT_LINE_PREFIX}{message}\n".encode())

    def close(self) -> None:
        with self._lock:
            if self._lost_bytes:
                self._unwritten += self._loss_notice()
            self._write()
            self._closed = True
            os.close(self._file)

    def _append(self, data: bytes) -> None:
        """A full disk must not block the program on its pipe: keep what fits into memory, count
        what does not, and note it."""
        if self._closed or not data:
            return
        self._write_echo(data)
        if self._lost_bytes and self._write():
            self._unwritten += self._loss_notice()
            self._lost_bytes = 0
        if self._lost_bytes or len(self._unwritten) + len(data) > MAX_UNWRITTEN_BYTES:
            self._lost_bytes += len(data)
            return
        self._at_line_start = data.endswith(b"\n")
        self._unwritten += data
        self._write()
        self.grew.set()

    def _write(self) -> bool:
        """Write what the disk had no room for so far. Whether nothing of it is left."""
        try:
            while self._unwritten:
                written = os.write(self._file, self._unwritten)
                self._written += written
                del self._unwritten[:written]
        except OSError:
            if not self._disk_full:
                threads.log_exception(f"cannot write {self.path}; keeping the output in memory")
            self._disk_full = True
            return False
        self._disk_full = False
        return True

    def _read_unwritten(self, offset: int, size: int) -> bytes:
        start = offset - self._written
        return bytes(self._unwritten[start : start + size]) if start >= 0 else b""

    def _loss_notice(self) -> bytes:
        return f"\n{AGENT_LINE_PREFIX}{self._lost_bytes} bytes of output lost: disk full\n".encode()

    def _write_echo(self, data: bytes) -> None:
        """Left out while its reader does not keep up: it must not block the program either."""
        for start in range(0, len(data), select.PIPE_BUF):
            if self._echo is None or not select.select([], [self._echo], [], ECHO_WAIT_SECONDS)[1]:
                return
            try:
                os.write(self._echo, data[start : start + select.PIPE_BUF])
            except OSError:
                threads.log_exception("cannot copy the output of programs; no longer trying")
                self._echo = None

    def tail(self, lines: int, since: int = 0) -> list[str]:
        """The last lines after byte `since`. Each redraw of a progress bar counts as a line."""
        text = self.read(max(since, self.size - TAIL_BYTES), TAIL_BYTES).decode(errors="replace")
        return text.replace("\r", "\n").split("\n")[-lines:]


class PipeReader:
    """Copies a pipe into the log. The program writes to a pipe and not to the file itself, because
    `echo … > /dev/stderr` would truncate a file."""

    def __init__(self, log: LogFile) -> None:
        self._log = log
        self._redactor = Redactor(())
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._wake_reader, self._wake_writer = os.pipe()
        self._lock = threading.Lock()
        self._thread = threads.start("log pipe", self._copy)

    def redact(self, redactor: Redactor) -> None:
        """Apply it to what is read from now on."""
        with self._lock:
            self._redactor = redactor

    def flush(self) -> None:
        """Copy everything written so far, so that later notes come after it."""
        with self._lock:
            # More than a pipe can hold was written later, by a process that is still running.
            for _ in range(PIPE_BYTES // READ_BYTES + 1):
                if not self._copy_chunk():
                    self._log.append(self._redactor.flush())
                    return

    def close(self) -> None:
        """Call when no process of the attempt can write any more. A foreign process that holds the
        pipe open is not waited for."""
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
                self._copy_chunk()

    def _copy_chunk(self) -> bool:
        try:
            data = os.read(self._reader, READ_BYTES)
        except BlockingIOError:
            return False
        self._log.append(self._redactor.feed(data))
        return bool(data)


class LogShipper:
    """Uploads the log. `send(offset, data)` returns how many bytes the server has now."""

    def __init__(self, log: LogFile, send: Callable[[int, bytes], int], offset: int = 0) -> None:
        self._log = log
        self._file = log.duplicate()
        self._send = send
        self._offset = offset
        self.refused = False  # for now: the last upload was answered with a temporary error
        self.unanswered = False  # an upload was sent, and no response has come yet
        self._advanced_at = time.monotonic()
        self._closing = threading.Event()
        self._complete = threading.Event()
        self._thread = threads.start("log shipper", self._run)

    def drain(self, timeout: float, paused: Callable[[], bool] = lambda: False) -> bool:
        """Wait until everything is shipped, or nothing advanced for `timeout` seconds. Time for
        which `paused` is true does not count."""
        self._advanced_at = max(self._advanced_at, time.monotonic())
        self._closing.set()
        self._log.grew.set()
        while time.monotonic() - self._advanced_at < timeout:
            if self._complete.wait(timeout=0.05):
                return True
            if paused():
                self._advanced_at = time.monotonic()
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
        backoff = Backoff(first=INITIAL_RETRY_SECONDS, longest=MAX_RETRY_SECONDS)
        while not self._complete.is_set():
            try:
                advanced = self._ship()
                self.refused = False
            except FleetError as error:
                advanced = False
                self.refused = isinstance(error, Temporary)
                if not backoff.failures:
                    threads.log(f"cannot upload the log; retrying: {error}")
            except Exception:
                advanced = False
                threads.log_exception("unexpected error while uploading the log; retrying")
            if advanced:
                backoff.succeeded()
            else:
                self._pause(backoff.failed())
        os.close(self._file)

    def _ship(self) -> bool:
        """Whether it advanced. The size that the server reports decides, also when it lost data."""
        data = os.pread(self._file, CHUNK_BYTES, self._offset)
        data = data or self._log.read_unwritten(self._offset, CHUNK_BYTES)
        if not data:
            self._wait_for_data()
            return True
        before, self.unanswered = self._offset, True
        try:
            received = self._send(self._offset, data)
        finally:
            self.unanswered = False
        self._offset = max(0, min(received, self._log.size))
        if self._offset <= before:
            return False
        self._advanced_at = time.monotonic()
        return True

    def _wait_for_data(self) -> None:
        if self._closing.is_set():
            if self._offset >= self._log.size:
                self._complete.set()
            return
        self._log.grew.wait()
        self._log.grew.clear()
        self._closing.wait(BATCH_SECONDS)

    def _pause(self, seconds: float) -> None:
        longest = MAX_CLOSING_RETRY_SECONDS if self._closing.is_set() else MAX_RETRY_SECONDS
        self._complete.wait(min(seconds, longest))
