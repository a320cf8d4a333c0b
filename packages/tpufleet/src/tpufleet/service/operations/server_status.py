"""The status of the server, from what its leader reported and from the store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import tpufleet
from tpufleet import disk_space
from tpufleet.clocks import Clock
from tpufleet.errors import FleetError, StorageFull
from tpufleet.model.fleet.pools import RefusalKind
from tpufleet.model.fleet.server_status import (
    CONTROLLER_REPORT,
    SERVERS_PREFIX,
    ControllerReport,
    LocalJobs,
    LoggedError,
    SeenServer,
    ServerStatus,
)
from tpufleet.model.job.jobs import JobState
from tpufleet.model.values import encoding
from tpufleet.policy.recovery import liveness
from tpufleet.service.operations.background import log_failure
from tpufleet.service.operations.recent_errors import RecentErrors
from tpufleet.stores.base import JobQuery, Store

logger = logging.getLogger(__name__)

ANNOUNCE_SECONDS = liveness.SERVER_PRESENT_FOR.total_seconds() / 4
# A server that was killed or is suspended is shown for this long.
FORGET_AFTER = timedelta(hours=1)
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
        servers=tuple(servers(store, now)),
        errors=errors,
        local_jobs=about.local_jobs,
    )


def controller_report(store: Store) -> ControllerReport | None:
    text = store.metadata(CONTROLLER_REPORT)
    return encoding.from_json(text, ControllerReport) if text else None


def is_stale(report: ControllerReport | None, now: datetime) -> bool:
    return report is None or now - report.reported_at > STALE_AFTER


def write_problem(store: Store, state: Path) -> FleetError | None:
    """Of the database, or of the disk of the state folder. Nothing is written to find out."""
    error = store.write_error()
    if error is None and disk_space.is_full(state):
        return StorageFull(f"no space left on the disk of {state}")
    return error


# The servers that use one store: each says every few seconds that it runs, for `tpu status`.


def announce_until(stopping: threading.Event, store: Store, name: str, clock: Clock) -> None:
    """Until `stopping` is set; the server is then no longer listed. Runs in its own thread."""
    while True:
        try:
            announce(store, name, store.time() or clock.now())
        except Exception as error:
            log_failure(logger, "announce this server", error)
        if stopping.wait(ANNOUNCE_SECONDS):
            break
    try:
        store.delete_objects([SERVERS_PREFIX + name])
    except FleetError as error:
        logger.debug("cannot withdraw this server: %s", error)


def announce(store: Store, name: str, now: datetime) -> None:
    store.put_object(SERVERS_PREFIX + name, tpufleet.__version__.encode(), now, replace=True)
    old = [each.name for each in store.objects(SERVERS_PREFIX) if now - each.at > FORGET_AFTER]
    if old:
        store.delete_objects(old)


def servers(store: Store, now: datetime) -> Sequence[SeenServer]:
    """By name."""
    seen = [each for each in store.objects(SERVERS_PREFIX) if now - each.at <= FORGET_AFTER]
    versions = store.read_objects([each.name for each in seen]) if seen else {}
    return [
        SeenServer(
            name=each.name.removeprefix(SERVERS_PREFIX),
            version=versions[each.name].decode(),
            seen_at=each.at,
        )
        for each in seen
        if each.name in versions
    ]
