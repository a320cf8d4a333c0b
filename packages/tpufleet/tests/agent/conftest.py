from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

import psutil
import pytest

from tests.agent.control_plane import FakeControlPlane
from tests.polling import wait_until
from tpufleet.agent.loop import Agent, NoticeReceived, PhaseChanged, ShutdownRequested
from tpufleet.agent.notices import watch_file
from tpufleet.agent.settings import AgentSettings
from tpufleet.agent.workload import containment
from tpufleet.agent.workload.runner import AgentContext
from tpufleet.client.agents import AgentClient
from tpufleet.clocks import SystemClock
from tpufleet.linux import sandbox
from tpufleet.model.fleet.agent_protocol import Assignment, Heartbeat
from tpufleet.model.fleet.hosts import NoticeKind, Phase
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.attempts import AttemptId
from tpufleet.model.job.jobs import JobId


class NoWatchdog:
    """Replaces the watchdog, which only matters when the agent's process dies."""

    def track(self, session: int) -> None:
        pass

    def untrack(self, session: int) -> None:
        pass


class AgentHarness:
    """One host with its agent, against a real HTTP server."""

    def __init__(self, control_plane: FakeControlPlane, folder: Path) -> None:
        self.control_plane = control_plane
        self.folder = folder
        self.work = folder / "work"
        self.work.mkdir()
        self.notice_file = folder / "notice"
        self.checkpoint = folder / "checkpoints"
        self.status: int | None = None
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None

    # The agent, as a thread of the test or as a process

    def start(
        self, base_env: Mapping[str, str] = os.environ, server_timeout_seconds: float | None = None
    ) -> None:
        settings = AgentSettings(
            server=self.control_plane.url,
            slice_id=SliceId("s1"),
            host_index=0,
            num_hosts=1,
            token=self.control_plane.token,
            work_dir=self.work,
            address="127.0.0.1",
            coordinator_port=8476,
            chips=4,
            notice_file=self.notice_file,
            platform="cpu",
            server_timeout_seconds=server_timeout_seconds,
        )
        context = AgentContext(
            settings=settings,
            base_env=dict(base_env),
            agent_bin_dir=os.path.dirname(sys.executable),
            client=AgentClient(settings.server, settings.token),
            watchdog=NoWatchdog(),  # type: ignore[arg-type]
            containment=containment.detect(self.work),
            clock=SystemClock(),
            on_phase_change=lambda: self._inbox.put(PhaseChanged()),
        )
        agent = Agent(context, self._inbox, partial(watch_file, self.notice_file), boot_id="boot-1")
        self._thread = threading.Thread(
            target=lambda: self._record_status(agent.run()), daemon=True
        )
        self._thread.start()

    def start_process(
        self, then: str = "", *, stdin: IO[str] | None = None, **extra: str
    ) -> subprocess.Popen[bytes]:
        """`then` is Python code that runs after the agent has exited."""
        code = f"from tpufleet.agent.main import run; status = run(os.environ); {then}"
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"import os, sys; {code}\nsys.exit(status)"],
            env=self._environ() | extra,
            stdin=stdin,
            stdout=subprocess.PIPE if then else None,
        )
        return self._process

    def _environ(self) -> dict[str, str]:
        token_file = self.folder / "token"
        token_file.write_text(self.control_plane.token + "\n")
        token_file.chmod(0o600)
        return {
            **os.environ,
            "TPUFLEET_SERVER": self.control_plane.url,
            "TPUFLEET_SLICE": "s1",
            "TPUFLEET_HOST_INDEX": "0",
            "TPUFLEET_HOSTS": "1",
            "TPUFLEET_TOKEN_FILE": str(token_file),
            "TPUFLEET_WORK": str(self.work),
            "TPUFLEET_ADDRESS": "127.0.0.1",
            "TPUFLEET_COORDINATOR_PORT": "8476",
            "TPUFLEET_CHIPS": "4",
            "TPUFLEET_NOTICE_FILE": str(self.notice_file),
            "TPUFLEET_PLATFORM": "cpu",
        }

    def _record_status(self, status: int) -> None:
        self.status = status

    def notice(self, kind: NoticeKind) -> None:
        self._inbox.put(NoticeReceived(kind))

    def request_shutdown(self) -> None:
        self._inbox.put(ShutdownRequested())

    def wait_for_agent_exit(self) -> int:
        """The exit status of the agent."""
        assert self._thread
        self._thread.join(900)
        assert self.status is not None, "the agent did not exit"
        return self.status

    def close(self) -> None:
        if self._thread:
            self.request_shutdown()
            self._thread.join(900)
        if self._process and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile
                process.kill()

    # Assignments

    def assign(self, *command: str, **changes: Any) -> Assignment:
        assignment = replace(self._default_assignment(command), **changes)
        self.control_plane.assignment = assignment
        return assignment

    def assign_python(self, code: str, **changes: Any) -> Assignment:
        return self.assign(sys.executable, "-c", code, **changes)

    def _default_assignment(self, command: tuple[str, ...]) -> Assignment:
        return Assignment(
            attempt_id=AttemptId("j1.0"),
            job_id=JobId("j1"),
            number=0,
            command=command,
            setup=(),
            env={},
            secrets={},
            snapshot=None,
            checkpoint=str(self.checkpoint),
            grace=timedelta(seconds=5),
            worker_id=0,
            hostnames=("127.0.0.1",),
            slice_index=0,
            num_slices=1,
            process_id=0,
            num_processes=1,
            coordinator_address="127.0.0.1:8476",
            megascale_coordinator="127.0.0.1",
            chips=4,
            accelerator="v5litepod-4",
        )

    # What the server receives

    def wait_for_phase(
        self, phase: Phase, attempt: str = "j1.0", within: float = 60.0
    ) -> Heartbeat:
        """The first heartbeat with this phase."""
        return wait_until(
            lambda: next(
                (
                    heartbeat
                    for heartbeat in list(self.control_plane.heartbeats)
                    if heartbeat.phase is phase and heartbeat.attempt_id == attempt
                ),
                None,
            ),
            within,
            f"phase {phase} of {attempt}",
        )

    def wait_for_exit(self, attempt: str = "j1.0", within: float = 60.0):
        exit = self.wait_for_phase(Phase.EXITED, attempt, within).exit
        assert exit is not None
        return exit

    def log(self, attempt: str = "j1.0") -> str:
        return self.control_plane.log(attempt)

    def wait_for_log(self, text: str, attempt: str = "j1.0") -> None:
        wait_until(lambda: text in self.log(attempt), describe=f"{text!r} in the log")

    def run_dir(self, attempt: str = "j1.0") -> Path:
        return self.work / attempt / "run"

    def processes(self) -> list[psutil.Process]:
        """Every running process of any attempt on this host."""
        running = []
        for process in psutil.process_iter():
            try:
                run_dir = process.environ().get("TPUFLEET_RUN_DIR", "")
                if run_dir.startswith(str(self.work)) and process.status() != psutil.STATUS_ZOMBIE:
                    running.append(process)
            except psutil.Error:
                continue
        return running

    def programs(self) -> list[psutil.Process]:
        """Those processes, less the one that enters the namespaces of an attempt for it."""
        return [each for each in self.processes() if sandbox.__file__ not in _arguments(each)]


def _arguments(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # exited meanwhile
        return []


@pytest.fixture
def control_plane() -> Iterator[FakeControlPlane]:
    control_plane = FakeControlPlane()
    yield control_plane
    control_plane.close()


@pytest.fixture
def harness(control_plane: FakeControlPlane, tmp_path: Path) -> Iterator[AgentHarness]:
    harness = AgentHarness(control_plane, tmp_path)
    yield harness
    harness.close()


@pytest.fixture
def reachable_folder() -> Iterator[Path]:
    """Whose parents other users may enter, unlike those of `tmp_path`."""
    with tempfile.TemporaryDirectory(prefix="tpufleet-user-") as name:
        Path(name).chmod(0o755)
        yield Path(name)
