"""The agent's main loop: send heartbeats, receive the assignment, make this host match it.

Level-triggered. One thread decides; the others put messages into its inbox and send the heartbeats
from its outbox.
"""

from __future__ import annotations

import signal
import time
from datetime import datetime, timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event

import msgspec

from tpufleet.agent import threads
from tpufleet.agent.host_commands import HostCommandRunner
from tpufleet.agent.notices import WatchNotices
from tpufleet.agent.threads import uptime
from tpufleet.agent.workload import attempt_folder
from tpufleet.agent.workload.runner import AgentContext, Workload
from tpufleet.backoff import Backoff
from tpufleet.client.agents import UnreadableHeartbeat
from tpufleet.clocks import jittered
from tpufleet.errors import FleetError, Forbidden, Unauthorized, unexpected
from tpufleet.model.fleet.agent_protocol import PROTOCOL, Assignment, Heartbeat, HeartbeatReply
from tpufleet.model.fleet.hosts import NoticeKind, Phase, ProgressPoint
from tpufleet.model.job.attempts import AttemptId
from tpufleet.model.job.end_reasons import END_REASONS, EndReason

# Exit statuses.
EXIT_RELEASED = 0
EXIT_TERMINATED = 128 + signal.SIGTERM  # the machine is taken; the work of this host is not done
EXIT_REJECTED = 3  # the server does not know this host any more

SENDER_THREADS = 2  # a notice must go out even while another heartbeat hangs
INITIAL_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.4, 5.0
REMEMBERED_ATTEMPTS = 100  # so that a delayed reply cannot start an old attempt again
# How long an exiting agent tries to deliver its last heartbeat.
FINAL_HEARTBEAT_SECONDS = 5.0


class HeartbeatAnswered(msgspec.Struct, frozen=True):
    number: int
    heartbeat: Heartbeat
    sent_at: float
    reply: HeartbeatReply


class HeartbeatFailed(msgspec.Struct, frozen=True):
    number: int
    sent_at: float
    error: Exception


class NoticeReceived(msgspec.Struct, frozen=True):
    kind: NoticeKind


class PhaseChanged(msgspec.Struct, frozen=True):
    """The workload entered another phase."""


class ShutdownRequested(msgspec.Struct, frozen=True):
    """SIGTERM or SIGINT."""


InboxMessage = (
    HeartbeatAnswered | HeartbeatFailed | NoticeReceived | PhaseChanged | ShutdownRequested
)


