"""What the agent's loop hears of: other threads put it into its inbox.

The agent's loop: say where this host stands, hear what it is to run, make the two agree.

Level-triggered. One thread decides; the others carry news to its inbox and beats from its outbox."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Event

from tpufleet.agent import threads
from tpufleet.agent.host_commands import HostCommandRunner
from tpufleet.agent.notices import NoticeWatcher
from tpufleet.agent.threads import uptime
from tpufleet.agent.workload import attempt_folder
from tpufleet.agent.workload.runner import AgentContext, Workload
from tpufleet.clocks import jittered
from tpufleet.errors import FleetError, Forbidden, Unauthorized
from tpufleet.model.agent_protocol import Assignment, Heartbeat, HeartbeatReply
from tpufleet.model.attempts import AttemptId
from tpufleet.model.end_reasons import END_REASONS, EndReason
from tpufleet.model.hosts import NoticeKind, Phase


@dataclass(frozen=True, slots=True)
class HeartbeatAnswered:
    number: int
    beat: Heartbeat
    sent_at: float
    reply: HeartbeatReply


@dataclass(frozen=True, slots=True)
class HeartbeatFailed:
    number: int
    error: Exception


@dataclass(frozen=True, slots=True)
class NoticeReceived:
    kind: NoticeKind


@dataclass(frozen=True, slots=True)
class PhaseChanged:
    """A workload entered another phase."""


@dataclass(frozen=True, slots=True)
class ShutdownRequested:
    pass


InboxMessage = (
    HeartbeatAnswered | HeartbeatFailed | NoticeReceived | PhaseChanged | ShutdownRequested
)


EXIT_RELEASED = 0
EXIT_TERMINATED = (
    128 + signal.SIGTERM
)  # exit status when the machine is taken: this host's work is not done
EXIT_REJECTED = 3  # exit status when the control plane no longer knows us
SENDERS = 2  # a notice must go out also while another beat hangs
SLOWEST_RETRY_SECONDS = 5.0
REMEMBERED = 100  # attempts; enough that an answer from long ago cannot start one again
# How long a leaving agent tries to deliver its last report.
FAREWELL_SECONDS = 5.0


class Agent:
    def __init__(
        self,
        context: AgentContext,
        inbox: SimpleQueue[InboxMessage],
        notice_watcher: NoticeWatcher,
        boot_id: str,
    ) -> None:
        self._given = context
        self._inbox = inbox
        self._outbox: SimpleQueue[tuple[int, Heartbeat] | None] = SimpleQueue()  # None: no more
        self._watcher = notice_watcher
        self._errands = HostCommandRunner(
            context.settings.host_id,
            context.settings.work_dir,
            context.base_env,
            context.clock,
            context.client.send_command_result,
        )
        self._boot = boot_id
        self._workload: Workload | None = None
        self._past: dict[AttemptId, Workload] = {}  # an attempt never runs twice
        self._notice: NoticeKind | None = None
        self._sent = 0  # beats are numbered, so that a late answer cannot undo a newer one
        self._said: tuple[object, ...] = ()
        self._in_flight: set[int] = set()
        self._answered = 0
        self._failures = 0
        self._due = uptime()
        self._lease: timedelta | None = None
        self._heard = uptime()  # when the last beat that was answered was sent
        self._leaving: int | None = None  # the exit status
        self._leave_by: float | None = None  # known once nothing runs any more
        self._farewell = 0  # the first beat after that

    def run(self) -> int:
        ended = Event()
        for index in range(SENDERS):
            threads.start(f"sender {index}", self._deliver)
        threads.start("notices", lambda: self._watcher.watch(self._see, ended))
        while not self._may_leave():
            try:
                self._beat_if_due()
                self._take_news()
                self._mind_the_lease()
            except Exception:
                threads.log_exception("the loop stumbled and goes on")
                time.sleep(0.5)
        ended.set()
        for _ in range(SENDERS):
            self._outbox.put(None)
        return self._leaving or EXIT_RELEASED

    def _see(self, kind: NoticeKind) -> None:
        self._inbox.put(NoticeReceived(kind))

    def _deliver(self) -> None:
        for number, beat in iter(self._outbox.get, None):
            sent_at = uptime()
            try:
                self._inbox.put(
                    HeartbeatAnswered(
                        number, beat, sent_at, self._given.client.send_heartbeat(beat)
                    )
                )
            except Exception as error:
                if not isinstance(error, FleetError):
                    threads.log_exception("a beat could not be sent")
                self._inbox.put(HeartbeatFailed(number, error))

    def _take_news(self) -> None:
        try:
            news = self._inbox.get(timeout=self._patience())
        except Empty:
            return
        match news:
            case HeartbeatAnswered():
                self._hear(news)
            case HeartbeatFailed():
                self._go_without(news)
            case NoticeReceived(kind):
                self._heed(kind)
            case PhaseChanged():
                pass  # the loop compares what is with what was last said
            case ShutdownRequested():
                self._go()

    def _patience(self) -> float:
        """How long nothing needs doing unless news come."""
        moments = [uptime() + SLOWEST_RETRY_SECONDS]
        if not self._in_flight and self._leaving != EXIT_REJECTED:
            moments.append(self._due)
        if self._lease is not None and self._workload and not self._lease_is_lost():
            moments.append(self._heard + self._lease.total_seconds())
        if self._leave_by is not None:
            moments.append(self._leave_by)
        return max(0.01, min(moments) - uptime())

    # Speaking

    def _beat_if_due(self) -> None:
        if self._in_flight or self._leaving == EXIT_REJECTED:
            return
        # News do not wait, unless the control plane is away: then they wait for the next try.
        has_news = self._outline(self._standing()) != self._said
        says_farewell = self._leave_by is not None and not self._farewell
        if uptime() >= self._due or ((has_news or says_farewell) and not self._failures):
            self._send()

    def _send(self) -> None:
        self._sent += 1
        self._in_flight.add(self._sent)
        beat = self._standing()
        self._said = self._outline(beat)
        if self._leave_by is not None and not self._farewell:
            self._farewell = self._sent
        self._outbox.put((self._sent, beat))

    @staticmethod
    def _outline(beat: Heartbeat) -> tuple[object, ...]:
        """The part of a beat that is news when it changes."""
        return beat.phase, beat.attempt_id, beat.notice

    def _standing(self) -> Heartbeat:
        settings, workload = self._given.settings, self._workload
        # The phase is read first: once it says EXITED, the exit is there.
        phase = workload.phase if workload else Phase.IDLE
        return Heartbeat(
            host_id=settings.host_id,
            boot=self._boot,
            at=self._given.clock.now(),
            address=settings.address,
            coordinator_port=settings.coordinator_port,
            phase=phase,
            attempt_id=workload.assignment.attempt_id if workload else None,
            exit=workload.exit if workload and phase is Phase.EXITED else None,
            notice=self._notice,
            progress=workload.progress if workload else None,
        )

    # Hearing

    def _hear(self, news: HeartbeatAnswered) -> None:
        self._in_flight.discard(news.number)
        if news.number < self._answered:
            return
        if self._failures:
            threads.log("the control plane answers again")
        self._answered = news.number
        self._failures = 0
        self._heard = news.sent_at
        self._lease = news.reply.lease
        self._due = uptime() + jittered(news.reply.next_heartbeat.total_seconds(), minimum=0.9)
        self._errands.start_new(news.reply.host_commands)
        if news.reply.release:
            self._leave(EXIT_RELEASED, "the slice was released")
        elif not self._lease_is_lost():
            self._reconcile(news.reply.assignment, told=news.beat)

    def _go_without(self, news: HeartbeatFailed) -> None:
        self._in_flight.discard(news.number)
        if news.number < self._answered:
            return
        if isinstance(news.error, Unauthorized | Forbidden):
            threads.log(f"this slice is not ours any more: {news.error}")
            self._leave(EXIT_REJECTED, "the control plane no longer knows this slice")
            return
        if not self._failures:
            threads.log(f"a beat was not answered: {news.error}")
        self._failures += 1
        pause = min(SLOWEST_RETRY_SECONDS, 0.2 * 2 ** min(self._failures, 10))
        self._due = uptime() + jittered(pause)

    def _mind_the_lease(self) -> None:
        if self._lease_is_lost() and self._workload and not self._workload.finished:
            assert self._lease is not None
            seconds = self._lease.total_seconds()
            self._workload.stop(f"the lease was lost: no control plane answered for {seconds:g} s")

        waits, waited = self._given.settings.server_timeout_seconds, uptime() - self._heard
        if waits is not None and waited > waits and self._leaving is None:
            threads.log(f"no control plane answered for {waits:g} s; this agent gives up")
            self._leave(EXIT_REJECTED, "the control plane did not come back")

    def _lease_is_lost(self) -> bool:
        return self._lease is not None and uptime() - self._heard > self._lease.total_seconds()

    # Acting

    def _reconcile(self, wanted: Assignment | None, told: Heartbeat) -> None:
        current = self._workload
        if current and (wanted is None or wanted.attempt_id != current.assignment.attempt_id):
            if not current.finished:
                current.stop("the control plane no longer assigns it to this host")
            if told.exit is None or told.attempt_id != current.assignment.attempt_id:
                return  # how it ended must be told once before it is put away
            self._retire(current)
            current = None
        if wanted is None:
            return
        if current is None:
            current = self._take_on(wanted)
        if wanted.stop is not None:
            current.stop(END_REASONS[wanted.stop].description)

    def _take_on(self, wanted: Assignment) -> Workload:
        workload = self._past.get(wanted.attempt_id)
        if workload is None:
            workload = Workload(wanted, self._given)
            if self._leaving is not None:
                workload.stop_waiting_for_server()
                workload.stop("the agent is leaving")
            if self._notice is not None:
                workload.stop(f"this host got notice: {self._notice}")
            if wanted.stop is not None:
                workload.stop(END_REASONS[wanted.stop].description)
            workload.start()
        self._workload = workload
        return workload

    def _retire(self, workload: Workload) -> None:
        """Its end was taken note of. Keep its folder for a look, and none older."""
        self._workload = None
        for old in self._past.values():
            if old is not workload:
                old.abandon_upload()
        workload.drop_secrets()
        self._past[workload.assignment.attempt_id] = workload
        for attempt_id in list(self._past)[:-REMEMBERED]:
            del self._past[attempt_id]
        old_folders = attempt_folder.other_attempt_folders(
            self._given.settings.work_dir, keep=workload.folder.path
        )
        threads.start("cleaning", lambda: attempt_folder.delete_folders(old_folders))

    def _heed(self, kind: NoticeKind) -> None:
        self._notice = kind
        if self._workload:
            self._workload.stop(f"this host got notice: {kind}")
        self._send()  # also while another beat hangs

    def _go(self) -> None:
        """Told to end. Where only the cloud says so, it takes the machine, or had enough of us."""
        settings, why = self._given.settings, "the agent was told to end"
        if settings.sigterm_notice is None:
            self._leave(EXIT_RELEASED, why)
            return
        overused = attempt_folder.overused(settings.scratch_dir, settings.scratch_limit_bytes)
        if not overused:
            self._heed(settings.sigterm_notice)
        elif self._workload:
            self._workload.stop(overused, EndReason.DISK_FULL)
        self._leave(EXIT_TERMINATED, why)

    def _leave(self, status: int, why: str) -> None:
        if self._leaving not in (EXIT_REJECTED, EXIT_TERMINATED):
            self._leaving = status
        if self._workload:
            self._workload.stop_waiting_for_server()
            self._workload.stop(why)

    def _may_leave(self) -> bool:
        if self._leaving is None or (self._workload and not self._workload.finished):
            return False
        if self._leaving == EXIT_REJECTED or self._workload is None:
            return True  # nobody to tell, or nothing to tell
        if self._leave_by is None:
            self._leave_by = self._due = uptime()
            self._leave_by += FAREWELL_SECONDS
        told = self._farewell and self._answered >= self._farewell
        return bool(told) or uptime() > self._leave_by
