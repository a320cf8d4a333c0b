"""Where a waiting job may get its slices from: what each source answered, and its price."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from tpufleet.model import prices, topology
from tpufleet.model.api_types import SourceRow, SourceState
from tpufleet.model.jobs import Job
from tpufleet.model.prices import Price
from tpufleet.model.slices import SIMULATED_PROVIDERS, TpuSlice
from tpufleet.policy.capacity import CapacitySource, RefusalHistory, allowed_sources, choose_source
from tpufleet.stores.base import Store


def capacity_sources(
    store: Store,
    job: Job,
    now: datetime,
    *,
    default_providers: Sequence[str],
    zones_by_provider: Mapping[str, Sequence[str]],
    price_table: Mapping[tuple[str, str], Price],
) -> tuple[SourceRow, ...]:
    """In the order in which they are tried. Empty for a job that has ended."""
    if job.ended:
        return ()
    spec = job.spec
    pool = store.pool(spec.pool) if spec.pool is not None else None
    sources = allowed_sources(
        (pool.provider,) if pool else spec.providers or default_providers,
        pool.zones if pool else spec.zones,
        pool.capacity if pool else spec.capacity,
        zones_by_provider,
    )
    requested: dict[CapacitySource, TpuSlice] = {}
    for each in store.slices(job_id=job.id):
        if each.live:
            requested[CapacitySource(each.provider, each.zone, each.capacity)] = each
    history = RefusalHistory(store.refusals())
    following = choose_source(sources, spec.accelerator, history, now).source
    chips = topology.find(spec.accelerator).chips * spec.slices

    def row(source: CapacitySource) -> SourceRow:
        usd = prices.chip_hour_price(spec.accelerator, source.capacity, price_table)
        tpu_slice = requested.get(source)
        refusal = history.blocking(source, spec.accelerator, now)
        state, message, since, next_try = SourceState.OPEN, "", None, None
        if tpu_slice is not None:
            state, message, since = (
                SourceState.REQUESTED,
                tpu_slice.reason or tpu_slice.state,
                tpu_slice.requested_at,
            )
        elif refusal is not None:
            state, message = SourceState.REFUSED, refusal.message
            since, next_try = refusal.refused_at, refusal.until
        elif source == following and not requested:
            state = SourceState.NEXT
        return SourceRow(
            provider=source.provider,
            zone=source.zone,
            capacity=source.capacity,
            state=state,
            usd_per_hour=None if usd is None else usd * chips,
            simulated=source.provider in SIMULATED_PROVIDERS,
            message=message,
            since=since,
            next_try=next_try,
        )

    known = dict.fromkeys((*sources, *requested))
    return tuple(row(source) for source in known)
