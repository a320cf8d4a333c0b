"""Writing news into the world: commands, heartbeats, listings, answers of providers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

from tpufleet.controller import observe
from tpufleet.controller.provider_calls import CallKind, CallResult, ProviderCalls
from tpufleet.controller.working_set import WorkingSet
from tpufleet.errors import NoCapacity, Permanent, QuotaExceeded
from tpufleet.model import topology
from tpufleet.model.agent_protocol import Heartbeat
from tpufleet.model.cloud_slices import CloudState
from tpufleet.model.events import Event, EventKind
from tpufleet.model.hosts import Host, HostId, Phase, host_id, slice_id_of
from tpufleet.model.inbox import InboxMessage, InboxMessageKind
from tpufleet.model.slices import LossReason, SliceId, SliceState, TpuSlice
from tpufleet.policy import slice_observation
from tpufleet.policy.capacity import CapacitySource
from tpufleet.policy.job_step import release_slice, slice_event

_WORKING = (SliceState.BOOTING, SliceState.READY, SliceState.DOOMED)


class ObservationApplier:
    def __init__(self, world: WorkingSet, calls: ProviderCalls, log: Callable[[str], None]) -> None:
        self._world = world
        self._calls = calls
        self._log = log
        self.orphans: dict[SliceId, tuple[str, str]] = {}  # slice → provider, zone
        self.faults: list[InboxMessage] = []
        self.requested_at: dict[SliceId, datetime] = {}
        self.listed_providers: set[str] = (
            set()
        )  # providers that have been listed by this controller

    def apply(self, observation: observe.Observation) -> None:
        now = observation.at
        self._world.dirty_jobs.update(observation.due_jobs)
        for job in observation.new_jobs:
            if job.id not in self._world.jobs and not job.ended:
                self._world.add_job(job)
        if observation.pools is not None:
            self._world.pools = {pool.name: pool for pool in observation.pools}
            self._world.placement_due = True
        for attempt_id, progress in observation.progress.items():
            known = self._world.progress.get(attempt_id)
            self._world.progress[attempt_id] = observe.merge_progress(known, progress)
        for message in observation.messages:
            self._read(message, now)
        for result in observation.results:
            self._hear(result, now)
        for host in observation.silent_hosts:
            self._lose_silent(host, now)

    def _read(self, message: InboxMessage, now: datetime) -> None:
        match message.kind:
            case InboxMessageKind.CANCEL if message.job_id in self._world.jobs:
                job = self._world.jobs[message.job_id]
                if not job.ended and not job.cancel_requested_by:
                    self._world.put_job(replace(job, cancel_requested_by=message.by or "somebody"))
                    self._world.dirty_jobs.add(job.id)
            case InboxMessageKind.HEARTBEAT if message.heartbeat is not None:
                self._hear_host(message.heartbeat, now)
            case InboxMessageKind.FAULT:
                self.faults.append(message)

    # Hosts.
    def _hear_host(self, beat: Heartbeat, now: datetime) -> None:
        slice_id = slice_id_of(beat.host_id)
        tpu_slice = self._world.slices.get(slice_id)
        if tpu_slice is None or tpu_slice.state is SliceState.GONE:
            return
        index = int(beat.host_id.rpartition("/")[2])
        before = self._world.hosts.get(slice_id, {}).get(index)
        last = self._world.last_heartbeat.get(beat.host_id)
        if before and before.boot == beat.boot and last and beat.at < last:
            return  # a slow copy of an older beat
        self._world.last_heartbeat[beat.host_id] = beat.at
        self._world.put_host(_heard(before, beat, slice_id, index, now))
        if beat.attempt_id and beat.progress:
            known = self._world.progress.get(beat.attempt_id)
            self._world.progress[beat.attempt_id] = observe.merge_progress(known, beat.progress)
        if beat.notice and tpu_slice.state in _WORKING:
            self._put(slice_observation.apply_notice(tpu_slice, beat.notice, now), tpu_slice, now)
        elif tpu_slice.state in (SliceState.REQUESTED, SliceState.BOOTING):
            self._check_ready(tpu_slice, now)
        if tpu_slice.job_id in self._world.jobs:
            self._world.dirty_jobs.add(tpu_slice.job_id)

    def _check_ready(self, tpu_slice: TpuSlice, now: datetime) -> None:
        hosts = self._world.hosts.get(tpu_slice.id, {})
        expected = topology.find(tpu_slice.accelerator).hosts
        if sum(1 for host in hosts.values() if host.up_at) < expected:
            return
        words = f"ready after {(now - tpu_slice.requested_at).total_seconds():.0f} s"
        ready = replace(
            tpu_slice,
            state=SliceState.READY,
            reason=words,
            ready_at=now,
            idle_since=None if tpu_slice.job_id else now,
        )
        self._put(ready, tpu_slice, now)
        self._granted(tpu_slice, now)

    def _lose_silent(self, host: HostId, now: datetime) -> None:
        tpu_slice = self._world.slices.get(slice_id_of(host))
        if tpu_slice is None or tpu_slice.state not in (SliceState.READY, SliceState.DOOMED):
            return
        words = f"no heartbeat from host {host.rpartition('/')[2]}"
        self._put(
            release_slice(tpu_slice, tpu_slice.loss or LossReason.HOST_LOST, words, now),
            tpu_slice,
            now,
        )

    # Providers.
    def _hear(self, result: CallResult, now: datetime) -> None:
        if result.call is CallKind.LISTING:
            self._hear_listing(result, now)
        elif result.call is CallKind.REQUEST:
            self._hear_request(result, now)
        elif result.error is not None:
            if result.call is CallKind.FAULT:
                self._world.record_events(
                    Event(
                        at=now,
                        kind=EventKind.SLICE,
                        state="refused",
                        message=f"the fault was refused: {result.error}",
                        slice_id=result.slices[0],
                    )
                )
            self._log(f"{result.call} of {', '.join(result.slices)}: {result.error}")
            for slice_id in result.slices:
                self._calls.back_off(result.call, slice_id, now)

    def _hear_listing(self, result: CallResult, now: datetime) -> None:
        if result.error is not None:
            self._log(f"listing of {result.provider} failed: {result.error}")
            self._calls.back_off(CallKind.LISTING, result.provider, now)
            return
        self._calls.reset(CallKind.LISTING, result.provider)
        self.listed_providers.add(result.provider)
        found = {cloud.id: cloud for cloud in result.listing}
        unseen = getattr(result.listing, "unseen", frozenset())  # zones that did not answer
        for tpu_slice in list(self._world.slices.values()):
            if tpu_slice.provider != result.provider or tpu_slice.state is SliceState.GONE:
                continue
            cloud = found.pop(tpu_slice.id, None)
            if cloud is None and tpu_slice.zone in unseen:
                continue
            if cloud is not None:
                if cloud.state is CloudState.PENDING:
                    self._world.last_queued_at[tpu_slice.id] = now
                after = slice_observation.apply_cloud_slice(tpu_slice, cloud, now)
                if after is not tpu_slice and after.loss in (
                    LossReason.REFUSED,
                    LossReason.BOOT_FAILED,
                ):
                    self._world.record_refusal(tpu_slice, after.reason, now)
            elif self._asked_since(tpu_slice, result.started_at):
                continue  # the listing is older than the request
            else:
                after = slice_observation.apply_missing(tpu_slice, now)
            self._put(after, tpu_slice, now)
        for cloud in found.values():
            if not self._asked_for_lately(cloud.id, result.started_at):
                self.orphans[cloud.id] = (result.provider, cloud.zone)
                words = f"slice {cloud.id} is in {cloud.zone}, but not recorded; releasing it"
                self._world.record_events(
                    Event(
                        at=now,
                        kind=EventKind.SLICE,
                        state="orphan",
                        message=words,
                        slice_id=cloud.id,
                    )
                )

    def _hear_request(self, result: CallResult, now: datetime) -> None:
        slices = [
            self._world.slices[slice_id]
            for slice_id in result.slices
            if slice_id in self._world.slices
        ]
        if not slices:
            return
        order = slices[0].request_group
        error = result.error
        if error is None:
            self._calls.reset(CallKind.REQUEST, order)
            for tpu_slice in slices:
                self.requested_at[tpu_slice.id] = now
                if tpu_slice.state is SliceState.REQUESTED:
                    booting = replace(tpu_slice, state=SliceState.BOOTING, reason="booting")
                    self._put(booting, tpu_slice, now)
                    self._check_ready(self._world.slices[tpu_slice.id], now)
        elif isinstance(error, (NoCapacity, QuotaExceeded, Permanent)):
            self._calls.reset(CallKind.REQUEST, order)
            self._world.record_refusal(
                slices[0], str(error), now, permanent=isinstance(error, Permanent)
            )
            for tpu_slice in slices:
                if tpu_slice.state is SliceState.REQUESTED:
                    self._put(
                        release_slice(tpu_slice, LossReason.REFUSED, str(error), now),
                        tpu_slice,
                        now,
                    )
        else:
            self._log(f"request for {', '.join(result.slices)}: {error}")
            self._calls.back_off(CallKind.REQUEST, order, now)

    def _granted(self, tpu_slice: TpuSlice, now: datetime) -> None:
        """There is stock again: forget the refusals of this very kind."""
        place = CapacitySource(tpu_slice.provider, tpu_slice.zone, tpu_slice.capacity)
        refusal = self._world.refusals.latest(place, tpu_slice.accelerator)
        if refusal is not None and refusal.streak:
            self._world.put_refusal(replace(refusal, streak=0, until=now))

    def _put(self, after: TpuSlice, before: TpuSlice, now: datetime) -> None:
        if after is before:
            return
        self._world.put_slice(after)
        if after.state is not before.state:
            self._world.record_events(slice_event(after, now))
        if after.state is SliceState.GONE:
            self.requested_at.pop(after.id, None)
            self._calls.reset(CallKind.RELEASE, after.id)

    def _asked_since(self, tpu_slice: TpuSlice, listing_began: datetime) -> bool:
        if tpu_slice.state is SliceState.RELEASING:
            return not self._calls.may_start(
                CallKind.REQUEST, tpu_slice.request_group, listing_began
            )
        asked = self.requested_at.get(tpu_slice.id)
        return asked is not None and asked >= listing_began

    def _asked_for_lately(self, slice_id: SliceId, listing_began: datetime) -> bool:
        """Recorded after the listing began, so it cannot be an orphan."""
        asked = self.requested_at.get(slice_id)
        return asked is not None and asked >= listing_began


def _heard(
    before: Host | None, beat: Heartbeat, slice_id: SliceId, index: int, now: datetime
) -> Host:
    attempt_id, phase, exit = beat.attempt_id, beat.phase, beat.exit
    restarted = before is not None and before.boot not in ("", beat.boot)
    if restarted and before.attempt_id and before.attempt_id != beat.attempt_id:
        # The agent is a new process: what it ran before is gone, and it does not know of it.
        attempt_id, phase, exit = before.attempt_id, Phase.IDLE, None
    return Host(
        id=host_id(slice_id, index),
        slice_id=slice_id,
        index=index,
        address=beat.address,
        coordinator_port=beat.coordinator_port,
        boot=beat.boot,
        attempt_id=attempt_id,
        phase=phase,
        exit=exit,
        notice=beat.notice,
        up_at=before.up_at if before and before.up_at else now,
    )
