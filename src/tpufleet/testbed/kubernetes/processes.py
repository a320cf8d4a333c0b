"""Processes of a control plane: started apart from us, remembered in a file, ended by number."""

from __future__ import annotations

import contextlib
import json
import os
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from tpufleet.errors import FleetError, Temporary
from tpufleet.testbed.kubernetes.components import Component

READY_WITHIN = 120.0  # seconds for one part on a busy machine
GRACE = 10.0  # seconds from SIGTERM to SIGKILL
LOOK_EVERY = 0.05


class ComponentNotReady(FleetError, Temporary):
    """A part of the control plane did not come up. The message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """A process, told apart from a later one with the same number by its moment of birth."""

    name: str
    pid: int
    started_at: float

    @property
    def process(self) -> psutil.Process | None:
        try:
            found = psutil.Process(self.pid)
            same = abs(found.create_time() - self.started_at) < 1.0
            return found if same and found.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None

    def wait_ended(self, seconds: float) -> bool:
        """One that nobody has waited for yet has ended all the same."""
        deadline = time.monotonic() + seconds
        while self.process is not None:
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK_EVERY)
        return True


class ProcessRegistry:
    """Which processes belong to one control plane, in the order in which they were started."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "processes.json"
        self._logs = folder / "logs"

    def all(self) -> list[ProcessRecord]:
        try:
            return [ProcessRecord(**row) for row in json.loads(self._path.read_text())]
        except FileNotFoundError:
            return []

    def start(self, part: Component) -> ProcessRecord:
        self._logs.mkdir(parents=True, exist_ok=True)
        with open(self._logs / f"{part.name}.log", "ab") as log:
            process = subprocess.Popen(
                part.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **part.environment},
            )
        born = psutil.Process(process.pid).create_time()
        running = ProcessRecord(part.name, process.pid, born)
        self._save([*(one for one in self.all() if one.name != part.name), running])
        _CHILDREN[process.pid] = process
        return running

    def stop(self, names: Iterable[str] | None = None, grace: float = GRACE) -> None:
        """End them, the last one first; return when none is left."""
        chosen = set(names) if names is not None else None
        for one in reversed(self.all()):
            if chosen is None or one.name in chosen:
                self._end(one, grace)
                self._save([other for other in self.all() if other.name != one.name])

    def log_tail(self, name: str, lines: int = 12) -> str:
        try:
            return "\n".join((self._logs / f"{name}.log").read_text().splitlines()[-lines:])
        except FileNotFoundError:
            return ""

    def ended_logs_contain(self, words: str) -> bool:
        """Whether the log of any part that has ended says so."""
        return any(words in self.log_tail(one.name, 1000) for one in self.all() if not one.process)

    def wait_ready(
        self, part: Component, running: ProcessRecord, trust: ssl.SSLContext, within: float
    ) -> None:
        deadline = time.monotonic() + within
        while part.ready_url is not None and not _answers(part.ready_url, trust):
            if running.process is None:
                raise ComponentNotReady(f"{part.name} ended at once:\n{self.log_tail(part.name)}")
            if time.monotonic() > deadline:
                raise ComponentNotReady(
                    f"{part.name} is not ready after {within:.0f} s:\n{self.log_tail(part.name)}"
                )
            time.sleep(LOOK_EVERY)

    def _end(self, one: ProcessRecord, grace: float) -> None:
        process = one.process
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
                if not one.wait_ended(grace):
                    process.kill()
                    if not one.wait_ended(GRACE):
                        raise FleetError(f"{one.name}, process {one.pid}, does not end")
        child = _CHILDREN.pop(one.pid, None)
        if child is not None:
            child.wait()

    def _save(self, processes: list[ProcessRecord]) -> None:
        draft = self._path.with_suffix(".draft")
        draft.write_text(json.dumps([asdict(one) for one in processes], indent=1))
        draft.replace(self._path)


# Our own children must be waited for, or they stay as zombies.
_CHILDREN: dict[int, subprocess.Popen[bytes]] = {}


def _answers(url: str, trust: ssl.SSLContext) -> bool:
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trust)
    )
    try:
        with opener.open(url, timeout=2) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False
