"""Inputs of placement: which jobs lack slices, and what capacity there is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from tpufleet.controller.working_set import WorkingSet
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.fleet.slices import SliceState, TpuSlice
from tpufleet.model.job.attempts import AttemptState
from tpufleet.model.job.jobs import JobId, JobSpec
from tpufleet.model.people.budgets import Budget
from tpufleet.model.tpu import type_lookup
from tpufleet.model.tpu.prices import Price, price_table
from tpufleet.policy.recovery import job_step, liveness
from tpufleet.policy.scheduling import fair_share, placement, source_choice
from tpufleet.policy.scheduling.source_choice import CapacitySource


class ControllerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Set by the operator of the server."""

    default_providers: tuple[str, ...] = ("local",)
    zones_by_provider: Mapping[str, Sequence[str]]
    slices_per_user: int | None = None
    fair_share_half_life: timedelta | None = fair_share.DEFAULT_HALF_LIFE  # None: no fair share
    max_hosts_lost_percent: int = liveness.MAX_LOST_PERCENT  # per minute, by silence alone
    budgets: tuple[Budget, ...] = ()
    prices: Mapping[tuple[str, str], Price] = msgspec.field(default_factory=price_table)
    boot_timeout: timedelta = liveness.BOOT_LIMIT
    boot_timeout_by_provider: Mapping[str, timedelta] = {}


