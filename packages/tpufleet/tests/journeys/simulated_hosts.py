"""Simulated programs and the hosts that run them, on a manual clock.

A simulated host uses the real service as an agent does: it sends a heartbeat and gets an
assignment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from tpufleet.model.fleet.agent_protocol import Assignment, Heartbeat, HeartbeatReply
from tpufleet.model.fleet.hosts import Exit, HostId, NoticeKind, Phase, Progress, host_id
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.attempts import AttemptId, Startup
from tpufleet.model.job.end_reasons import EndReason

ABORT = timedelta(seconds=1)  # between SIGTERM and SIGKILL when another process is gone


@dataclass
class Program:
    """The behaviour of a job's command: one step per second of virtual time."""

    steps: int = 60
    checkpoint_every: int = 10
    setup: timedelta = timedelta(seconds=2)
    checkpoint_on_stop: bool = True
    stops_after: timedelta = timedelta(seconds=2)  # between SIGTERM and the exit
    fails: Callable[[int, int, int], Exit | None] = lambda attempt, process, step: None
    setup_fails: Callable[[int, int], bool] = lambda attempt, process: False
    ignores_stop: bool = False
    silent: bool = False  # reports no progress
    stuck_at: int | None = None


@dataclass
class Disk:
    """The checkpoint location of each job; it survives every slice."""

    steps: dict[str, int] = field(default_factory=dict)
    done: dict[str, list[tuple[AttemptId, int]]] = field(default_factory=dict)


@dataclass
class Workload:
    assignment: Assignment
    began: datetime
    step: int
    phase: Phase = Phase.SETUP
    running_since: datetime | None = None
    stop_at: datetime | None = None
    aborted: bool = False
    exit: Exit | None = None
    progress_at: datetime | None = None
    first_at: datetime | None = None  # of its first step
    advanced_at: datetime | None = None  # of its first step beyond earlier attempts


