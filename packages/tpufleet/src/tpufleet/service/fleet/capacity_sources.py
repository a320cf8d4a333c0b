"""The sources that a waiting job may get its slices from, and what each answered last."""

from __future__ import annotations

from datetime import datetime

from tpufleet.model.api_types import SourceState, SourceStatus
from tpufleet.model.fleet.slices import SliceState, TpuSlice
from tpufleet.model.job.jobs import Job
from tpufleet.policy.scheduling import source_choice
from tpufleet.policy.scheduling.source_choice import CapacitySource, RefusalHistory
from tpufleet.service.operations import server_status
from tpufleet.stores.base import Store

_STATES = {
    SliceState.REQUESTED: SourceState.REQUESTED,
    SliceState.BOOTING: SourceState.BOOTING,
    SliceState.READY: SourceState.READY,
}


def source_statuses(store: Store, job: Job, now: datetime) -> tuple[SourceStatus, ...]:
    """Best first. Empty where no controller has reported its zones."""
    history = RefusalHistory(store.refusals())
    held: dict[CapacitySource, TpuSlice] = {}
    for tpu_slice in store.slices(job_id=job.id):
        if tpu_slice.state in _STATES:
            source = CapacitySource(tpu_slice.provider, tpu_slice.zone, tpu_slice.capacity)
            held[source] = tpu_slice
    return tuple(
        _status(source, job.spec.accelerator, held.get(source), history, now)
        for source in _allowed_sources(store, job)
    )


def _allowed_sources(store: Store, job: Job) -> tuple[CapacitySource, ...]:
    report = server_status.controller_report(store)
    if report is None:
        return ()
    zones_of = {health.name: health.zones for health in report.providers}
    if job.spec.pool is not None:
        pool = store.pool(job.spec.pool)
        if pool is None:
            return ()
        return source_choice.allowed_sources((pool.provider,), pool.zones, pool.capacity, zones_of)
    default = tuple(health.name for health in report.providers if health.default)
    providers = job.spec.providers or default
    return source_choice.allowed_sources(providers, job.spec.zones, job.spec.capacity, zones_of)


def _status(
    source: CapacitySource,
    accelerator: str,
    held: TpuSlice | None,
    history: RefusalHistory,
    now: datetime,
) -> SourceStatus:
    state, message, at, retry_at = SourceState.UNTRIED, "", None, None
    detail = ""
    blocking = history.blocking(source, accelerator, now)
    refusal = blocking or history.latest(source, accelerator)
    if held is not None:
        state, message, at = _STATES[held.state], held.reason, held.requested_at
    elif refusal is not None and refusal.streak:
        state, message, at = SourceState.REFUSED, refusal.message, refusal.refused_at
        detail = refusal.detail
        retry_at = refusal.until if blocking is not None else None
    return SourceStatus(
        provider=source.provider,
        zone=source.zone,
        capacity=source.capacity,
        state=state,
        message=message,
        detail=detail,
        at=at,
        retry_at=retry_at,
    )