class Agent:
    def __init__(
        self,
        context: AgentContext,
        inbox: SimpleQueue[InboxMessage],
        watch_notices: WatchNotices | None,  # None: the host receives none
        boot_id: str,
    ) -> None:
        self._context = context
        self._inbox = inbox
        # None ends a sender thread.
        self._outbox: SimpleQueue[tuple[int, Heartbeat] | None] = SimpleQueue()
        self._watch_notices = watch_notices
        self._host_commands = HostCommandRunner(
            context.settings.host_id,
            context.settings.work_dir,
            context.base_env,
            context.clock,
            context.client.send_command_result,
            context.client.send_command_file,
            self._running_attempt,
        )
        self._boot_id = boot_id
        self._workload: Workload | None = None
        self._past: dict[AttemptId, Workload] = {}  # an attempt never runs twice
        self._notice: NoticeKind | None = None
        self._omit_progress = False  # the server could not read it
        # The attempt and the time of the last point that the server has.
        self._points_sent: tuple[AttemptId | None, datetime | None] = (None, None)
        self._last_sent = 0  # heartbeats are numbered: a delayed reply cannot undo a newer one
        self._last_sent_state: tuple[object, ...] = ()
        self._in_flight: set[int] = set()
        self._last_answered = 0
        self._backoff = Backoff(first=INITIAL_RETRY_SECONDS, longest=MAX_RETRY_SECONDS)
        self._next_heartbeat_at = uptime()
        self._interval = INITIAL_RETRY_SECONDS  # between two heartbeats
        self._lease: timedelta | None = None
        self._lease_renewed_at = uptime()  # when the last answered heartbeat was sent
        self._exit_status: int | None = None  # set once the agent is to exit
        self._exit_deadline: float | None = None  # set once no workload runs any more
        self._final_heartbeat = 0  # number of the first heartbeat sent after that

    def run(self) -> int:
        stopped = Event()
        for index in range(SENDER_THREADS):
            threads.start(f"heartbeat sender {index}", self._send_heartbeats)
        if (watch := self._watch_notices) is not None:
            threads.start("notices", lambda: watch(self._put_notice, stopped))
        while not self._may_exit():
            try:
                self._send_if_due()
                self._handle_next_message()
                self._check_lease()
            except Exception:
                threads.log_exception("unexpected error in agent loop; continuing")
                time.sleep(0.5)
        stopped.set()
        for _ in range(SENDER_THREADS):
            self._outbox.put(None)
        return self._exit_status or EXIT_RELEASED

    def _running_attempt(self) -> Path | None:
        workload = self._workload
        running = workload is not None and workload.phase is Phase.RUNNING
        return workload.folder.path if workload is not None and running else None

    def _put_notice(self, kind: NoticeKind) -> None:
        self._inbox.put(NoticeReceived(kind))

    def _send_heartbeats(self) -> None:
        for number, heartbeat in iter(self._outbox.get, None):
            sent_at = uptime()
            try:
                reply = self._context.client.send_heartbeat(heartbeat)
                self._inbox.put(HeartbeatAnswered(number, heartbeat, sent_at, reply))
            except Exception as error:
                if not isinstance(error, FleetError):
                    threads.log_exception(unexpected("sending a heartbeat"))
                self._inbox.put(HeartbeatFailed(number, sent_at, error))

    def _handle_next_message(self) -> None:
        try:
            message = self._inbox.get(timeout=self._idle_seconds())
        except Empty:
            return
        match message:
            case HeartbeatAnswered():
                self._on_answer(message)
            case HeartbeatFailed():
                self._on_failure(message)
            case NoticeReceived(kind):
                self._on_notice(kind)
            case PhaseChanged():
                pass  # the loop compares the current state with what was last sent
            case ShutdownRequested():
                self._on_shutdown()

    def _idle_seconds(self) -> float:
        """How long nothing needs to be done unless a message arrives."""
        moments = [uptime() + MAX_RETRY_SECONDS]
        if not self._in_flight and self._exit_status != EXIT_REJECTED:
            moments.append(self._next_heartbeat_at)
        if self._lease is not None and self._workload and not self._lease_expired():
            moments.append(self._lease_renewed_at + self._lease.total_seconds())
        if self._exit_deadline is not None:
            moments.append(self._exit_deadline)
        return max(0.01, min(moments) - uptime())

    # Sending

    def _send_if_due(self) -> None:
        if self._in_flight or self._exit_status == EXIT_REJECTED:
            return
        # A change is sent at once, except during an outage: then it waits for the next retry.
        changed = self._reported_state(self._heartbeat()) != self._last_sent_state
        is_final = self._exit_deadline is not None and not self._final_heartbeat
        due = uptime() >= self._next_heartbeat_at
        if due or ((changed or is_final) and not self._backoff.failures):
            self._send()

    def _send(self) -> None:
        self._last_sent += 1
        self._in_flight.add(self._last_sent)
        heartbeat = self._heartbeat()
        self._last_sent_state = self._reported_state(heartbeat)
        if self._exit_deadline is not None and not self._final_heartbeat:
            self._final_heartbeat = self._last_sent
        self._outbox.put((self._last_sent, heartbeat))

    @staticmethod
    def _reported_state(heartbeat: Heartbeat) -> tuple[object, ...]:
        """The part of a heartbeat whose change is reported at once."""
        return heartbeat.phase, heartbeat.attempt_id, heartbeat.notice, heartbeat.environment

    def _heartbeat(self) -> Heartbeat:
        settings, workload = self._context.settings, self._workload
        # The phase is read first: once it is EXITED, the exit is set.
        phase = workload.phase if workload else Phase.IDLE
        return Heartbeat(
            host_id=settings.host_id,
            boot=self._boot_id,
            at=self._context.clock.now(),
            address=settings.address,
            coordinator_port=settings.coordinator_port,
            phase=phase,
            attempt_id=workload.assignment.attempt_id if workload else None,
            exit=workload.exit if workload and phase is Phase.EXITED else None,
            notice=self._notice,
            progress=workload.progress if workload and not self._omit_progress else None,
            protocol=PROTOCOL,
            seq=self._last_sent,
            environment=workload.environment if workload else None,
            startup=workload.startup if workload and not self._omit_progress else None,
            points=self._new_points(workload),
        )

    def _new_points(self, workload: Workload | None) -> tuple[ProgressPoint, ...]:
        """Of process 0, which reports for the whole job, since the last answered heartbeat."""
        if workload is None or self._omit_progress or workload.assignment.process_id != 0:
            return ()
        attempt_id, moment = self._points_sent
        return workload.points_after(
            moment if attempt_id == workload.assignment.attempt_id else None
        )

    # Receiving

    def _on_answer(self, message: HeartbeatAnswered) -> None:
        self._in_flight.discard(message.number)
        if message.number < self._last_answered:
            return
        if self._backoff.failures:
            threads.log("server reachable again")
        self._last_answered = message.number
        self._backoff.succeeded()
        if message.heartbeat.points:
            self._points_sent = (message.heartbeat.attempt_id, message.heartbeat.points[-1].at)
        reply = message.reply
        self._lease_renewed_at = message.sent_at
        self._lease = reply.lease
        self._interval = jittered(reply.next_heartbeat.total_seconds(), minimum=0.9)
        self._next_heartbeat_at = uptime() + self._interval
        self._host_commands.start_new(reply.host_commands)
        if reply.release:
            self._exit(EXIT_RELEASED, "the slice was released")
            if self._workload and reply.assignment and reply.assignment.abort:
                self._workload.abort()
        elif not self._lease_expired():
            self._reconcile(reply.assignment, reported=message.heartbeat)

    def _on_failure(self, message: HeartbeatFailed) -> None:
        self._in_flight.discard(message.number)
        if message.number < self._last_answered:
            return
        if isinstance(message.error, Unauthorized | Forbidden):
            threads.log(f"heartbeat rejected; stopping the workload: {message.error}")
            self._exit(EXIT_REJECTED, "the server no longer accepts this host")
            return
        if isinstance(message.error, UnreadableHeartbeat):
            # The server counts this host as alive, so the workload may run on. Progress is
            # what a workload writes; what is left comes from this agent.
            if not self._omit_progress:
                threads.log(f"the server cannot read heartbeats; continuing: {message.error}")
            self._omit_progress = True
            self._lease_renewed_at = message.sent_at
            self._next_heartbeat_at = uptime() + self._interval
            return
        if not self._backoff.failures:
            threads.log(f"heartbeat failed; retrying: {message.error}")
        self._next_heartbeat_at = uptime() + self._backoff.failed()

    def _check_lease(self) -> None:
        if self._lease_expired() and self._workload and not self._workload.finished:
            assert self._lease is not None
            self._workload.stop(_unreachable_for(self._lease.total_seconds()))
        timeout = self._context.settings.server_timeout_seconds
        elapsed = uptime() - self._lease_renewed_at
        if timeout is not None and elapsed > timeout and self._exit_status is None:
            threads.log(f"{_unreachable_for(timeout)}; exiting")
            self._exit(EXIT_REJECTED, _unreachable_for(timeout))

    def _lease_expired(self) -> bool:
        if self._lease is None:
            return False
        return uptime() - self._lease_renewed_at > self._lease.total_seconds()

    # Acting

    def _reconcile(self, wanted: Assignment | None, reported: Heartbeat) -> None:
        current = self._workload
        if current and (wanted is None or wanted.attempt_id != current.assignment.attempt_id):
            if not current.finished:
                current.stop("the server no longer assigns this attempt to this host")
            if reported.exit is None or reported.attempt_id != current.assignment.attempt_id:
                return  # its exit must be reported once before it is retired
            self._retire(current)
            current = None
        if wanted is None:
            return
        if current is None:
            current = self._start(wanted)
        if wanted.abort:
            current.abort()
        if wanted.stop is not None:
            current.stop(wanted.stop_message or END_REASONS[wanted.stop].description)

    def _start(self, wanted: Assignment) -> Workload:
        workload = self._past.get(wanted.attempt_id)
        if workload is None:
            workload = Workload(wanted, self._context)
            if self._exit_status is not None:
                workload.stop_waiting_for_server()
                workload.stop("the agent is shutting down")
            if self._notice is not None:
                workload.stop(f"host notice: {self._notice}")
            if wanted.stop is not None:
                workload.stop(wanted.stop_message or END_REASONS[wanted.stop].description)
            workload.start()
        self._workload = workload
        return workload

    def _retire(self, workload: Workload) -> None:
        """Its exit is on record. Keep its folder for inspection; delete all older ones."""
        self._omit_progress = False
        self._workload = None
        for old in self._past.values():
            if old is not workload:
                old.abandon_upload()
        workload.drop_secrets()
        self._past[workload.assignment.attempt_id] = workload
        for attempt_id in list(self._past)[:-REMEMBERED_ATTEMPTS]:
            del self._past[attempt_id]
        old_folders = attempt_folder.other_attempt_folders(
            self._context.settings.work_dir, keep=workload.folder.path
        )
        threads.start("cleanup", lambda: attempt_folder.delete_folders(old_folders))

    def _on_notice(self, kind: NoticeKind) -> None:
        self._notice = kind
        if self._workload:
            self._workload.stop(f"host notice: {kind}")
        self._send()  # even while another heartbeat is in flight

    def _on_shutdown(self) -> None:
        """SIGTERM. In a pod it means that the node is taken, or that the pod used too much disk."""
        settings, reason = self._context.settings, "the agent received SIGTERM"
        if settings.sigterm_notice is None:
            self._exit(EXIT_RELEASED, reason)
            return
        excess = None
        if settings.scratch_dir is not None:
            excess = attempt_folder.over_limit(settings.scratch_dir, settings.scratch_limit_bytes)
        if excess is None:
            self._on_notice(settings.sigterm_notice)
        elif self._workload:
            self._workload.stop(excess, EndReason.DISK_FULL)
        self._exit(EXIT_TERMINATED, reason)

    def _exit(self, status: int, reason: str) -> None:
        if self._exit_status not in (EXIT_REJECTED, EXIT_TERMINATED):
            self._exit_status = status
        if self._workload:
            self._workload.stop_waiting_for_server()
            self._workload.stop(reason)

    def _may_exit(self) -> bool:
        if self._exit_status is None or (self._workload and not self._workload.finished):
            return False
        if self._exit_status == EXIT_REJECTED or self._workload is None:
            return True  # the server does not listen, or there is nothing to report
        if self._exit_deadline is None:
            self._exit_deadline = self._next_heartbeat_at = uptime()
            self._exit_deadline += FINAL_HEARTBEAT_SECONDS
        delivered = self._final_heartbeat and self._last_answered >= self._final_heartbeat
        return bool(delivered) or uptime() > self._exit_deadline


def _unreachable_for(seconds: float) -> str:
    return f"server unreachable for {seconds:g} s"