class PlacementInputs:
    def __init__(
        self,
        working_set: WorkingSet,
        settings: ControllerSettings,
        slice_settings: Callable[[Pool], str],
    ) -> None:
        """`slice_settings`: the digest of those that slices of a pool are requested with."""
        self._working_set = working_set
        self._settings = settings
        self.slice_settings = slice_settings
        # By providers, zones and capacity kinds: few for many jobs.
        self._sources: dict[tuple[object, ...], tuple[CapacitySource, ...]] = {}

    def pending_job(self, view: job_step.JobView, missing: int) -> placement.PendingJob:
        spec = view.job.spec
        held = view.usable_slices[0] if view.usable_slices else None
        return placement.PendingJob(
            job=view.job,
            missing=missing,
            optional=view.has_enough,
            sources=self._allowed_sources(spec),
            held_source=None if held is None else _source_of(held),
            avoided=view.avoided,
            rejected=self._working_set.rejections.get(view.job.id, {}),
            usage_step=self._working_set.usage_steps.get(view.job.owner, 0),
        )

    def sources_of(self, spec: JobSpec) -> tuple[str, tuple[CapacitySource, ...]]:
        """The TPU type that is requested for a job, and where: by its pool, if it has one."""
        pool = self._working_set.pools.get(spec.pool or "")
        if pool is not None:
            return pool.accelerator, self.pool_sources(pool)
        return spec.accelerator, self._allowed_sources(spec)

    def _allowed_sources(self, spec: JobSpec) -> tuple[CapacitySource, ...]:
        constraints = (spec.providers, spec.zones, spec.capacity)
        if constraints not in self._sources:
            self._sources[constraints] = source_choice.allowed_sources(
                spec.providers or self._settings.default_providers,
                spec.zones,
                spec.capacity,
                self._settings.zones_by_provider,
            )
        return self._sources[constraints]

    def supply(self, pool_names: set[str], now: datetime) -> placement.Supply:
        working_set = self._working_set
        reservations = {
            name: [each for each in working_set.reservations if each.pool == name]
            for name in pool_names
        }
        pools = {name: working_set.pools[name] for name in pool_names if name in working_set.pools}
        slices_by_pool = {name: working_set.pool_slices(name) for name in pools}
        slice_settings = {name: self.slice_settings(pool) for name, pool in pools.items()}
        limited = self._settings.slices_per_user is not None or any(
            pool.slices_per_user is not None or reservations[pool.name] for pool in pools.values()
        )
        return placement.Supply(
            pools=pools,
            free={
                name: [
                    _free_slice(tpu_slice, now)
                    for tpu_slice in slices
                    if tpu_slice.state is SliceState.READY
                    and tpu_slice.job_id is None
                    and pools[name].provides(tpu_slice, slice_settings[name])
                ]
                for name, slices in slices_by_pool.items()
            },
            live={
                name: sum(1 for tpu_slice in slices if not tpu_slice.fenced)
                for name, slices in slices_by_pool.items()
            },
            occupants={name: self._occupants(slices) for name, slices in slices_by_pool.items()},
            held=self._held_by_owner() if limited else {},
            pending_requests=self._pending_requests(),
            pool_sources={name: self.pool_sources(pool) for name, pool in pools.items()},
            slices_per_user=self._settings.slices_per_user,
            reservations=reservations,
            exhausted_budgets=working_set.exhausted_budgets,
            admins=working_set.admins,
        )

    def pool_sources(self, pool: Pool) -> tuple[CapacitySource, ...]:
        return source_choice.allowed_sources(
            (pool.provider,), pool.zones, pool.capacity, self._settings.zones_by_provider
        )

    def _occupants(self, slices: list[TpuSlice]) -> list[placement.Occupant]:
        counts: dict[JobId, int] = {}
        for tpu_slice in slices:
            if tpu_slice.job_id in self._working_set.jobs and tpu_slice.live:
                counts[tpu_slice.job_id] = counts.get(tpu_slice.job_id, 0) + 1
        occupants = []
        for job_id, count in counts.items():
            job = self._working_set.jobs[job_id]
            attempts = tuple(self._working_set.attempts.get(job_id, ()))
            attempt = attempts[-1] if attempts and attempts[-1].live else None
            ends = liveness.timeout_at(job, attempts)
            occupants.append(
                placement.Occupant(
                    job_id=job_id,
                    priority=job.spec.priority,
                    since=attempt.created_at if attempt else job.submitted_at,
                    slices=count,
                    ends_by=ends + job.spec.grace if ends else None,
                    stopping=attempt is not None and attempt.state is AttemptState.STOPPING,
                )
            )
        return occupants

    def chips_by_owner(self) -> dict[str, int]:
        """Chips that the jobs of each user hold."""
        chips: dict[str, int] = {}
        working_set = self._working_set
        for job_id, slice_ids in working_set.slices_by_job.items():
            if job_id in working_set.jobs:
                owner = working_set.jobs[job_id].owner
                for slice_id in slice_ids:
                    tpu_slice = working_set.slices[slice_id]
                    if tpu_slice.state in (SliceState.READY, SliceState.DOOMED):
                        kind = type_lookup.find(tpu_slice.accelerator)
                        chips[owner] = chips.get(owner, 0) + kind.chips
        return chips

    def _held_by_owner(self) -> dict[tuple[str | None, str], int]:
        held: dict[tuple[str | None, str], int] = {}
        for job_id, slice_ids in self._working_set.slices_by_job.items():
            if job_id in self._working_set.jobs:
                owner = self._working_set.jobs[job_id].owner
                for slice_id in slice_ids:
                    if self._working_set.slices[slice_id].live:
                        key = (self._working_set.slices[slice_id].pool, owner)
                        held[key] = held.get(key, 0) + 1
        return held

    def _pending_requests(self) -> dict[tuple[CapacitySource, str], int]:
        counts: dict[tuple[CapacitySource, str], int] = {}
        for slice_id in self._working_set.slices_by_state[SliceState.REQUESTED]:
            tpu_slice = self._working_set.slices[slice_id]
            key = (_source_of(tpu_slice), tpu_slice.accelerator)
            counts[key] = counts.get(key, 0) + 1
        return counts


def _free_slice(tpu_slice: TpuSlice, now: datetime) -> placement.FreeSlice:
    reserved = tpu_slice.is_reserved(now)
    return placement.FreeSlice(
        tpu_slice.id,
        tpu_slice.zone,
        tpu_slice.accelerator,
        (tpu_slice.reserved_for or "") if reserved else "",
        tpu_slice.reserved_until if reserved else None,
        tpu_slice.last_owner or "",
        tpu_slice.last_failed,
    )


def _source_of(tpu_slice: TpuSlice) -> CapacitySource:
    return CapacitySource(tpu_slice.provider, tpu_slice.zone, tpu_slice.capacity)
