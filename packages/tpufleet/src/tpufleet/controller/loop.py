"""One tick: observe → plan → commit → act. And the thread that runs ticks when something changed.

The four steps are separate, so that a test can stop between any two of them.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from datetime import timedelta

from tpufleet.clocks import Clock
from tpufleet.controller.host_silence import HostSilence
from tpufleet.controller.leadership import Installation, LeadershipTerm
from tpufleet.controller.observe import Observation
from tpufleet.controller.placement_inputs import ControllerSettings
from tpufleet.errors import DatabaseUnreachable, Fenced, Unreachable, unexpected
from tpufleet.model.fleet.hosts import host_id
from tpufleet.model.fleet.server_status import CONTROLLER_REPORT, ControllerReport
from tpufleet.model.fleet.slices import SliceId, SliceState
from tpufleet.model.values import encoding
from tpufleet.providers.base import Provider
from tpufleet.stores.base import ChangeSet, Store

log = logging.getLogger("tpufleet.controller")

LEASE = "controller"
# Another server acts within 10 s of the death of this one: the lease, a look a second, and loading
# the state of a large fleet.
LEASE_TTL = timedelta(seconds=6)
RENEW_INTERVAL = timedelta(seconds=2)
# A thread renews the lease during a tick, which may take longer than the lease. One that takes this
# long hangs: another server shall act.
LONGEST_TICK = timedelta(minutes=1)
# A tick ends within this even when the database does not respond.
STOP_TIMEOUT = timedelta(seconds=15)
# Between two ticks the API has the interpreter to itself for twice as long as the tick took, and
# whatever arrives meanwhile is handled together. Seconds.
MIN_REST, MAX_REST = 0.02, 0.25
# When nothing changes, tick anyway.
MAX_TICK_INTERVAL = timedelta(seconds=1)
# What happens within this time is handled together, and whoever caused it has its answer before.
GATHER_SECONDS = 0.005


class Controller:
    def __init__(
        self,
        store: Store,
        providers: Mapping[str, Provider],
        clock: Clock,
        *,
        executor: Executor,
        holder: str,
        fleet: str,
        server_url: str,
        ca_certificates: str = "",
        slice_token: Callable[[SliceId], str],
        bootstrap_token: Callable[[SliceId], str],
        settings: ControllerSettings | None = None,
        new_name: Callable[[], str] = lambda: secrets.token_hex(4),
        on_commit: Callable[[ChangeSet], None] = lambda change: None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._holder = holder
        self._on_commit = on_commit
        default_settings = ControllerSettings(
            default_providers=tuple(providers),
            zones_by_provider={name: provider.zones for name, provider in providers.items()},
        )
        self._installation = Installation(
            store=store,
            providers=providers,
            clock=clock,
            executor=executor,
            fleet=fleet,
            server_url=server_url,
            ca_certificates=ca_certificates,
            slice_token=slice_token,
            bootstrap_token=bootstrap_token,
            settings=settings or default_settings,
            new_name=new_name,
        )
        self._silence = HostSilence(
            store, clock, self._installation.settings.max_hosts_lost_percent
        )
        self._term: LeadershipTerm | None = None  # None: another controller may be leading
        self._clock_step = timedelta(0)  # not yet recorded with the attempts that run
        self._changed = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._renewal: threading.Thread | None = None
        self._holds_lease = False
        self._started_at = clock.now()
        self._url_compared = False
        self._tick_started = clock.uptime()
        for provider in providers.values():
            provider.on_change(self._provider_changed)

    # One tick.
    def tick(self) -> bool:
        """True when it held the lease and acted. After an error the next tick starts over from the
        store: what is in memory may no longer match it."""
        self._tick_started = self._clock.uptime()
        if self._term is not None and (step := self._silence.clock_step()):
            log.warning(
                "the clock was set by %+.0f s; timers, backoffs and grace periods start again",
                step.total_seconds(),
            )
            self._term, self._clock_step = None, step
        try:
            if not self.hold_lease():
                self._clock_step = timedelta(0)  # the leader accounts for it
                return False
            if self._clock_step:
                self._current_term().account_for_clock_step(self._clock_step)
            observation = self.observe()
            change = self.plan(observation)
            self.commit(change)
            self._clock_step = timedelta(0)
            self.act()
            self._silence.tick_succeeded()
        except BaseException:
            self._term = None
            raise
        return True

    def hold_lease(self) -> bool:
        """Acquire or renew the lease. A new lease starts a new term."""
        now, term = self._clock.now(), self._term
        if term is not None and now - term.renewed_at < RENEW_INTERVAL:
            return True
        shared_now = self._store.time() or now
        lease = self._store.acquire_lease(LEASE, self._holder, LEASE_TTL, shared_now)
        self._holds_lease = lease is not None
        if term is not None and lease is not None and lease.token == term.lease.token:
            term.lease, term.renewed_at = lease, now
            return True
        if term is not None:  # as after this process or its machine was suspended
            silent = (now - term.renewed_at).total_seconds()
            log.warning("lost the lease; it was last renewed %.0f s ago", silent)
        if lease is None:
            self._term = None
            self._compare_url_with_leader()
            return False
        self._term = LeadershipTerm(self._installation, lease, now, self._silence, self.wake)
        log.info("took over as %s with token %s", self._holder, lease.token)
        return True

    def _compare_url_with_leader(self) -> None:
        """Once, with a report of after our start: an earlier one may be of a server that ended."""
        if self._url_compared:
            return
        text = self._store.metadata(CONTROLLER_REPORT)
        leader = encoding.from_json(text, ControllerReport) if text else None
        if leader is None or leader.reported_at <= self._started_at:
            return
        self._url_compared = True
        own = self._installation.server_url
        if leader.server_url and leader.server_url != own:
            log.warning(
                "hosts connect only to the server that requested their slice: the leader's to %s, "
                "this one's to %s; when it stops, their jobs are lost and run again. Set the same "
                "public_url on all servers, such as that of a load balancer",
                leader.server_url,
                own,
            )

    def observe(self) -> Observation:
        return self._current_term().observe()

    def plan(self, observation: Observation) -> ChangeSet:
        return self._current_term().plan(observation)

    def commit(self, change: ChangeSet) -> None:
        if not change:
            return
        term = self._current_term()
        self._store.commit(change, fence=term.lease)
        term.committed(change)
        gone = [
            host_id(tpu_slice.id, host.index)
            for tpu_slice in change.slices
            if tpu_slice.state is SliceState.GONE
            for host in self._store.hosts(tpu_slice.id)
        ]
        if gone:
            self._store.delete_heartbeats(gone)
        self._on_commit(change)

    def act(self) -> None:
        self._current_term().act()

    def _current_term(self) -> LeadershipTerm:
        if self._term is None:
            raise Fenced(f"{self._holder} does not hold the lease {LEASE!r}")
        return self._term

    # The thread.
    def wake(self) -> None:
        """Tick soon. Safe from any thread."""
        self._changed.set()

    def wake_if_leading(self) -> None:
        """Tick soon, unless another controller acts. Safe from any thread."""
        if self._term is not None:
            self.wake()

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)
        self._thread.start()
        self._renewal = threading.Thread(
            target=self._renew_lease, name="controller lease", daemon=True
        )
        self._renewal.start()

    def stop(self) -> None:
        self._stopping.set()
        self._changed.set()
        for thread in (self._thread, self._renewal):
            if thread is not None:
                thread.join(timeout=STOP_TIMEOUT.total_seconds())
        if self._term is not None:
            try:
                self._store.release_lease(self._term.lease)
            except Unreachable as error:
                log.warning("cannot release the lease; it expires by itself: %s", error)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._changed.clear()
            started = time.monotonic()
            try:
                self.tick()
            except Fenced:
                log.warning("another controller has taken over")
            except DatabaseUnreachable:
                pass  # logged by its store
            except Exception:
                log.exception(unexpected("running a controller tick"))
            rest = 2 * (time.monotonic() - started)
            self._stopping.wait(min(max(rest, MIN_REST), MAX_REST))
            if self._changed.wait(self._seconds_until_due()):
                self._stopping.wait(GATHER_SECONDS)

    def _renew_lease(self) -> None:
        while not self._stopping.wait(RENEW_INTERVAL.total_seconds()):
            if not self._holds_lease or self._clock.uptime() - self._tick_started > LONGEST_TICK:
                continue
            try:
                now = self._store.time() or self._clock.now()
                # When another holder has it, the next commit is fenced and the next tick finds out.
                self._store.acquire_lease(LEASE, self._holder, LEASE_TTL, now)
            except DatabaseUnreachable:
                continue  # logged by its store
            except Exception as error:
                log.warning("cannot renew the lease; retrying in %s: %s", RENEW_INTERVAL, error)

    def _seconds_until_due(self) -> float:
        longest = MAX_TICK_INTERVAL.total_seconds()
        due = self._term.next_due_at() if self._term is not None else None
        if due is None:
            return longest
        return max(0.0, min((due - self._clock.now()).total_seconds(), longest))

    def _provider_changed(self) -> None:
        term = self._term
        if term is not None:
            term.list_soon()
        self.wake()
