"""The status of the control plane, from what its leader reported and from the store."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import tpufleet
from tpufleet.model.fleet.pools import RefusalKind
from tpufleet.model.fleet.server_status import (
    CONTROLLER_REPORT,
    ControllerReport,
    LocalJobs,
    LoggedError,
    ServerStatus,
)
from tpufleet.model.job.jobs import JobState
from tpufleet.model.values import encoding
from tpufleet.service.operations import server_presence
from tpufleet.service.operations.recent_errors import RecentErrors
from tpufleet.stores.base import JobQuery, Store

# The leader reports every 15 seconds, and another takes over within 15.
STALE_AFTER = timedelta(seconds=60)


HOST_SEEN_WITHIN = timedelta(minutes=2)
# Jobs are listed newest first; the oldest of this many stands for the oldest of all.
_MAX_QUEUED = 10_000
_EPOCH = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True, kw_only=True, slots=True)
class AboutServer:
    """What this server knows about itself."""

    name: str = ""  # for `tpu status`
    started_at: datetime | None = None
    public_url: str = ""  # under which others reach it, if not by its own address
    announced: bool = False  # other servers may use its store
    recent_errors: RecentErrors | None = None  # in its log
    local_jobs: LocalJobs | None = None


def status(
    store: Store,
    now: datetime,
    about: AboutServer | None = None,
    errors: tuple[LoggedError, ...] = (),
) -> ServerStatus:
    about = about or AboutServer()
    report = controller_report(store)
    queued = store.jobs(JobQuery(states=frozenset({JobState.QUEUED}), limit=_MAX_QUEUED))
    blocked = [
        refusal
        for refusal in store.refusals()
        if refusal.holds(now) and refusal.kind is not RefusalKind.UNREACHABLE  # in the report
    ]
    return ServerStatus(
        version=tpufleet.__version__,
        now=now,
        controller=report,
        controller_stale=is_stale(report, now),
        jobs=store.count_jobs(),
        slices=len(store.slices()),
        waiting_for=tuple(sorted(blocked, key=lambda refusal: (refusal.until, refusal.key))),
        oldest_queued_at=queued[-1].submitted_at if queued else None,
        hosts=len(store.heartbeats_outside(_EPOCH, now - HOST_SEEN_WITHIN)),
        started_at=about.started_at,
        server=about.name,
        servers=tuple(server_presence.servers(store, now)),
        errors=errors,
        local_jobs=about.local_jobs,
    )


def controller_report(store: Store) -> ControllerReport | None:
    text = store.metadata(CONTROLLER_REPORT)
    return encoding.from_json(text, ControllerReport) if text else None


def is_stale(report: ControllerReport | None, now: datetime) -> bool:
    return report is None or now - report.reported_at > STALE_AFTER
