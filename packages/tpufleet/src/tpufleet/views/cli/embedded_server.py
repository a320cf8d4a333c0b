"""Starting a server on this machine when none is configured."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tpufleet import config
from tpufleet.errors import FleetError, Unreachable

SERVE_COMMAND = (sys.executable, "-P", "-m", "tpufleet", "serve", "--embedded")
START_TIMEOUT_SECONDS = 30.0  # includes a cold disk and a first migration
LONGEST_LOOK_SECONDS = 5.0
STOP_TIMEOUT_SECONDS = 10.0
LOG_LINES = 5


def start(
    home: Path, is_ready: Callable[[str], bool], command: Sequence[str] = SERVE_COMMAND
) -> tuple[str, bool]:
    """URL of the server of this state folder, and whether it was started now. It outlives the
    terminal, unless the start is interrupted."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _exclusive_lock(home / "start.lock"):
        running = config.embedded_server_url(home)
        if running is not None and is_ready(running):
            return running, False
        child = _spawn(home, command)
        try:
            return _wait_for(home, is_ready, child), True
        except (KeyboardInterrupt, SystemExit):
            _stop(child)
            raise


def _stop(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(STOP_TIMEOUT_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        child.kill()
        child.wait()


def _spawn(home: Path, command: Sequence[str]) -> subprocess.Popen[bytes]:
    log = os.open(home / "server.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        return subprocess.Popen(
            list(command),
            env={**os.environ, "TPUFLEET_HOME": str(home)},
            cwd=home,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    finally:
        os.close(log)


def _wait_for(home: Path, is_ready: Callable[[str], bool], child: subprocess.Popen[bytes]) -> str:
    waited, before = 0.0, time.monotonic()
    while waited < START_TIMEOUT_SECONDS:
        url = config.embedded_server_url(home)
        if url is not None and is_ready(url):
            return url
        if child.poll() is not None:
            raise FleetError(
                f"the server failed to start (exit status {child.returncode})\n"
                f"{_last_lines(home / 'server.log')}\n"
                f"  next: read {home / 'server.log'}"
            )
        time.sleep(0.05)
        now = time.monotonic()
        # A machine that stands still, as virtual machines may, does not start anything meanwhile.
        waited, before = waited + min(now - before, LONGEST_LOOK_SECONDS), now
    child.terminate()
    raise Unreachable(
        f"the server did not respond within {START_TIMEOUT_SECONDS:.0f} s\n"
        f"  next: read {home / 'server.log'}, then retry"
    )


def _last_lines(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return "\n".join(f"  {line}" for line in lines) or f"  {log} is empty"


@contextmanager
def _exclusive_lock(path: Path) -> Iterator[None]:
    """Two terminals that start a server at the same time start one: the second waits."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
