"""Runs one attempt on this host: fetch the code, run setup and then the command, stop, report.

No process of an attempt is left on this host when its phase becomes EXITED. A restart in place is
another attempt on the same hosts: see `policy.recovery.retries`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryFile
from threading import Event
from typing import IO

from tpufleet.agent import threads
from tpufleet.agent.settings import AgentSettings
from tpufleet.agent.workload import (
    attempt_folder,
    compiled_programs,
    container_image,
    environment_variables,
    exit_diagnosis,
    host_processes,
    processes,
    python_environment,
    step_process,
)
from tpufleet.agent.workload.attempt_folder import PEER_GONE_FILE, AttemptFolder
from tpufleet.agent.workload.compiled_programs import ProgramArchives
from tpufleet.agent.workload.container_image import JobContainer
from tpufleet.agent.workload.containment import AttemptProcesses, Containment
from tpufleet.agent.workload.output import results
from tpufleet.agent.workload.output.log_metrics import LogMetrics
from tpufleet.agent.workload.output.logs import LogFile, LogShipper, PipeReader
from tpufleet.agent.workload.output.progress import ProgressReader
from tpufleet.agent.workload.python_environment import JobPython
from tpufleet.agent.workload.step_process import StepProcess, StepProgram
from tpufleet.agent.workload.watchdog import Watchdog
from tpufleet.backoff import Backoff
from tpufleet.client.agents import AgentClient
from tpufleet.clocks import Clock
from tpufleet.errors import BadInput, FleetError, Unreachable
from tpufleet.model.fleet.agent_protocol import Assignment
from tpufleet.model.fleet.hosts import Exit, Phase, Progress, ProgressPoint
from tpufleet.model.job import mounts
from tpufleet.model.job.attempts import EnvironmentReport, Startup
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.model.job.jobs import IMAGES_REFUSED
from tpufleet.model.values.redaction import Redactor

# For processes that outlive the command by a moment, as the workers of a data loader do.
LINGER_SECONDS = 2.0
# The exit is reported at the latest this long after the log upload last advanced. Time in which
# heartbeats fail too does not count: then the exit cannot be reported either.
LOG_UPLOAD_TIMEOUT_SECONDS = 3.0
# The same if uploads alone are refused for now, as by a server with a full disk.
LOG_REFUSED_TIMEOUT_SECONDS = 120.0
# The same if they are not answered, as by a server whose database does not respond.
LOG_UNANSWERED_TIMEOUT_SECONDS = 30.0
RESULT_UPLOAD_TIMEOUT_SECONDS = 120.0  # the same for the result
LAST_POLL_SECONDS = 2.0  # of the checkpoint folder, which may hang
INITIAL_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.2, 5.0
# From SIGTERM to SIGKILL when another process of the gang is gone. A process that is not blocked
# has ended by then.
ABORT_SECONDS = 0.5
SAVE_POLL_SECONDS = 0.1
# Not even SIGKILL ends a process that is stuck in the kernel: log it this often and keep trying.
UNKILLABLE_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentContext:
    """What an agent shares with each workload that it runs."""

    settings: AgentSettings
    base_env: Mapping[str, str]  # the agent's own environment
    agent_bin_dir: str  # where the agent's own `python` is
    client: AgentClient
    watchdog: Watchdog
    containment: Containment
    clock: Clock
    on_phase_change: Callable[[], None]
    # The code of the last job, packed, by its digest: for its next attempt.
    kept_code: dict[str, IO[bytes]] = field(default_factory=dict)


class Workload:
    def __init__(self, assignment: Assignment, context: AgentContext) -> None:
        self.assignment = assignment
        self.folder = AttemptFolder(context.settings.work_dir, assignment.attempt_id)
        self.phase = Phase.SETUP
        self.exit: Exit | None = None
        self.environment: EnvironmentReport | None = None  # once it is ready
        self._context = context
        self._containment = context.containment.for_owner(admin=assignment.owned_by_admin)
        self._assigned_at = context.clock.now()
        self._started_at: datetime | None = None  # the command
        self._stop_reason = ""
        self._fault: EndReason | None = None
        self._stop = Event()
        self._abort = Event()
        self._wait_for_server = True
        self._sigterm_sent = False
        self._wakeups: SimpleQueue[None] = SimpleQueue()  # something changed: check again
        self._secrets: dict[str, str] = {}
        self._redactor = Redactor(())
        self._steps: list[StepProcess] = []
        self._container: AttemptProcesses | None = None
        self._python: JobPython | None = None
        self._compiled: Path | None = None  # programs
        self._local: Path | None = None
        self._archives: ProgramArchives | None = None  # of the same programs
        self._image: JobContainer | None = None
        self._progress_reader: ProgressReader | None = None
        self._log_shipper: LogShipper | None = None

    @property
    def progress(self) -> Progress | None:
        return self._progress_reader.latest if self._progress_reader else None

    @property
    def startup(self) -> Startup | None:
        """Of process 0, which the others wait for. A change is a message to the controller, so it
        changes only with the first step, and with the first beyond those of earlier attempts."""
        reader = self._progress_reader
        if self._started_at is None or reader is None or self.assignment.process_id != 0:
            return None
        startup = Startup(assigned_at=self._assigned_at, started_at=self._started_at)
        if (first := reader.first) is None:
            return startup
        timings = reader.timings_at_first
        return replace(
            startup,
            imported_at=timings.imported_at,
            connect_seconds=timings.connect_seconds,
            restore_seconds=timings.restore_seconds,
            compile_seconds=timings.compile_seconds,
            stepped_at=first.at,
            first_step=first.step,
            advanced_at=reader.advanced_at,
            checkpoint_step=reader.checkpoint_at_start,
        )

    def points_after(self, moment: datetime | None) -> tuple[ProgressPoint, ...]:
        reader = self._progress_reader
        return reader.points_after(moment) if reader is not None else ()

    @property
    def finished(self) -> bool:
        return self.phase is Phase.EXITED

    def start(self) -> None:
        threads.start(f"workload {self.assignment.attempt_id}", self._run)

    def stop(self, reason: str, fault: EndReason | None = None) -> None:
        """Stop gracefully. The first call decides the reason; later calls have no effect. `fault`
        is set when the workload itself is the cause."""
        if self._stop.is_set():
            return
        self._stop_reason, self._fault = reason, fault
        self._stop.set()
        self._wakeups.put(None)

    def abort(self) -> None:
        """After `stop`: kill it unless it is saving a checkpoint, since it can complete no step."""
        if not self._abort.is_set():
            self._abort.set()
            self._wakeups.put(None)

    def stop_waiting_for_server(self) -> None:
        """The agent is exiting: uploads no longer wait for an outage to end."""
        self._wait_for_server = False

    def drop_secrets(self) -> None:
        self.assignment = replace(self.assignment, secrets={}, token="")
        self._secrets = {}
        self._redactor = Redactor(())

    def abandon_upload(self) -> None:
        """The folder is about to be deleted: stop uploading its log."""
        if self._log_shipper is None:
            return
        if self._log_shipper.unsent_bytes:
            unsent = self._log_shipper.unsent_bytes
            threads.log(f"{unsent} bytes of {self.folder.output} were never uploaded")
        self._log_shipper.abandon()

    def _run(self) -> None:
        try:
            exit = self._run_in_folder()
        except Exception as error:
            threads.log_exception(f"unexpected error in attempt {self.assignment.attempt_id}")
            exit = self._exit_without_process(f"unexpected error in the agent: {error!r}"[:500])
        self.exit = exit
        self._enter(Phase.EXITED)

    def _run_in_folder(self) -> Exit:
        if not self.folder.create():
            # An earlier agent on this host started it and died; its watchdog ended the processes.
            message = "the agent on this host restarted; its processes were killed"
            self._upload_log_of_earlier_agent(message)
            return self._exit_without_process(message, stopped=True)
        echo = sys.stdout.fileno() if self._context.settings.echo_output else None
        log = LogFile(self.folder.output, echo)
        pipe = PipeReader(log)
        self._log_shipper = LogShipper(log, self._send_log)
        ended = Event()
        self._progress_reader = progress = self._open_progress(log)
        progress_thread = threads.start("progress", lambda: progress.watch(ended))
        try:
            exit = self._run_steps(log, pipe, progress, ended)
        finally:
            self._end_all()
            pipe.close()
            ended.set()
            progress_thread.join(LAST_POLL_SECONDS)  # report the exit with the last progress
            self._upload_log(self._log_shipper)
            self._upload_result()
            log.close()
        return exit

    def _upload_log_of_earlier_agent(self, message: str) -> None:
        try:
            log = LogFile(self.folder.output, existing=True)
        except OSError as error:
            threads.log(f"cannot upload {self.folder.output}: {error.strerror}")
            return
        log.note(message)
        # The last byte is sent first: the response says how much the server has.
        self._log_shipper = LogShipper(log, self._send_log, offset=max(0, log.size - 1))
        self._upload_log(self._log_shipper)
        log.close()

    def _upload_log(self, shipper: LogShipper) -> None:
        """The rest of it. Once the exit is reported, the host with the log may go away."""
        began = time.monotonic()

        def paused() -> bool:
            waited = time.monotonic() - began
            held_up = (shipper.refused and waited < LOG_REFUSED_TIMEOUT_SECONDS) or (
                shipper.unanswered and waited < LOG_UNANSWERED_TIMEOUT_SECONDS
            )
            return self._waiting_for_server() or (self._wait_for_server and held_up)

        shipper.drain(LOG_UPLOAD_TIMEOUT_SECONDS, paused)

    def _run_steps(
        self, log: LogFile, pipe: PipeReader, progress: ProgressReader, ended: Event
    ) -> Exit:
        try:
            self._secrets = environment_variables.resolve_secrets(
                self.assignment.secrets,
                self._context.settings.token,
                hidden=self._containment.covered,
                user=self._containment.user_ids,
            )
            self._redactor = Redactor([*self._secrets.values(), self.assignment.token])
            pipe.redact(self._redactor)
            progress.redact(self._redactor)
            self.folder.write_credentials(
                self.assignment.token, self._context.settings.certificates
            )
            self._fetch_code()
        except (OSError, FleetError) as error:
            log.note(f"cannot start: {error}")
            return self._exit_without_process(str(error))
        steps = {"setup": self.assignment.setup, "command": self.assignment.command}
        exit = self._exit_without_process("the job has no command")
        try:
            self._python = python_environment.plan(
                self.assignment,
                self._context.settings,
                self.folder.code,
                hard_links=not self._containment.isolated,
            )
            if self.assignment.image is not None:
                if not self._context.settings.images:
                    raise BadInput(f"image: {IMAGES_REFUSED}")
                self._image = JobContainer(
                    self.assignment.image,
                    self.assignment.attempt_id,
                    self._context.base_env.get("PATH"),
                )
            shared = []
            if self._python is not None:
                self._python.begin()
                shared += [self._python.cache, self._python.folder]
            self._compiled = compiled_programs.open_folder(
                self.assignment, self._context.settings.work_dir, self._containment
            )
            shared.append(self._compiled)
            self._archives = compiled_programs.open_archives(
                self.assignment, self._context.settings, self._compiled
            )
            if self.assignment.image is None and not self._context.settings.scratch_limit_bytes:
                self._local = attempt_folder.lineage_folder(
                    self.assignment, self._context.settings.work_dir / attempt_folder.LOCAL
                )
                for local in range(self.assignment.processes_per_host):
                    (self._local / str(local)).mkdir(exist_ok=True)
                shared.append(self._local)
            self._container = self._containment.open(
                self.folder.path, self.assignment.checkpoint, shared
            )
        except (OSError, FleetError) as error:
            log.note(f"cannot start: {error}")
            return self._exit_without_process(str(error))
        fetched = self._keep_programs(ended)
        if self._python is not None:
            failed = self._make_python(self._python, log, pipe)
            if failed is not None:
                return failed
        for name, argv in steps.items():
            if name == "command":
                self._wait_for_programs(fetched)
            if self._stop.is_set():
                log.note(f"stopped before {name}: {self._stop_reason}")
                return self._exit_without_process(self._stop_reason, stopped=True)
            if argv:
                step_start = log.size
                exit = self._run_step(name, argv, log, pipe)
                exit = _before_the_program(exit, log, step_start, self._image is not None)
                if name == "command" and exit.status == 0 and self._local is not None:
                    attempt_folder.delete_folders([self._local])
                if name == "setup" and (exit.status != 0 or exit.stopped_by_agent):
                    return exit
        return exit

    def _keep_programs(self, ended: Event) -> Event:
        """In the background. The event is set when the programs of other hosts are here."""
        fetched = Event()
        if (archives := self._archives) is None:
            fetched.set()
        else:
            threads.start("compiled programs", lambda: archives.run(fetched, ended))
        return fetched

    def _wait_for_programs(self, fetched: Event) -> None:
        deadline = time.monotonic() + compiled_programs.FETCH_TIMEOUT_SECONDS
        while not fetched.wait(0.05) and not self._stop.is_set() and time.monotonic() < deadline:
            continue

    def _make_python(self, python: JobPython, log: LogFile, pipe: PipeReader) -> Exit | None:
        """The exit if that fails, in uv's own words."""
        log.note(f"environment: from {python.source}")
        log_start, started = log.size, time.monotonic()
        for argv in python.steps:
            if self._stop.is_set():
                return self._exit_without_process(self._stop_reason, stopped=True)
            step_start = log.size
            exit = self._run_step("environment", argv, log, pipe)
            if exit.status != 0 or exit.stopped_by_agent:
                error = python_environment.find_error(
                    log.tail(exit_diagnosis.TAIL_LINES, step_start)
                )
                return replace(exit, log_line=error or exit.log_line)
        python.finish()
        lines = log.tail(exit_diagnosis.TAIL_LINES, log_start)
        self.environment = python_environment.report(
            python.source, time.monotonic() - started, lines
        )
        log.note(f"environment: ready: {self.environment.text}")
        self._context.on_phase_change()
        if self._context.settings.platform == "" and python_environment.runs_on_cpu(python.folder):
            log.note(
                "environment: jax is installed without libtpu and will use the CPU; write jax[tpu]"
            )
        return None

    def _fetch_code(self) -> None:
        backoff = Backoff(first=INITIAL_RETRY_SECONDS, longest=MAX_RETRY_SECONDS)
        snapshot, kept = self.assignment.snapshot, self._context.kept_code
        if snapshot not in kept:
            kept.clear()
        while snapshot and not self._stop.is_set():
            try:
                archive = kept.get(snapshot) or self._download(snapshot)
                if archive is not None:
                    self.folder.unpack(archive)
                    kept[snapshot] = archive
                    return
            except Unreachable as error:
                threads.log(f"cannot download the code; retrying: {error}")
            self._stop.wait(backoff.failed())

    def _download(self, snapshot: str) -> IO[bytes] | None:
        """Into a file without a name, which no job can change. None when the attempt is stopped."""
        archive = TemporaryFile(dir=self._context.settings.work_dir)  # noqa: SIM115
        for chunk in self._context.client.snapshot(snapshot):
            if self._stop.is_set():
                return None
            archive.write(chunk)
        return archive

    def _run_step(self, name: str, argv: tuple[str, ...], log: LogFile, pipe: PipeReader) -> Exit:
        log.note(f"{name}: {_on_one_line(argv)}")
        log_start, is_setup = log.size, name != "command"
        assert self._container is not None
        if not is_setup:
            self._started_at = self._now()
        steps: list[StepProcess] = []
        count = 1 if is_setup else self.assignment.processes_per_host
        try:
            for local in range(count):
                with host_processes.near_its_chips(local, count):
                    step = StepProcess(
                        self._program(argv, local),
                        folder=self.folder.code,
                        output=pipe.writer,
                        container=self._container,
                        clock=self._context.clock,
                        on_exit=lambda: self._wakeups.put(None),
                    )
                steps.append(step)
                self._steps.append(step)
                self._context.watchdog.track(step.session)
        except BadInput as error:
            log.note(f"cannot start: {error}")
            return self._exit_without_process(str(error))
        except OSError as error:
            status = 127 if isinstance(error, FileNotFoundError) else 126  # as in shells
            message = f"cannot start {argv[0]}: {error.strerror}"
            log.note(message)
            return Exit(at=self._now(), status=status, during_setup=is_setup, log_line=message)
        self._enter(Phase.SETUP if is_setup else Phase.RUNNING)
        stopped = self._wait_for_steps(steps, log)
        step = step_process.deciding(steps)
        exit = step.exit(during_setup=is_setup)
        if exit.status != 0 and not stopped:  # what is left of it can complete no step
            self._abort.set()
        if not is_setup or stopped or exit.status != 0:
            self._end_all()
        pipe.flush()
        tail = log.tail(exit_diagnosis.TAIL_LINES, log_start)
        log.note(f"{exit_diagnosis.describe(exit)} after {step.seconds:.1f} s")
        if stopped:
            return exit_diagnosis.exit_of_stopped(exit, self._stop_reason, self._fault)
        return exit_diagnosis.exit_of_finished(exit, step.oom_kills, tail)

    def _program(self, argv: tuple[str, ...], local: int) -> StepProgram:
        if self._image is None:
            assert self._container is not None
            env = {**self._environment(local=local), **self._container.environment}
            return StepProgram(argv=argv, env=env)
        return self._in_image(self._image, argv)

    def _in_image(self, image: JobContainer, argv: tuple[str, ...]) -> StepProgram:
        checkpoint = Path(self.assignment.checkpoint)
        folders = [self.folder.path]
        if self._compiled is not None:
            folders.append(self._compiled)
        settings = self._context.settings
        on_tpu_host = settings.platform != environment_variables.SIMULATED_PLATFORM
        if checkpoint.is_absolute() and "://" not in self.assignment.checkpoint:
            self._containment.require_visible(self.assignment.checkpoint)
            # Docker mounts with the rights of root, whatever those of the job are.
            if self._containment.hidden and not self._containment.is_own(
                self.assignment.checkpoint
            ):
                raise BadInput(
                    f"checkpoint: {checkpoint} cannot be mounted into an image on `local`; leave "
                    "checkpoint out, or use a bucket"
                )
            checkpoint.mkdir(parents=True, exist_ok=True)
            folders.append(checkpoint)
        client = image.wrap(
            argv,
            folders=folders,
            workdir=self.folder.code,
            user=None if on_tpu_host else self._containment.user_ids or (os.getuid(), os.getgid()),
        )
        return StepProgram(
            argv=client,
            env=environment_variables.for_host_tool(
                self._context.base_env, settings, self.folder.path
            ),
            input=container_image.environment_file(self._environment(base_env={})),
            as_agent=True,
        )

    def _wait_for_steps(self, steps: list[StepProcess], log: LogFile) -> bool:
        """Wait until they have exited, or one of them has failed. True when the agent stopped
        them."""
        while not step_process.decided(steps) and not self._stop.is_set():
            self._wakeups.get()
        if step_process.decided(steps):
            return False
        grace = self.assignment.grace.total_seconds()
        log.note(
            f"stopping: {self._stop_reason}; SIGTERM now, SIGKILL after "
            f"{min(grace, ABORT_SECONDS) if self._abort.is_set() else grace:g} s"
        )
        self._enter(Phase.STOPPING)
        self._request_stop()
        began = time.monotonic()
        while not step_process.finished(steps) and (left := self._grace_left(began)) > 0:
            with contextlib.suppress(Empty):
                self._wakeups.get(timeout=left)
        self._wait_until_gone(began)
        while not step_process.finished(steps):
            self._kill_all()
            self._wakeups.get()
        return True

    def _wait_until_gone(self, began: float) -> None:
        while (left := self._grace_left(began)) > 0:
            if processes.wait_until_gone(self._processes, left):
                break

    def _grace_left(self, began: float) -> float:
        """Seconds until SIGKILL, or until it is to be asked again, since it may abort or save."""
        left = began + self.assignment.grace.total_seconds() - time.monotonic()
        if not self._abort.is_set():
            return min(left, ABORT_SECONDS)
        self.folder.write_stop_file(PEER_GONE_FILE)
        if self.folder.is_saving():
            return min(left, SAVE_POLL_SECONDS)
        return min(left, began + ABORT_SECONDS - time.monotonic())

    def _request_stop(self) -> None:
        self._sigterm_sent = True
        self.folder.write_stop_file()
        processes.terminate(self._processes)

    def _end_all(self) -> None:
        """End the processes that the attempt left behind: SIGTERM, grace period, SIGKILL."""
        linger = 0.0 if self._stop.is_set() or self._abort.is_set() else LINGER_SECONDS
        if not processes.wait_until_gone(self._processes, linger):
            if not self._sigterm_sent:
                self._request_stop()
                self._wait_until_gone(time.monotonic())
            self._kill_all()
        if self._image is not None and self._steps:
            self._image.remove(self._context.base_env)
        for step in self._steps:
            self._context.watchdog.untrack(step.session)
            step.reap()
        self._steps.clear()
        if self._container is not None:
            self._container.close()
            self._container = None

    def _kill_all(self) -> None:
        while not processes.kill(self._processes, UNKILLABLE_SECONDS):
            attempt_id = self.assignment.attempt_id
            threads.log(f"a process of attempt {attempt_id} survived SIGKILL; trying again")

    @property
    def _processes(self) -> processes.ProcessSet:
        own = str(self.folder.run)
        return processes.ProcessSet(
            sessions=[step.session for step in self._steps],
            owns_run_dir=lambda run_dir: run_dir == own,
            container=self._container,
        )

    def _environment(
        self, base_env: Mapping[str, str] | None = None, local: int = 0
    ) -> dict[str, str]:
        own = self._context.base_env if base_env is None else base_env
        python = self._python
        environ = environment_variables.for_workload(
            replace(self.assignment, secrets=self._secrets),
            self._context.settings,
            base_env={
                name: value
                for name, value in own.items()
                if python is None or name not in python_environment.PYTHON_VARIABLES
            },
            attempt_folder=self.folder.path,
            agent_bin_dir="" if python or self._image else self._context.agent_bin_dir,
            local=local,
        )
        if self._compiled is not None:
            kept = compiled_programs.variables(self._compiled, self.assignment, environ)
            environ = kept | environ
        if self._local is not None:
            environ[attempt_folder.LOCAL_VARIABLE] = str(self._local / str(local))
        return environ if python is None else environ | python.variables(environ)

    def _send_log(self, offset: int, data: bytes) -> int:
        return self._context.client.send_log(
            self.assignment.attempt_id, self._context.settings.host_id, offset, data
        )

    def _waiting_for_server(self) -> bool:
        """The exit cannot be reported now, and once it is, the host with the log may go away."""
        return self._wait_for_server and not self._context.client.reachable

    def _upload_result(self) -> None:
        """Before the exit is reported: clients that see it may ask for the result at once."""
        data = results.read_result(self.folder.path)
        if data is None:
            return
        data = results.redact_result(data, self._redactor)
        results.upload_result(
            lambda: self._context.client.send_result(
                self.assignment.attempt_id, self._context.settings.host_id, data
            ),
            RESULT_UPLOAD_TIMEOUT_SECONDS,
            self._waiting_for_server,
        )

    def _open_progress(self, log: LogFile) -> ProgressReader:
        checkpoint = self.assignment.checkpoint
        if "://" in checkpoint and self.assignment.process_id != 0:
            checkpoint = ""  # one host of the gang lists a bucket
        return ProgressReader(
            self.folder.path,
            checkpoint,
            clock=self._context.clock,
            log_metrics=LogMetrics(log, self.assignment.metrics),
            list_folder=lambda path: self._containment.list_folder(path, checkpoint),
            last_step=self.assignment.last_step,
            log_size=lambda: log.size,
        )

    def _exit_without_process(self, message: str, *, stopped: bool = False) -> Exit:
        return Exit(
            at=self._now(),
            during_setup=True,
            status=None if stopped else 1,
            stopped_by_agent=stopped,
            log_line=message,
        )

    def _now(self) -> datetime:
        return self._context.clock.now()

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._context.on_phase_change()


def _on_one_line(argv: tuple[str, ...]) -> str:
    return shlex.join(argv).replace("\n", "\\n")[:1000]


def _before_the_program(exit: Exit, log: LogFile, step_start: int, in_image: bool) -> Exit:
    """A failure of Docker itself, such as an image that cannot be pulled, is not the program's, nor
    is a host that cannot mount."""
    if exit.status not in (container_image.DOCKER_FAILED, mounts.FAILED):
        return exit
    lines = log.tail(exit_diagnosis.TAIL_LINES, step_start)
    prefixes = (mounts.ERROR_PREFIX, *([container_image.ERROR_PREFIX] if in_image else []))
    error = next((line.strip()[:500] for line in lines if line.startswith(prefixes)), "")
    return replace(exit, during_setup=True, log_line=error) if error else exit
