"""Processes of a control plane: started detached, recorded in a file, stopped by PID."""

from __future__ import annotations

import contextlib
import json
import os
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from tpufleet.clocks import wait_until
from tpufleet.errors import FleetError, Temporary
from tpufleet_testbed.kubernetes.components import Component

READY_TIMEOUT = 600.0  # seconds, for one component on a busy machine
STOP_GRACE = 10.0  # seconds from SIGTERM to SIGKILL
POLL_SECONDS = 0.05


class ComponentNotReady(FleetError, Temporary):
    """A component did not become ready. The message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """A process, identified by PID and start time because PIDs are reused."""

    name: str
    pid: int
    since_boot: float  # seconds

    @property
    def process(self) -> psutil.Process | None:
        try:
            process = psutil.Process(self.pid)
            same = abs(_since_boot(process) - self.since_boot) < 1.0
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None

    def wait_ended(self, seconds: float) -> bool:
        """Whether it ends within this time. A zombie has ended."""
        return wait_until(lambda: self.process is None, seconds, POLL_SECONDS)


class ProcessRegistry:
    """The processes of one control plane, in start order."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "processes.json"
        self._logs = folder / "logs"

    def all(self) -> list[ProcessRecord]:
        try:
            return [ProcessRecord(**row) for row in json.loads(self._path.read_text())]
        except FileNotFoundError:
            return []

    def start(self, component: Component) -> ProcessRecord:
        self._logs.mkdir(parents=True, exist_ok=True)
        with open(self._logs / f"{component.name}.log", "ab") as log:
            process = subprocess.Popen(
                component.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **component.environment},
            )
        started = _since_boot(psutil.Process(process.pid))
        record = ProcessRecord(component.name, process.pid, started)
        self._save([*(other for other in self.all() if other.name != component.name), record])
        _CHILDREN[process.pid] = process
        return record

    def is_running(self, name: str | None = None) -> bool:
        """One of this name; None: any."""
        return any(name in (None, record.name) and record.process for record in self.all())

    @contextlib.contextmanager
    def launch(
        self, component: Component, ssl_context: ssl.SSLContext | None = None
    ) -> Iterator[None]:
        """Start a component and wait until it is ready. Stopped again if that or the body fails."""
        try:
            self.wait_ready(component, self.start(component), ssl_context)
            yield
        except BaseException:
            self.stop([component.name])
            raise

    def stop(self, names: Iterable[str] | None = None, grace: float = STOP_GRACE) -> None:
        """Stop them in reverse start order; return when none is left."""
        chosen = set(names) if names is not None else None
        for record in reversed(self.all()):
            if chosen is None or record.name in chosen:
                self._stop(record, grace)
                self._save([other for other in self.all() if other.name != record.name])

    def log_tail(self, name: str, lines: int = 12) -> str:
        try:
            return "\n".join((self._logs / f"{name}.log").read_text().splitlines()[-lines:])
        except FileNotFoundError:
            return ""

    def ended_logs_contain(self, text: str) -> bool:
        """Whether the log of any component that has ended contains this text."""
        return any(
            text in self.log_tail(record.name, 1000) for record in self.all() if not record.process
        )

    def wait_ready(
        self,
        component: Component,
        record: ProcessRecord,
        ssl_context: ssl.SSLContext | None,
        timeout: float = READY_TIMEOUT,
    ) -> None:
        name, deadline = component.name, time.monotonic() + timeout
        while component.ready_url is not None and not _responds(component.ready_url, ssl_context):
            if record.process is None:
                raise ComponentNotReady(f"{name} exited during startup:\n{self.log_tail(name)}")
            if time.monotonic() > deadline:
                raise ComponentNotReady(
                    f"{name} is not ready after {timeout:.0f} s:\n{self.log_tail(name)}"
                )
            time.sleep(POLL_SECONDS)

    def _stop(self, record: ProcessRecord, grace: float) -> None:
        process = record.process
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
                if not record.wait_ended(grace):
                    process.kill()
                    if not record.wait_ended(STOP_GRACE):
                        raise FleetError(
                            f"{record.name} (PID {record.pid}) did not end after SIGKILL"
                        )
        child = _CHILDREN.pop(record.pid, None)
        if child is not None:
            child.wait()

    def _save(self, processes: list[ProcessRecord]) -> None:
        draft = self._path.with_suffix(".draft")
        draft.write_text(json.dumps([asdict(record) for record in processes], indent=1))
        draft.replace(self._path)


def _since_boot(process: psutil.Process) -> float:
    """When it was started. Its time of day changes when the clock is set."""
    return process.create_time() - psutil.boot_time()


# Child processes must be reaped, or they stay as zombies.
_CHILDREN: dict[int, subprocess.Popen[bytes]] = {}


def _responds(url: str, ssl_context: ssl.SSLContext | None) -> bool:
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=ssl_context)
    )
    try:
        with opener.open(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