class SimulatedHost:
    """The agent of one host, and its workload."""

    def __init__(self, slice_id: SliceId, index: int, boot: str) -> None:
        self.id: HostId = host_id(slice_id, index)
        self.slice_id = slice_id
        self.index = index
        self.boot = boot
        self.sent = 0
        self.workload: Workload | None = None
        self.notice: NoticeKind | None = None
        self.stalled = False
        self.left = False
        self.last_reply: datetime | None = None
        self.lease = timedelta(minutes=10)

    @property
    def runs(self) -> AttemptId | None:
        """The attempt whose processes run here."""
        alive = self.workload is not None and self.workload.exit is None
        return self.workload.assignment.attempt_id if alive else None

    def heartbeat(self, now: datetime, disk: Disk) -> Heartbeat:
        self.sent += 1
        workload = self.workload
        progress = None
        if workload and workload.progress_at:
            progress = Progress(
                step=workload.step,
                checkpoint_step=disk.steps.get(workload.assignment.checkpoint),
                at=workload.progress_at,
            )
        return Heartbeat(
            host_id=self.id,
            boot=self.boot,
            at=now,
            address=f"10.0.0.{self.index}",
            coordinator_port=8476,
            phase=workload.phase if workload else Phase.IDLE,
            attempt_id=workload.assignment.attempt_id if workload else None,
            exit=workload.exit if workload else None,
            notice=self.notice,
            progress=progress,
            seq=self.sent,
            startup=self._startup(),
        )

    def _startup(self) -> Startup | None:
        workload = self.workload
        if workload is None or workload.running_since is None or workload.assignment.process_id:
            return None
        return Startup(
            assigned_at=workload.began,
            started_at=workload.running_since,
            stepped_at=workload.first_at,
            advanced_at=workload.advanced_at,
        )

    def apply_reply(self, reply: HeartbeatReply, now: datetime) -> None:
        self.last_reply, self.lease = now, reply.lease
        wanted = reply.assignment
        workload = self.workload
        if workload and (wanted is None or wanted.attempt_id != workload.assignment.attempt_id):
            if workload.exit is None:
                self._stop(now)
                return
            self.workload = workload = None
        if reply.release and workload is None:
            self.left = True
        if wanted is None:
            return
        if workload is None:
            self.workload = Workload(assignment=wanted, began=now, step=0)
            if wanted.stop:
                self.workload.phase = Phase.EXITED
                self.workload.exit = Exit(at=now, stopped_by_agent=True, log_line="never started")
        elif wanted.stop and workload.exit is None:
            workload.aborted = wanted.abort
            self._stop(now)

    def run_second(self, now: datetime, program: Program, disk: Disk, gang_runs: bool) -> None:
        """Advance this host by one second."""
        workload = self.workload
        if workload is None or workload.exit is not None:
            return
        if self.notice or (self.last_reply and now - self.last_reply > self.lease):
            self._stop(now)
        if workload.stop_at is not None:
            self._stopping(workload, now, program, disk)
        elif workload.phase is Phase.SETUP:
            self._setup(workload, now, program, disk)
        elif gang_runs:
            self._step(workload, now, program, disk)

    def _stop(self, now: datetime) -> None:
        if self.workload and self.workload.stop_at is None:
            self.workload.stop_at = now
            self.workload.phase = Phase.STOPPING

    def _stopping(self, workload: Workload, now: datetime, program: Program, disk: Disk) -> None:
        assert workload.stop_at is not None
        waited = now - workload.stop_at
        aborted = workload.aborted and waited >= ABORT
        killed = waited >= workload.assignment.grace or aborted
        # Processes are joined by collectives: without all of them, none can leave by itself.
        leaves = waited >= program.stops_after and not (program.ignores_stop or workload.aborted)
        if not (killed or leaves):
            return
        if leaves and program.checkpoint_on_stop and workload.running_since:
            self._checkpoint(workload, disk)
        self._exit(
            workload,
            Exit(
                at=now,
                status=None if killed and not leaves else 1,  # 0 would mean that it is done
                signal=9 if killed and not leaves else None,
                stopped_by_agent=True,
            ),
        )

    def _setup(self, workload: Workload, now: datetime, program: Program, disk: Disk) -> None:
        if now - workload.began < program.setup:
            return
        number, process = workload.assignment.number, workload.assignment.process_id
        if program.setup_fails(number, process):
            self._exit(
                workload, Exit(at=now, during_setup=True, status=1, log_line="no such package")
            )
            return
        workload.phase = Phase.RUNNING
        workload.running_since = now
        workload.step = disk.steps.get(workload.assignment.checkpoint, 0)

    def _step(self, workload: Workload, now: datetime, program: Program, disk: Disk) -> None:
        if program.stuck_at is not None and workload.step >= program.stuck_at:
            return
        number, process = workload.assignment.number, workload.assignment.process_id
        failed = program.fails(number, process, workload.step)
        if failed is not None:
            self._exit(workload, failed)
            return
        workload.step += 1
        if not program.silent:
            workload.progress_at = now
            workload.first_at = workload.first_at or now
            if workload.step > (workload.assignment.last_step or 0):
                workload.advanced_at = workload.advanced_at or now
        if workload.step % program.checkpoint_every == 0:
            self._checkpoint(workload, disk)
        if workload.step >= program.steps:
            if process == 0:
                job = workload.assignment.job_id
                done = disk.done.setdefault(job, [])
                done.append((workload.assignment.attempt_id, workload.step))
            self._exit(workload, Exit(at=now, status=0))

    def _checkpoint(self, workload: Workload, disk: Disk) -> None:
        where = workload.assignment.checkpoint
        disk.steps[where] = max(disk.steps.get(where, 0), workload.step)

    def _exit(self, workload: Workload, exit: Exit) -> None:
        workload.exit = exit
        workload.phase = Phase.EXITED


def failure(now: datetime, *, status: int = 1, evidence: EndReason | None = None, **more) -> Exit:
    return Exit(at=now, status=status, evidence=evidence, **more)
