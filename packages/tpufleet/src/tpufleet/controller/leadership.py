"""One leadership term: everything that a controller holds while it has the lease.

The term is dropped as a whole when the lease is lost or a tick fails, so nothing in memory outlives
the authority to act on it or differs from the store.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import msgspec

from tpufleet.clocks import Clock
from tpufleet.controller.apply_observations import ObservationApplier
from tpufleet.controller.host_silence import HostSilence
from tpufleet.controller.observe import Observation, Observer
from tpufleet.controller.placement_inputs import ControllerSettings
from tpufleet.controller.provider_calls import CallKind, CallResult, ProviderCalls
from tpufleet.controller.provider_health import ProviderHealthLog
from tpufleet.controller.reconcile import Reconciler
from tpufleet.controller.spending import SpendingMonitor
from tpufleet.controller.working_set import WorkingSet
from tpufleet.model.fleet.cloud_slices import ExpectedSlice
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.fleet.server_status import CONTROLLER_REPORT
from tpufleet.model.fleet.slices import SliceId, SliceState, TpuSlice
from tpufleet.model.values import encoding
from tpufleet.policy.scheduling import fair_share
from tpufleet.providers.base import Order, Provider
from tpufleet.stores.base import ChangeSet, Lease, LiveState, Store

log = logging.getLogger("tpufleet.controller")

LIST_INTERVAL = timedelta(seconds=5)
STORE_USAGE_INTERVAL = timedelta(minutes=1)  # a crash loses at most this much usage


class Installation(msgspec.Struct, frozen=True, kw_only=True):
    """What a controller works with, in every term."""

    store: Store
    providers: Mapping[str, Provider]
    clock: Clock
    executor: Executor
    fleet: str  # label of our slices in the cloud
    server_url: str
    ca_certificates: str
    slice_token: Callable[[SliceId], str]
    bootstrap_token: Callable[[SliceId], str]
    settings: ControllerSettings
    new_name: Callable[[], str]


class LeadershipTerm:
    def __init__(
        self,
        installation: Installation,
        lease: Lease,
        now: datetime,
        silence: HostSilence,
        wake: Callable[[], None],
    ) -> None:
        self.lease = lease
        self.renewed_at = now
        self._installation = installation
        self._providers = installation.providers
        self._working_set = WorkingSet(load_state(installation.store))
        self._calls = ProviderCalls(
            installation.providers, installation.executor, installation.clock, wake
        )
        self._applier = ObservationApplier(self._working_set, self._calls, log.warning)
        self._reconciler = Reconciler(
            self._working_set,
            installation.settings,
            installation.new_name,
            installation.server_url,
            load_usage(installation.store),
            self._slice_settings,
        )
        self._stored_usage = self._reconciler.usage
        self._spending = SpendingMonitor(
            installation.store, self._working_set, installation.settings
        )
        self._observer = Observer(installation.store, self._working_set, silence, now)
        self._health = ProviderHealthLog(
            {name: provider.zones for name, provider in installation.providers.items()},
            lease.holder,
            now,
            installation.settings.default_providers,
            installation.server_url,
            installation.settings.slices_per_user,
        )
        self._listed_at: dict[str, datetime] = {}
        self._list_now = threading.Event()
        self._list_now.set()

    def list_soon(self) -> None:
        """List all providers at the next opportunity. Safe from any thread."""
        self._list_now.set()

    def account_for_clock_step(self, step: timedelta) -> None:
        """Time limits and backoffs count elapsed time, whatever the clock says."""
        for job_id, job in list(self._working_set.jobs.items()):
            if job.not_before is not None:
                self._working_set.put_job(replace(job, not_before=job.not_before + step))
            attempt = self._working_set.live_attempt(job_id)
            if attempt is not None and attempt.running_at is not None:
                self._working_set.put_attempt(
                    replace(attempt, clock_step=attempt.clock_step + step)
                )

    def observe(self) -> Observation:
        now, results = self._installation.clock.now(), self._calls.take_results()
        for result in results:
            self._health.record(result, self._zone_of(result), now)
        return self._observer.observe(results, now)

    def plan(self, observation: Observation) -> ChangeSet:
        self._applier.apply(observation)
        self._spending.check(observation.at)
        self._reconciler.run(observation.at)
        return self._working_set.take_change(message.seq for message in observation.messages)

    def committed(self, change: ChangeSet) -> None:
        self._observer.committed(change)

    def act(self) -> None:
        """Start the provider calls that the recorded slices ask for."""
        now = self._installation.clock.now()
        self._request_slices(now)
        self._release_slices(now)
        self._inject_faults()
        self._list_slices(now)
        self._store_usage()
        self._spending.save()
        report = self._health.due_report(now, self._working_set.refusals.unreachable())
        if report is not None:
            text = encoding.to_json(report).decode()
            self._installation.store.put_metadata(CONTROLLER_REPORT, text)

    def _store_usage(self) -> None:
        usage, stored = self._reconciler.usage, self._stored_usage
        if usage is None or (stored is not None and usage.at - stored.at < STORE_USAGE_INTERVAL):
            return
        if usage.usage or (stored is not None and stored.usage):
            text = encoding.to_json(usage).decode()
            self._installation.store.put_metadata(fair_share.LEDGER_NAME, text)
        self._stored_usage = usage

    def next_due_at(self) -> datetime | None:
        """When there is something to do even if nothing happens until then."""
        moments = [
            self._working_set.next_due_at(),
            self._reconciler.next_placement_at,
            self._spending.next_check_at(),
        ]
        return min((moment for moment in moments if moment is not None), default=None)

    def _zone_of(self, result: CallResult) -> str | None:
        tpu_slice = self._working_set.slices.get(result.slices[0]) if result.slices else None
        return tpu_slice.zone if tpu_slice is not None else None

    def _request_slices(self, now: datetime) -> None:
        groups: dict[str, list[TpuSlice]] = {}
        for slice_id in sorted(self._working_set.slices_by_state[SliceState.REQUESTED]):
            tpu_slice = self._working_set.slices[slice_id]
            groups.setdefault(tpu_slice.request_group, []).append(tpu_slice)
        for group, slices in groups.items():
            provider = slices[0].provider
            if provider in self._providers and self._calls.may_start(CallKind.REQUEST, group, now):
                self._calls.request(self._order(group, slices), provider)

    def _slice_settings(self, pool: Pool) -> str:
        provider = self._installation.providers.get(pool.provider)
        return "" if provider is None else provider.slice_settings(pool.accelerator, pool.pod)

    def _order(self, group: str, slices: list[TpuSlice]) -> Order:
        first = slices[0]
        job = self._working_set.jobs.get(first.job_id) if first.job_id else None
        pool = self._working_set.pools.get(first.pool) if first.pool else None
        job_fields: dict[str, Any] = (
            {
                "owner": job.owner,
                "priority": job.spec.priority,
                "grace": job.spec.grace,
                "labels": job.spec.labels,
                "pod": job.spec.pod,
                "mounts": tuple(mount.path for mount in job.spec.mounts),
            }
            if job
            else {}
        )
        if pool is not None:
            # Jobs of other users have its slices later.
            job_fields |= {"pod": pool.pod, "owner": ""}
        exposed = self._providers[first.provider].exposes_tokens
        token = self._installation.bootstrap_token if exposed else self._installation.slice_token
        return Order(
            id=group,
            slices=tuple(tpu_slice.id for tpu_slice in slices),
            accelerator=first.accelerator,
            zone=first.zone,
            capacity=first.capacity,
            tokens={tpu_slice.id: token(tpu_slice.id) for tpu_slice in slices},
            server_url=self._installation.server_url,
            ca_certificates=self._installation.ca_certificates,
            fleet=self._installation.fleet,
            job_id=first.job_id,
            pool=first.pool,
            node=first.node,
            **job_fields,
        )

    def _release_slices(self, now: datetime) -> None:
        slices = self._working_set.slices
        releasing = {
            slice_id: (slices[slice_id].provider, slices[slice_id].zone)
            for slice_id in self._working_set.slices_by_state[SliceState.RELEASING]
        }
        releasing.update(self._applier.take_orphans())
        for slice_id, (provider, zone) in sorted(releasing.items()):
            known = provider in self._providers
            if known and self._calls.may_start(CallKind.RELEASE, slice_id, now):
                self._calls.release(slice_id, zone, provider)
                self.list_soon()

    def _inject_faults(self) -> None:
        for message in self._applier.take_faults():
            tpu_slice = self._working_set.slices.get(message.slice_id or SliceId(""))
            if tpu_slice is not None and message.fault:
                self._calls.inject_fault(tpu_slice, message.fault, message.host_index)
                self.list_soon()

    def _list_slices(self, now: datetime) -> None:
        requested = self._list_now.is_set()
        self._list_now.clear()
        for name in self._providers:
            last = self._listed_at.get(name)
            due = last is None or now - last >= LIST_INTERVAL
            if (due or requested) and self._calls.may_start(CallKind.LISTING, name, now):
                self._listed_at[name] = now
                self._calls.list(name, self._expected_slices(name))

    def _expected_slices(self, provider: str) -> list[ExpectedSlice]:
        return [
            ExpectedSlice(id=each.id, zone=each.zone, node=each.node)
            for each in self._working_set.slices.values()
            if each.provider == provider
            and each.state not in (SliceState.REQUESTED, SliceState.GONE)
        ]


def load_usage(store: Store) -> fair_share.UsageLedger | None:
    text = store.metadata(fair_share.LEDGER_NAME)
    return encoding.from_json(text, fair_share.UsageLedger) if text else None


def load_state(store: Store) -> LiveState:
    """All that has not ended, and the slices of live attempts that are gone already."""
    live = store.live()
    known = {tpu_slice.id for tpu_slice in live.slices}
    missing = [
        slice_id
        for attempt in live.attempts
        if attempt.live
        for slice_id in attempt.slices
        if slice_id not in known
    ]
    gone = [tpu_slice for slice_id in missing if (tpu_slice := store.slice(slice_id))]
    hosts = [host for tpu_slice in gone for host in store.hosts(tpu_slice.id)]
    return replace(live, slices=[*live.slices, *gone], hosts=[*live.hosts, *hosts])
