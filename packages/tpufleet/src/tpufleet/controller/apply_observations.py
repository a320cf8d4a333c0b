"""Apply observations to the working set: commands, heartbeats, listings, provider results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta

from tpufleet.controller import observe, server_contact
from tpufleet.controller.provider_calls import CallKind, CallResult, ProviderCalls
from tpufleet.controller.working_set import WorkingSet
from tpufleet.errors import NoCapacity
from tpufleet.model.events import Event, EventKind
from tpufleet.model.fleet.agent_protocol import Heartbeat
from tpufleet.model.fleet.cloud_slices import CloudSlice, CloudState, SliceListing
from tpufleet.model.fleet.hosts import Host, HostId, Phase, host_id, slice_id_of
from tpufleet.model.fleet.pools import RefusalKind, refusal_kind
from tpufleet.model.fleet.slices import LossReason, SliceId, SliceState, TpuSlice
from tpufleet.model.inbox import InboxMessage, InboxMessageKind
from tpufleet.model.tpu import type_lookup
from tpufleet.policy.events import slice_event
from tpufleet.policy.recovery import heartbeat_order, liveness, slice_observation
from tpufleet.policy.recovery.job_step import release_slice
from tpufleet.policy.scheduling.source_choice import CapacitySource

_UP_STATES = (SliceState.BOOTING, SliceState.READY, SliceState.DOOMED)


class ObservationApplier:
    def __init__(
        self, working_set: WorkingSet, calls: ProviderCalls, log: Callable[[str], None]
    ) -> None:
        self._working_set = working_set
        self._calls = calls
        self._log = log
        self._orphans: dict[SliceId, tuple[str, str]] = {}  # slice → provider, zone
        self._reported_orphans: dict[str, set[SliceId]] = {}  # by provider, while they are listed
        self._faults: list[InboxMessage] = []
        self._requested_at: dict[SliceId, datetime] = {}  # when the provider accepted the request

    def take_orphans(self) -> dict[SliceId, tuple[str, str]]:
        """Slices with our label that are not recorded, with provider and zone; resets them."""
        orphans, self._orphans = self._orphans, {}
        return orphans

    def take_faults(self) -> list[InboxMessage]:
        """Faults to inject; resets them."""
        faults, self._faults = self._faults, []
        return faults

    def apply(self, observation: observe.Observation) -> None:
        now = observation.at
        self._working_set.dirty_jobs.update(observation.due_jobs)
        for job in observation.new_jobs:
            if job.id not in self._working_set.jobs and not job.ended:
                self._working_set.add_job(job)
        for job in observation.edited_jobs:
            self._working_set.apply_edits(job)
        if observation.pools is not None:
            self._working_set.pools = {pool.name: pool for pool in observation.pools}
            self._working_set.placement_due = True
        if observation.reservations is not None:
            if list(observation.reservations) != list(self._working_set.reservations):
                self._working_set.placement_due = True
            self._working_set.reservations = observation.reservations
        if observation.admins is not None:
            if observation.admins != self._working_set.admins:
                self._working_set.placement_due = True
            self._working_set.admins = observation.admins
        for attempt_id, progress in observation.progress.items():
            known = self._working_set.progress.get(attempt_id)
            self._working_set.progress[attempt_id] = observe.merge_progress(known, progress)
        for message in observation.messages:
            self._apply_message(message, now)
        for result in observation.results:
            self._apply_result(result, now)
        for host in observation.silent_hosts:
            self._release_silent(host, now)

    def _apply_message(self, message: InboxMessage, now: datetime) -> None:
        match message.kind:
            case InboxMessageKind.CANCEL if message.job_id in self._working_set.jobs:
                job = self._working_set.jobs[message.job_id]
                if not job.ended and not job.cancel_requested_by:
                    self._working_set.put_job(
                        replace(job, cancel_requested_by=message.by or "unknown")
                    )
                    self._working_set.dirty_jobs.add(job.id)
            case InboxMessageKind.RETRY if message.job_id in self._working_set.jobs:
                self._working_set.retries.add(message.job_id)
            case InboxMessageKind.HEARTBEAT if message.heartbeat is not None:
                self._apply_heartbeat(message.heartbeat, message.at, now)
            case InboxMessageKind.HELD_SLICE_RELEASED if message.slice_id is not None:
                held = self._working_set.slices.get(message.slice_id)
                if held is not None and held.reserved_until is not None:
                    self._working_set.put_slice(
                        replace(held, reserved_for=None, reserved_until=None, reason="free")
                    )
            case InboxMessageKind.ADOPT:
                self._adopt_node(message, now)
            case InboxMessageKind.UNREGISTER if message.slice_id is not None:
                self._unregister(message.slice_id, message.by or "unknown", now)
            case InboxMessageKind.FAULT:
                self._faults.append(message)

    # Nodes that people made.
    def _adopt_node(self, message: InboxMessage, now: datetime) -> None:
        pool = self._working_set.pools.get(message.pool or "")
        known = {(each.node, each.zone) for each in self._working_set.slices.values()}
        if pool is None or message.slice_id is None or (message.node, message.zone) in known:
            return
        tpu_slice = TpuSlice(
            id=message.slice_id,
            provider=pool.provider,
            accelerator=pool.accelerator,
            zone=message.zone,
            capacity=pool.capacity[0],  # until the provider lists it
            request_group=message.slice_id,
            requested_at=now,
            pool=pool.name,
            node=message.node,
            reason=f"{message.by} adopted {message.node} in {message.zone}",
        )
        self._working_set.put_slice(tpu_slice)
        self._working_set.record_events(replace(slice_event(tpu_slice, now), by=message.by))

    def _unregister(self, slice_id: SliceId, by: str, now: datetime) -> None:
        """Not while a job holds it."""
        tpu_slice = self._working_set.slices.get(slice_id)
        if tpu_slice is None or not tpu_slice.adopted:
            return
        if tpu_slice.job_id is not None:  # placed after the request was accepted
            reason = f"{tpu_slice.node} is not given back: job {tpu_slice.job_id} runs on it"
            refused = slice_event(replace(tpu_slice, reason=reason), now)
            self._working_set.record_events(replace(refused, by=by))
        elif tpu_slice.live:
            reason = f"{by} took {tpu_slice.node} back"
            released = release_slice(tpu_slice, LossReason.RELEASED, reason, now)
            self._working_set.put_slice(released)
            self._working_set.record_events(replace(slice_event(released, now), by=by))

    # Hosts.
    def _apply_heartbeat(self, heartbeat: Heartbeat, sent_at: datetime, now: datetime) -> None:
        slice_id = slice_id_of(heartbeat.host_id)
        tpu_slice = self._working_set.slices.get(slice_id)
        if tpu_slice is None or tpu_slice.state is SliceState.GONE:
            return
        index = int(heartbeat.host_id.rpartition("/")[2])
        before = self._working_set.hosts.get(slice_id, {}).get(index)
        if before is not None and heartbeat_order.is_superseded(heartbeat, before):
            return  # delivered late
        row = _host_row(before, heartbeat, slice_id, index, now)
        offset = sent_at - heartbeat.at
        self._working_set.put_host(replace(row, clock_offset=offset))
        if heartbeat.attempt_id and heartbeat.progress:
            known = self._working_set.progress.get(heartbeat.attempt_id)
            self._working_set.progress[heartbeat.attempt_id] = observe.merge_progress(
                known, heartbeat.progress
            )
        if heartbeat.notice and tpu_slice.state in _UP_STATES:
            self._put(
                slice_observation.apply_notice(tpu_slice, heartbeat.notice, now), tpu_slice, now
            )
        elif tpu_slice.state in (SliceState.REQUESTED, SliceState.BOOTING):
            server_contact.restored(self._working_set, tpu_slice.provider, now)
            self._check_ready(tpu_slice, now)
        if tpu_slice.job_id in self._working_set.jobs:
            self._working_set.dirty_jobs.add(tpu_slice.job_id)

    def _check_ready(self, tpu_slice: TpuSlice, now: datetime) -> None:
        hosts = self._working_set.hosts.get(tpu_slice.id, {})
        expected = type_lookup.find(tpu_slice.accelerator).hosts
        if sum(1 for host in hosts.values() if host.up_at) < expected:
            return
        since = tpu_slice.silent_since or tpu_slice.requested_at
        reason = f"ready after {(now - since).total_seconds():.0f} s"
        ready = replace(
            tpu_slice,
            state=SliceState.READY,
            reason=reason,
            ready_at=tpu_slice.ready_at or now,
            idle_since=None if tpu_slice.job_id else now,
            silent_since=None,
        )
        self._put(ready, tpu_slice, now)
        if tpu_slice.silent_since is None:
            self._record_grant(tpu_slice, now)

    def _release_silent(self, host: HostId, now: datetime) -> None:
        tpu_slice = self._working_set.slices.get(slice_id_of(host))
        if tpu_slice is None:
            return
        index = int(host.rpartition("/")[2])
        if liveness.may_return(tpu_slice):
            self._put(liveness.await_return(tpu_slice, index, now), tpu_slice, now)
            tpu_slice = self._working_set.slices[tpu_slice.id]
        if tpu_slice.state is SliceState.BOOTING and tpu_slice.silent_since is not None:
            silent = self._working_set.hosts[tpu_slice.id][index]
            self._working_set.put_host(replace(silent, up_at=None))
        if tpu_slice.state not in (SliceState.READY, SliceState.DOOMED):
            return
        reason = f"no heartbeat from host {index}"
        self._put(
            release_slice(tpu_slice, tpu_slice.loss or LossReason.HOST_LOST, reason, now),
            tpu_slice,
            now,
        )

    # Providers.
    def _apply_result(self, result: CallResult, now: datetime) -> None:
        if result.call is CallKind.LISTING:
            self._apply_listing(result, now)
        elif result.call is CallKind.REQUEST:
            self._apply_request(result, now)
        elif result.error is not None:
            if result.call is CallKind.FAULT:
                rejected = f"fault rejected: {result.error}"
                self._record_slice_event("refused", rejected, result.slices[0], now)
            self._log(f"{result.call} of {', '.join(result.slices)} failed: {result.error}")
            for slice_id in result.slices:
                self._calls.back_off(result.call, slice_id, now)

    def _apply_listing(self, result: CallResult, now: datetime) -> None:
        if result.error is not None:
            self._log(f"cannot list slices of {result.provider}: {result.error}")
            self._calls.back_off(CallKind.LISTING, result.provider, now)
            return
        if self._calls.failed(CallKind.LISTING, result.provider):
            self._end_access_refusals(result.provider, now)
        self._calls.reset(CallKind.LISTING, result.provider)
        listed = {cloud.id: cloud for cloud in result.listing}
        listing = result.listing
        unreachable = listing.unreachable_zones if isinstance(listing, SliceListing) else ()
        for tpu_slice in list(self._working_set.slices.values()):
            if tpu_slice.provider != result.provider or tpu_slice.state is SliceState.GONE:
                continue
            cloud = listed.pop(tpu_slice.id, None)
            if cloud is None and tpu_slice.zone in unreachable:
                continue
            if cloud is not None:
                if cloud.state is CloudState.PENDING:
                    self._working_set.last_queued_at[tpu_slice.id] = now
                self._working_set.bootstrap[tpu_slice.id] = cloud.bootstrap
                after = slice_observation.apply_cloud_slice(tpu_slice, cloud, now)
                after = self._apply_maintenance(after, cloud, now)
                job = self._working_set.jobs.get(tpu_slice.job_id) if tpu_slice.job_id else None
                grace = job.spec.grace if job is not None else timedelta(0)
                after = slice_observation.apply_end(after, cloud, grace, now)
                if after is not tpu_slice and after.loss in (
                    LossReason.REFUSED,
                    LossReason.BOOT_FAILED,
                ):
                    refused = after.loss is LossReason.REFUSED
                    kind = cloud.refusal if refused else RefusalKind.CAPACITY
                    self._working_set.record_refusal(
                        tpu_slice, after.reason, now, kind, detail=cloud.detail, late=True
                    )
            elif self._requested_since(tpu_slice, result.started_at):
                continue  # the listing is older than the request
            else:
                after = slice_observation.apply_missing(tpu_slice, now)
            self._put(after, tpu_slice, now)
        reported = self._reported_orphans.setdefault(result.provider, set())
        reported.intersection_update(listed)
        for cloud in listed.values():
            if not self._requested_after(cloud.id, result.started_at):
                self._orphans[cloud.id] = (result.provider, cloud.zone)
                if cloud.id in reported:
                    continue
                reported.add(cloud.id)
                message = f"slice {cloud.id} in {cloud.zone} is not recorded; deleting it"
                self._log(message)
                self._record_slice_event("orphan", message, cloud.id, now)

    def _record_slice_event(
        self, state: str, message: str, slice_id: SliceId, now: datetime
    ) -> None:
        event = Event(at=now, kind=EventKind.SLICE, state=state, message=message, slice_id=slice_id)
        self._working_set.record_events(event)

    def _apply_maintenance(self, tpu_slice: TpuSlice, cloud: CloudSlice, now: datetime) -> TpuSlice:
        after, message = slice_observation.apply_maintenance(tpu_slice, cloud)
        if message:
            planned = slice_event(replace(tpu_slice, reason=message), now)
            self._working_set.record_events(replace(planned, state="maintenance_planned"))
        return after

    def _apply_request(self, result: CallResult, now: datetime) -> None:
        slices = [
            self._working_set.slices[slice_id]
            for slice_id in result.slices
            if slice_id in self._working_set.slices
        ]
        if not slices:
            return
        group = slices[0].request_group
        error = result.error
        if error is None:
            self._calls.reset(CallKind.REQUEST, group)
            self._end_access_refusals(result.provider, now)
            for tpu_slice in slices:
                self._requested_at[tpu_slice.id] = now
                if tpu_slice.state is SliceState.REQUESTED:
                    booting = replace(tpu_slice, state=SliceState.BOOTING, reason="booting")
                    self._put(booting, tpu_slice, now)
                    self._check_ready(self._working_set.slices[tpu_slice.id], now)
        elif (kind := refusal_kind(error)) is not None:
            self._calls.reset(CallKind.REQUEST, group)
            until = error.until if isinstance(error, NoCapacity) else None
            self._working_set.record_refusal(slices[0], str(error), now, kind, until=until)
            for tpu_slice in slices:
                if tpu_slice.state is SliceState.REQUESTED:
                    self._put(
                        release_slice(tpu_slice, LossReason.REFUSED, str(error), now),
                        tpu_slice,
                        now,
                    )
        else:
            self._log(f"request for {', '.join(result.slices)} failed: {error}")
            self._calls.back_off(CallKind.REQUEST, group, now)

    def _record_grant(self, tpu_slice: TpuSlice, now: datetime) -> None:
        """Capacity is available again: end the backoff of this source and type."""
        if tpu_slice.job_id is not None:
            self._working_set.rejections.pop(tpu_slice.job_id, None)
            self._working_set.futile_creations.pop(tpu_slice.job_id, None)
        source = CapacitySource(tpu_slice.provider, tpu_slice.zone, tpu_slice.capacity)
        refusal = self._working_set.refusals.latest(source, tpu_slice.accelerator)
        if refusal is not None and refusal.streak:
            self._working_set.put_refusal(replace(refusal, streak=0, until=now))

    def _end_access_refusals(self, provider: str, now: datetime) -> None:
        """The provider answers again: do not wait for the backoff."""
        for refusal in self._working_set.refusals.without_access(provider, now):
            self._working_set.put_refusal(replace(refusal, streak=0, until=now))

    def _put(self, after: TpuSlice, before: TpuSlice, now: datetime) -> None:
        if after is before:
            return
        self._working_set.put_slice(after)
        if after.state is not before.state:
            self._working_set.record_events(slice_event(after, now))
        if after.state is SliceState.GONE:
            self._requested_at.pop(after.id, None)
            self._calls.reset(CallKind.RELEASE, after.id)

    def _requested_since(self, tpu_slice: TpuSlice, listing_started: datetime) -> bool:
        if tpu_slice.state is SliceState.RELEASING:
            return not self._calls.may_start(
                CallKind.REQUEST, tpu_slice.request_group, listing_started
            )
        return self._requested_after(tpu_slice.id, listing_started)

    def _requested_after(self, slice_id: SliceId, listing_started: datetime) -> bool:
        """Requested after the listing started, so it cannot be an orphan."""
        requested = self._requested_at.get(slice_id)
        return requested is not None and requested >= listing_started


def _host_row(
    before: Host | None, heartbeat: Heartbeat, slice_id: SliceId, index: int, now: datetime
) -> Host:
    attempt_id, phase, exit = heartbeat.attempt_id, heartbeat.phase, heartbeat.exit
    if (
        before is not None
        and before.boot not in ("", heartbeat.boot)
        and before.attempt_id
        and before.attempt_id != heartbeat.attempt_id
    ):
        # The agent is a new process: the workload of the previous one is gone.
        attempt_id, phase, exit = before.attempt_id, Phase.IDLE, None
    return Host(
        id=host_id(slice_id, index),
        slice_id=slice_id,
        index=index,
        address=heartbeat.address,
        coordinator_port=heartbeat.coordinator_port,
        boot=heartbeat.boot,
        heartbeat_seq=heartbeat.seq,
        past_boots=heartbeat_order.past_boots(heartbeat, before),
        attempt_id=attempt_id,
        phase=phase,
        exit=exit,
        notice=heartbeat.notice,
        up_at=before.up_at if before and before.up_at else now,
        environment=heartbeat.environment,
        startup=heartbeat.startup,
    )
