"""Whether hosts of each provider can reach this server.

While they cannot, nothing is requested from the provider but one slice at a time, with backoff.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from tpufleet.controller.working_set import WorkingSet
from tpufleet.model.fleet.pools import RefusalKind
from tpufleet.model.fleet.slices import TpuSlice
from tpufleet.model.values.records import replace
from tpufleet.policy.scheduling import source_choice
from tpufleet.policy.scheduling.source_choice import CapacitySource


def lost(
    working_set: WorkingSet, tpu_slice: TpuSlice, server_url: str, reason: str, now: datetime
) -> None:
    """The hosts of this slice cannot reach this server."""
    working_set.probes.pop(tpu_slice.provider, None)
    known = working_set.refusals.unreachable_from(tpu_slice.provider)
    if known is not None and tpu_slice.requested_at < known.refused_at:
        return  # requested before that was known: no new evidence
    working_set.put_refusal(
        source_choice.new_refusal(
            CapacitySource(tpu_slice.provider, tpu_slice.zone, tpu_slice.capacity),
            tpu_slice.accelerator,
            reason,
            previous=known,
            now=now,
            kind=RefusalKind.UNREACHABLE,
            server_url=server_url,
        )
    )


def restored(working_set: WorkingSet, provider: str, now: datetime) -> None:
    """A host of this provider has reached this server, or the server has another address."""
    working_set.probes.pop(provider, None)
    known = working_set.refusals.unreachable_from(provider)
    if known is not None:
        working_set.put_refusal(replace(known, streak=0, until=now))


def may_request(
    working_set: WorkingSet, provider: str, group: str, now: datetime, limit: timedelta
) -> bool:
    """Whether slices may be requested. After contact was lost, one group at a time tries whether
    hosts connect again, for `limit` at most."""
    known = working_set.refusals.unreachable_from(provider)
    if known is None:
        return True
    if known.holds(now):
        return False
    working_set.probes[provider] = group
    working_set.put_refusal(replace(known, until=now + limit))
    return True
