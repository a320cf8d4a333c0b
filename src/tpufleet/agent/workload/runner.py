"""What an agent hands to each workload that it runs.

One workload: fetch its code, run setup and then the command, end it, tell how it ended.

Nothing of an attempt is left on this host when its phase becomes EXITED."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from queue import Empty, SimpleQueue
from threading import Event, Thread

from tpufleet.agent import threads
from tpufleet.agent.settings import AgentSettings
from tpufleet.agent.workload import environment, exit_diagnosis, processes, results
from tpufleet.agent.workload.attempt_folder import AttemptFolder
from tpufleet.agent.workload.logs import LogFile, LogShipper, PipeReader
from tpufleet.agent.workload.progress import ProgressReader
from tpufleet.agent.workload.step_process import StepProcess
from tpufleet.agent.workload.watchdog import Watchdog
from tpufleet.client.agents import AgentClient
from tpufleet.clocks import Clock, jittered
from tpufleet.errors import FleetError, Unreachable
from tpufleet.model.agent_protocol import Assignment
from tpufleet.model.end_reasons import EndReason
from tpufleet.model.hosts import Exit, Phase, Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentContext:
    settings: AgentSettings
    base_env: Mapping[str, str]  # the agent's own environment
    agent_bin_dir: str  # where the agent's own `python` is
    client: AgentClient
    watchdog: Watchdog
    clock: Clock
    on_phase_change: Callable[[], None]  # called when a phase changed


# For processes that outlive the command by a moment, as workers of a data loader do.
LINGER_SECONDS = 2.0
# A log route that refuses or hangs holds the report of the end back no longer than this. While no
# beat is answered either, nothing is held back by waiting.
LOG_UPLOAD_TIMEOUT_SECONDS = 3.0
RESULT_UPLOAD_TIMEOUT_SECONDS = 30.0  # the same for the result, which weighs more
LAST_LOOK_SECONDS = 2.0  # at the checkpoint folder, which may hang
SLOWEST_RETRY_SECONDS = 5.0
# Not even SIGKILL ends a process that is stuck in the kernel; say so this often, and go on.
UNKILLABLE_SECONDS = 30.0


class Workload:
    def __init__(self, assignment: Assignment, context: AgentContext) -> None:
        self.assignment = assignment
        self.folder = AttemptFolder(context.settings.work_dir, assignment.attempt_id)
        self.phase = Phase.SETUP
        self.exit: Exit | None = None
        self._given = context
        self._why_stop = ""
        self._fault: EndReason | None = None
        self._stop = Event()
        self._hurried = False
        self._told = False  # SIGTERM was sent
        self._news: SimpleQueue[None] = SimpleQueue()  # something happened: look again
        self._secrets: dict[str, str] = {}
        self._steps: list[StepProcess] = []
        self._reader: ProgressReader | None = None
        self._shipper: LogShipper | None = None

    @property
    def progress(self) -> Progress | None:
        return self._reader.latest if self._reader else None

    @property
    def finished(self) -> bool:
        return self.phase is Phase.EXITED

    def start(self) -> None:
        threads.start(f"workload {self.assignment.attempt_id}", self._run)

    def stop(self, reason: str, fault: EndReason | None = None) -> None:
        """End it gracefully. The first reason counts; asking again changes nothing. `fault`: it has
        to end for what it did itself."""
        if self._stop.is_set():
            return
        self._why_stop, self._fault = reason, fault
        self._stop.set()
        self._news.put(None)

    def stop_waiting_for_server(self) -> None:
        """The agent leaves: what cannot be sent now is not waited for."""
        self._hurried = True

    def drop_secrets(self) -> None:
        self.assignment = replace(self.assignment, secrets={})
        self._secrets = {}

    def abandon_upload(self) -> None:
        """Its folder is about to be deleted: what is not shipped by now never will be."""
        if self._shipper is None:
            return
        if self._shipper.unsent_bytes:
            threads.log(
                f"{self._shipper.unsent_bytes} bytes of {self.folder.output} were not taken"
            )
        self._shipper.abandon()

    def _run(self) -> None:
        try:
            exit = self._live()
        except Exception as error:
            threads.log_exception(f"attempt {self.assignment.attempt_id} could not be run")
            words = f"the agent could not run it: {error!r}"
            exit = self._exit_without_process(words[:500])
        self.exit = exit
        self._enter(Phase.EXITED)

    def _live(self) -> Exit:
        if not self.folder.create():
            # An earlier agent of this host began it and died, and its guard ended what ran.
            return self._exit_without_process(
                "the agent on this host was restarted, and what it ran was ended", stopped=True
            )
        log = LogFile(self.folder.output)
        pump = PipeReader(log)
        self._shipper = LogShipper(log, self._send_log)
        ended = Event()
        watching = self._follow_progress(ended)
        try:
            exit = self._attempt(log, pump)
        finally:
            self._end_all()
            pump.close()
            ended.set()
            watching.join(LAST_LOOK_SECONDS)  # so that the end is told with the last progress
            self._shipper.drain(LOG_UPLOAD_TIMEOUT_SECONDS, self._waits_for_control_plane)
            self._hand_over_result()
            log.close()
        return exit

    def _attempt(self, log: LogFile, pump: PipeReader) -> Exit:
        try:
            self._secrets = environment.resolve_secrets(
                self.assignment.secrets, self._given.settings.token
            )
            self._fetch_code()
        except FleetError as error:
            log.note(f"cannot begin: {error}")
            return self._exit_without_process(str(error))
        steps = {"setup": self.assignment.setup, "command": self.assignment.command}
        exit = self._exit_without_process("the job has no command")
        for name, argv in steps.items():
            if self._stop.is_set():
                log.note(f"stopped before {name}: {self._why_stop}")
                return self._exit_without_process(self._why_stop, stopped=True)
            if argv:
                exit = self._step(name, argv, log, pump)
                if name == "setup" and (exit.status != 0 or exit.stopped_by_agent):
                    return exit
        return exit

    def _fetch_code(self) -> None:
        pause = 0.2
        archive = self.folder.path / "snapshot.tar.gz"
        while self.assignment.snapshot and not self._stop.is_set():
            try:
                with archive.open("wb") as file:
                    for piece in self._given.client.snapshot(self.assignment.snapshot):
                        if self._stop.is_set():
                            return
                        file.write(piece)
                self.folder.unpack(archive)
                return
            except Unreachable as error:
                threads.log(f"the code is not here yet: {error}")
            self._stop.wait(jittered(pause))
            pause = min(pause * 2, SLOWEST_RETRY_SECONDS)

    def _step(self, name: str, argv: tuple[str, ...], log: LogFile, pump: PipeReader) -> Exit:
        log.note(f"{name}: {_on_one_line(argv)}")
        since, setup = log.size, name == "setup"
        try:
            step = StepProcess(
                argv,
                env=self._environment(),
                folder=self.folder.code,
                output=pump.writer,
                clock=self._given.clock,
                on_exit=lambda: self._news.put(None),
            )
        except OSError as error:
            status = 127 if isinstance(error, FileNotFoundError) else 126  # as shells have it
            words = f"{argv[0]} cannot be started: {error.strerror}"
            log.note(words)
            return Exit(at=self._now(), status=status, during_setup=setup, log_line=words)
        self._steps.append(step)
        self._given.watchdog.track(step.session)
        self._enter(Phase.SETUP if setup else Phase.RUNNING)
        stopped = self._wait(step, log)
        ended = step.exit(during_setup=setup)
        if not setup or stopped or ended.failed:
            self._end_all()
        pump.flush()
        tail = log.tail(exit_diagnosis.TAIL_LINES, since)
        log.note(f"{ended.description} after {step.seconds:.1f} s")
        if stopped:
            return exit_diagnosis.exit_of_stopped(ended, self._why_stop, self._fault)
        return exit_diagnosis.exit_of_finished(ended, tail)

    def _wait(self, step: StepProcess, log: LogFile) -> bool:
        """Until the step's first process is gone. True when it was we who ended it."""
        while not step.finished and not self._stop.is_set():
            self._news.get()
        if step.finished:
            return False
        grace = self.assignment.grace.total_seconds()
        log.note(f"stopping: {self._why_stop}; SIGTERM now, SIGKILL after {grace:g} s")
        self._enter(Phase.STOPPING)
        deadline = time.monotonic() + grace
        self._tell_to_stop()
        while not step.finished and (left := deadline - time.monotonic()) > 0:
            try:
                self._news.get(timeout=left)
            except Empty:
                break
        processes.wait_until_gone(self._sessions, self._marked, deadline - time.monotonic())
        while not step.finished:
            self._kill_all()
            self._news.get()
        return True

    def _tell_to_stop(self) -> None:
        self._told = True
        self.folder.stop_file.touch()
        processes.terminate(self._sessions, self._marked)

    def _end_all(self) -> None:
        """End what the attempt left behind, the same way: SIGTERM, grace, SIGKILL."""
        if not processes.wait_until_gone(self._sessions, self._marked, self._linger()):
            if not self._told:
                self._tell_to_stop()
                grace = self.assignment.grace.total_seconds()
                processes.wait_until_gone(self._sessions, self._marked, grace)
            self._kill_all()
        for step in self._steps:
            self._given.watchdog.untrack(step.session)
            step.reap()
        self._steps.clear()

    def _linger(self) -> float:
        return 0.0 if self._stop.is_set() else LINGER_SECONDS

    def _kill_all(self) -> None:
        while not processes.kill(self._sessions, self._marked, UNKILLABLE_SECONDS):
            threads.log(f"a process of {self.assignment.attempt_id} does not die")

    @property
    def _sessions(self) -> list[int]:
        return [step.session for step in self._steps]

    def _marked(self, mark: str) -> bool:
        return mark == str(self.folder.run)

    def _environment(self) -> dict[str, str]:
        return environment.for_workload(
            replace(self.assignment, secrets=self._secrets),
            self._given.settings,
            base_env=self._given.base_env,
            attempt_folder=self.folder.path,
            agent_bin_dir=self._given.agent_bin_dir,
        )

    def _send_log(self, offset: int, data: bytes) -> int:
        return self._given.client.send_log(
            self.assignment.attempt_id, self._given.settings.host_id, offset, data
        )

    def _waits_for_control_plane(self) -> bool:
        """The end cannot be told either, and once it is told, the host with the log may go."""
        return not self._hurried and not self._given.client.reachable

    def _hand_over_result(self) -> None:
        """Before the end is told: whoever hears of it may ask for the result at once."""
        data = results.read_result(self.folder.result)
        if data is None:
            return
        results.upload_result(
            lambda: self._given.client.send_result(
                self.assignment.attempt_id, self._given.settings.host_id, data
            ),
            RESULT_UPLOAD_TIMEOUT_SECONDS,
            self._waits_for_control_plane,
        )

    def _follow_progress(self, ended: Event) -> Thread:
        self._reader = reader = ProgressReader(
            self.folder.run,
            self.assignment.checkpoint,
            clock=self._given.clock,
        )
        return threads.start("progress", lambda: reader.watch(ended))

    def _exit_without_process(self, line: str, *, stopped: bool = False) -> Exit:
        status = None if stopped else 1
        return Exit(
            at=self._now(),
            during_setup=True,
            status=status,
            stopped_by_agent=stopped,
            log_line=line,
        )

    def _now(self) -> datetime:
        return self._given.clock.now()

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._given.on_phase_change()


def _on_one_line(argv: tuple[str, ...]) -> str:
    return shlex.join(argv).replace("\n", "\\n")[:1000]
