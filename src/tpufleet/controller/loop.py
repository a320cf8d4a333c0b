"""One tick: observe → plan → commit → act. And the thread that runs ticks when there is news.

The four steps are separate, so that a test can stop between any two of them.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from datetime import datetime, timedelta

from tpufleet.clocks import Clock
from tpufleet.controller.apply_observations import ObservationApplier
from tpufleet.controller.observe import Observation, Observer
from tpufleet.controller.provider_calls import CallKind, ProviderCalls
from tpufleet.controller.reconcile import ControllerSettings, Reconciler
from tpufleet.controller.working_set import WorkingSet
from tpufleet.errors import Fenced
from tpufleet.model.hosts import host_id
from tpufleet.model.slices import SliceId, SliceState, TpuSlice
from tpufleet.providers.base import Order, Provider
from tpufleet.stores.base import ChangeSet, Lease, Store

log = logging.getLogger("tpufleet.controller")

LEASE = "controller"
LEASE_TTL = timedelta(seconds=15)
RENEW_INTERVAL = timedelta(seconds=5)
LIST_INTERVAL = timedelta(seconds=5)
# Between two ticks the API has the interpreter to itself for twice as long as the tick took, and
# news that comes meanwhile is taken in together. Seconds.
MIN_REST, MAX_REST = 0.02, 0.25
# With no news at all, look anyway.
MAX_TICK_INTERVAL = timedelta(seconds=1)


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
        slice_token: Callable[[SliceId], str],
        bootstrap_token: Callable[[SliceId], str],
        settings: ControllerSettings | None = None,
        new_name: Callable[[], str] = lambda: secrets.token_hex(4),
        on_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._providers = providers
        self._clock = clock
        self._executor = executor
        self._holder = holder
        self._fleet = fleet
        self._server_url = server_url
        self._slice_token = slice_token
        self._entry_token = bootstrap_token
        self._settings = settings or ControllerSettings(
            default_providers=tuple(providers),
            zones_by_provider={name: provider.zones for name, provider in providers.items()},
        )
        self._new_name = new_name
        self._on_commit = on_commit
        self._news_came = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._stand_down()
        for provider in providers.values():
            provider.on_change(self._provider_changed)

    # One tick.
    def tick(self) -> bool:
        """True when it held the lease and acted."""
        if not self.hold_lease():
            return False
        observation = self.observe()
        change = self.plan(observation)
        self.commit(change)
        self.act()
        return True

    def hold_lease(self) -> bool:
        now = self._clock.now()
        if self._lease and now - self._renewed_at < RENEW_INTERVAL:
            return True
        held = self._store.acquire_lease(LEASE, self._holder, LEASE_TTL, now)
        if held is None or (self._lease and held.token != self._lease.token):
            self._stand_down()
        if held is None:
            return False
        self._lease, self._renewed_at = held, now
        if self._world is None:
            self._take_over(now)
        return True

    def observe(self) -> Observation:
        assert self._observer is not None and self._calls is not None
        return self._observer.observe(self._calls.take_results(), self._clock.now())

    def plan(self, observation: Observation) -> ChangeSet:
        assert self._world is not None and self._news is not None
        assert self._reconciler is not None
        self._news.apply(observation)
        self._reconciler.run(observation.at)
        return self._world.take_change(message.seq for message in observation.messages)

    def commit(self, change: ChangeSet) -> None:
        if not change:
            return
        try:
            self._store.commit(change, fence=self._lease)
        except Exception:
            # What is in memory no longer matches the store: start over from the store.
            self._stand_down()
            raise
        gone = [
            host_id(tpu_slice.id, host.index)
            for tpu_slice in change.slices
            if tpu_slice.state is SliceState.GONE
            for host in self._store.hosts(tpu_slice.id)
        ]
        if gone:
            self._store.delete_liveness(gone)
        self._on_commit()

    def act(self) -> None:
        assert self._world is not None and self._calls is not None and self._news is not None
        now = self._clock.now()
        self._act_requests(now)
        self._act_releases(now)
        for message in self._news.faults:
            tpu_slice = self._world.slices.get(message.slice_id or SliceId(""))
            if tpu_slice is not None and message.fault:
                self._calls.inject_fault(tpu_slice, message.fault, message.host_index)
                self._list_soon()
        self._news.faults = []
        for name in self._providers:
            due = now - self._listed_at.get(name, datetime.min.replace(tzinfo=now.tzinfo))
            wanted = due >= LIST_INTERVAL or self._list_now.is_set()
            if wanted and self._calls.may_start(CallKind.LISTING, name, now):
                self._listed_at[name] = now
                self._calls.list(name)
        self._list_now.clear()

    def _act_requests(self, now: datetime) -> None:
        orders: dict[str, list[TpuSlice]] = {}
        for slice_id in sorted(self._world.slices_by_state[SliceState.REQUESTED]):
            tpu_slice = self._world.slices[slice_id]
            orders.setdefault(tpu_slice.request_group, []).append(tpu_slice)
        for order_id, slices in orders.items():
            if not self._calls.may_start(CallKind.REQUEST, order_id, now):
                continue
            if slices[0].provider not in self._providers:
                continue
            self._calls.request(self._order(order_id, slices), slices[0].provider)

    def _order(self, order_id: str, slices: list[TpuSlice]) -> Order:
        first = slices[0]
        job = self._world.jobs.get(first.job_id) if first.job_id else None
        of_job = (
            {"priority": job.spec.priority, "grace": job.spec.grace, "labels": job.spec.labels}
            if job
            else {}
        )
        is_open = self._providers[first.provider].exposes_tokens
        token = self._entry_token if is_open else self._slice_token
        return Order(
            id=order_id,
            slices=tuple(tpu_slice.id for tpu_slice in slices),
            accelerator=first.accelerator,
            zone=first.zone,
            capacity=first.capacity,
            tokens={tpu_slice.id: token(tpu_slice.id) for tpu_slice in slices},
            server_url=self._server_url,
            fleet=self._fleet,
            job_id=first.job_id,
            pool=first.pool,
            **of_job,
        )

    def _act_releases(self, now: datetime) -> None:
        releasing = {
            slice_id: (self._world.slices[slice_id].provider, self._world.slices[slice_id].zone)
            for slice_id in self._world.slices_by_state[SliceState.RELEASING]
        }
        releasing.update(self._news.orphans)
        self._news.orphans = {}
        for slice_id, (provider, zone) in sorted(releasing.items()):
            known = provider in self._providers
            if known and self._calls.may_start(CallKind.RELEASE, slice_id, now):
                self._calls.release(slice_id, zone, provider)
                self._list_soon()

    # Taking over and standing down.
    def _take_over(self, now: datetime) -> None:
        live = self._store.live()
        known = {tpu_slice.id for tpu_slice in live.slices}
        missing = [
            slice_id
            for attempt in live.attempts
            if attempt.live
            for slice_id in attempt.slices
            if slice_id not in known
        ]
        gone = [found for slice_id in missing if (found := self._store.slice(slice_id))]
        hosts = [host for tpu_slice in gone for host in self._store.hosts(tpu_slice.id)]
        live = replace(live, slices=[*live.slices, *gone], hosts=[*live.hosts, *hosts])
        self._world = WorkingSet(live)
        self._calls = ProviderCalls(self._providers, self._executor, self._clock, self.wake)
        self._news = ObservationApplier(self._world, self._calls, log.warning)
        self._reconciler = Reconciler(self._world, self._settings, self._new_name)
        self._observer = Observer(self._store, self._world, now)
        self._list_now.set()
        log.info("took over as %s with token %s", self._holder, self._lease.token)

    def _stand_down(self) -> None:
        self._lease: Lease | None = None
        self._renewed_at = self._clock.now()
        self._world: WorkingSet | None = None
        self._calls: ProviderCalls | None = None
        self._news: ObservationApplier | None = None
        self._reconciler: Reconciler | None = None
        self._observer: Observer | None = None
        self._listed_at: dict[str, datetime] = {}
        self._list_now = threading.Event()

    # The thread.
    def wake(self) -> None:
        """There is news: tick soon. Safe from any thread."""
        self._news_came.set()

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._news_came.set()
        if self._thread is not None:
            self._thread.join(timeout=30)
        if self._lease is not None:
            self._store.release_lease(self._lease)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._news_came.clear()
            began = time.monotonic()
            try:
                self.tick()
            except Fenced:
                log.warning("another controller has taken over")
            except Exception:
                log.exception("a tick failed; the next starts over from the store")
            rest = 2 * (time.monotonic() - began)
            self._stopping.wait(min(max(rest, MIN_REST), MAX_REST))
            self._news_came.wait(self._pause())

    def _pause(self) -> float:
        moments = [self._world.next_due_at() if self._world else None]
        if self._reconciler is not None:
            moments.append(self._reconciler.next_placement_at)
        now = self._clock.now()
        waits = [(moment - now).total_seconds() for moment in moments if moment is not None]
        return max(0.0, min([*waits, MAX_TICK_INTERVAL.total_seconds()]))

    def _list_soon(self) -> None:
        self._list_now.set()

    def _provider_changed(self) -> None:
        self._list_now.set()
        self.wake()
