"""Deadlines: when a host counts as lost, a boot as failed and a program as hung."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import msgspec

from tpufleet.model.fleet.bootstrap import BootstrapReport, BootstrapStage
from tpufleet.model.fleet.hosts import HostId, Progress
from tpufleet.model.fleet.slices import SliceId, SliceState, TpuSlice
from tpufleet.model.job.attempts import Attempt, AttemptState
from tpufleet.model.job.jobs import HUNG_AFTER, Capacity, Job
from tpufleet.model.values.records import replace

# Rides out a network blip, yet frees a dead slice within a minute.
HOST_LOST_AFTER = timedelta(seconds=50)
# Of that: how old a report must be before its host is watched. The rest is measured on the
# controller's own clock.
_WATCHED_SHARE = 0.4
# What one server can handle beside its other work, on two cores. Hosts report less often the more
# there are: every 17 s with 10,000 hosts per server, so that a loss is noticed within 60 s.
HEARTBEATS_PER_SECOND = 600
# A server that announced itself within this time takes its share of the heartbeats.
SERVER_PRESENT_FOR = timedelta(seconds=60)
# Heartbeats in a row that may be lost.
_MISSED_HEARTBEATS = 3
# Without a tick for this long, or with the clock set by this much, the server was absent.
MAX_TICK_GAP = timedelta(seconds=10)
MAX_CLOCK_STEP = timedelta(seconds=5)
# Silence alone may cost this share of the hosts in each period; more looks like our own failure.
MAX_LOST_PERCENT = 20
LOSS_PERIOD = timedelta(minutes=1)
# A TPU VM takes 2 to 8 minutes from created to agent; queued capacity is not booting yet.
BOOT_LIMIT = timedelta(minutes=20)
# Machines that run for this long without an agent need an explanation.
SILENT_AFTER = timedelta(minutes=3)
# Machines that run for this long without an agent or a report of their start-up have failed, and so
# have those whose reports do not change. Every stage has a shorter limit on the host.
SILENT_BOOT_LIMIT = timedelta(minutes=10)
# A host of a slice that is hard to replace may take this long to come back, as after a reboot.
RETURN_LIMIT = timedelta(minutes=10)
# Hosts that report for this long that they cannot connect, while this server runs, cannot reach it.
UNREACHABLE_AFTER = timedelta(minutes=2)
# Slices of one job in a row that were paid for and never connected. More would fail the same way.
MAX_FUTILE_CREATIONS = 3
# Or two of them, if they ran for this long together.
MAX_FUTILE_TIME = timedelta(minutes=20)
# An agent reports that it stopped within the job's grace period plus this.
STOP_MARGIN = timedelta(seconds=30)
# How long an agent keeps its workload running without a reply from the server.
AGENT_LEASE = timedelta(minutes=10)


# The server's own presence.


@dataclass(frozen=True, kw_only=True, slots=True)
class Presence:
    """Since when this controller has ticked without a gap, by the wall clock and by its uptime."""

    since: datetime
    since_uptime: timedelta
    last: datetime
    last_uptime: timedelta


def continue_presence(before: Presence | None, now: datetime, uptime: timedelta) -> Presence:
    """Starts again after a gap: a frozen process, a stopped database, a clock that was set."""
    if before is not None:
        passed = uptime - before.last_uptime
        if passed <= MAX_TICK_GAP and not clock_step(before, now, uptime):
            return replace(before, last=now, last_uptime=uptime)
    return Presence(since=now, since_uptime=uptime, last=now, last_uptime=uptime)


def clock_step(before: Presence, now: datetime, uptime: timedelta) -> timedelta:
    """By how much the clock was set forward; negative: back. Small corrections do not count."""
    step = (now - before.last) - (uptime - before.last_uptime)
    return step if abs(step) > MAX_CLOCK_STEP else timedelta(0)


# Silent hosts.


class Silence(msgspec.Struct, frozen=True, kw_only=True):
    """A host whose last report has not changed since the controller first found it old."""

    seen_at: datetime  # by the clock of the server that received the report
    since: timedelta  # by the uptime of the controller


def count_servers(announced: Iterable[datetime], now: datetime) -> int:
    """Servers that share the fleet. A single one does not announce itself."""
    return max(1, sum(abs(now - at) <= SERVER_PRESENT_FOR for at in announced))


def heartbeat_interval(hosts: int, servers: int = 1) -> timedelta:
    """How often a host must report, at the least, in a fleet of this size."""
    return timedelta(seconds=hosts / (HEARTBEATS_PER_SECOND * servers))


def lost_after(hosts: int, servers: int = 1) -> timedelta:
    """How long a host may be silent in a fleet of this size."""
    return max(HOST_LOST_AFTER, _MISSED_HEARTBEATS * heartbeat_interval(hosts, servers))


def watched_after(lost_after: timedelta) -> timedelta:
    """How old the last report of a host may be before the host is watched."""
    return lost_after * _WATCHED_SHARE


def update_silences(
    before: Mapping[HostId, Silence], old_reports: Mapping[HostId, datetime], uptime: timedelta
) -> dict[HostId, Silence]:
    """A report that changed in any way was new, whatever the clocks of the servers say."""
    return {
        host: known
        if (known := before.get(host)) is not None and known.seen_at == seen_at
        else Silence(seen_at=seen_at, since=uptime)
        for host, seen_at in old_reports.items()
    }


def silent_hosts(
    silences: Mapping[HostId, Silence], presence: Presence, limit: timedelta, uptime: timedelta
) -> list[HostId]:
    """Hosts that could have reported and did not, longest silence first. None until the control
    plane has been present for as long as a host may be silent, which is the `limit`."""
    if uptime - presence.since_uptime < limit:
        return []
    confirmed = limit - watched_after(limit)
    return sorted(
        (host for host, silence in silences.items() if uptime - silence.since >= confirmed),
        key=lambda host: (silences[host].since, host),
    )


def slices_to_give_up(
    silent: Sequence[SliceId],
    hosts_by_slice: Mapping[SliceId, int],
    recently_lost: Mapping[SliceId, int],
    max_percent: int = MAX_LOST_PERCENT,
) -> list[SliceId]:
    """Which silent slices count as lost now. A slice is lost with all of its hosts; one slice is
    always allowed when none was lost recently."""
    used = sum(recently_lost.values())
    fleet = sum(hosts_by_slice.values()) + sum(
        hosts for slice_id, hosts in recently_lost.items() if slice_id not in hosts_by_slice
    )
    chosen: list[SliceId] = []
    for slice_id in dict.fromkeys(silent):
        if slice_id in recently_lost:
            chosen.append(slice_id)  # already counted
            continue
        hosts = hosts_by_slice.get(slice_id, 0)
        if used and (used + hosts) * 100 > fleet * max_percent:
            break
        used += hosts
        chosen.append(slice_id)
    return chosen


def may_return(tpu_slice: TpuSlice) -> bool:
    """Whether its silent hosts get the time to reboot. Spot slices are replaced: most of them were
    preempted, and others are soon found. The provider says when machines are really gone."""
    return tpu_slice.capacity is not Capacity.SPOT and tpu_slice.state is SliceState.READY


def await_return(tpu_slice: TpuSlice, host: int, now: datetime) -> TpuSlice:
    minutes = RETURN_LIMIT // timedelta(minutes=1)
    reason = f"no heartbeat from host {host}; it has {minutes} min to come back"
    return replace(tpu_slice, state=SliceState.BOOTING, silent_since=now, reason=reason)


def stays_silent(tpu_slice: TpuSlice, now: datetime, present_since: datetime | None) -> bool:
    since = tpu_slice.silent_since
    return since is not None and now - max(since, present_since or since) > RETURN_LIMIT


# Deadlines. `present_since`: when the server was last absent until; hosts could not report
# before.


def boot_failed(
    tpu_slice: TpuSlice,
    since: datetime,
    now: datetime,
    limit: timedelta,
    present_since: datetime | None = None,
) -> bool:
    """The machines are up, but not every agent has checked in."""
    if present_since is not None and now - present_since < HOST_LOST_AFTER:
        return False
    return tpu_slice.state is SliceState.BOOTING and now - since > limit


def is_silent(tpu_slice: TpuSlice, now: datetime) -> bool:
    """Its machines run for so long that the missing agents need an explanation."""
    return tpu_slice.up_at is not None and now - tpu_slice.up_at >= SILENT_AFTER


def is_futile(creations: int, ran_for: timedelta) -> bool:
    """Whether a job whose last slices were paid for and never connected should request another."""
    return creations >= MAX_FUTILE_CREATIONS or (creations > 1 and ran_for >= MAX_FUTILE_TIME)


def is_stuck(
    tpu_slice: TpuSlice,
    connected: int,
    reports: Sequence[BootstrapReport],
    progress_at: datetime,
    now: datetime,
    present_since: datetime | None = None,
) -> bool:
    """Its machines run, and for long nothing was heard from them, or no stage of their start-up and
    no connection has changed."""
    if tpu_slice.up_at is None or (connected and not reports):
        return False
    since = max(tpu_slice.up_at, progress_at, present_since or progress_at)
    return now - since >= SILENT_BOOT_LIMIT


def slowest_host(reports: Sequence[BootstrapReport]) -> BootstrapReport | None:
    return min(
        (report for report in reports if report.stage is not BootstrapStage.CONNECTED),
        key=lambda report: (list(BootstrapStage).index(report.stage), report.host),
        default=None,
    )


def cannot_connect(
    connecting_since: datetime | None, present_since: datetime | None, now: datetime
) -> bool:
    """Whether hosts that try to connect cannot reach this server, which was present meanwhile."""
    if connecting_since is None:
        return False
    since = max(connecting_since, present_since or connecting_since)
    return now - since >= UNREACHABLE_AFTER


def connecting_host(reports: Sequence[BootstrapReport]) -> BootstrapReport | None:
    """The report of a host that tries to connect."""
    trying = (r for r in reports if r.stage is BootstrapStage.CONNECTING and not r.failed)
    return next(trying, None)


def boot_reason(
    tpu_slice: TpuSlice,
    connected: int,
    expected: int,
    server_url: str,
    reports: Sequence[BootstrapReport],
    now: datetime,
) -> str:
    """What hosts without an agent are doing; after `SILENT_AFTER` the most likely cause why they do
    not connect. Empty if nothing is known."""
    slowest = slowest_host(reports)
    if not is_silent(tpu_slice, now):
        return slowest.text if slowest is not None else ""
    minutes = SILENT_AFTER // timedelta(minutes=1)
    return (
        f"machines run for {minutes} min, but {connected} of {expected} agents have connected; "
        + _silence_cause(slowest, server_url)
    )


def _silence_cause(slowest: BootstrapReport | None, server_url: str) -> str:
    if slowest is None:
        return (
            f"most likely hosts cannot reach {server_url}, or cannot install tpufleet: check "
            "`public_url`, the firewall and the bundle; no host has written guest attributes"
        )
    match slowest.stage:
        case BootstrapStage.CONNECTING:
            return (
                f"hosts cannot reach {server_url}: check `public_url` and the firewall "
                f"({slowest.text})"
            )
        case BootstrapStage.WAITING_FOR_CHIPS | BootstrapStage.CHECKING_CHIPS:
            return f"the TPU driver shows no chips yet ({slowest.text})"
        case BootstrapStage.DOWNLOADING | BootstrapStage.INSTALLING:
            return (
                "hosts cannot download the bundle: check the role of their service account on the "
                f"bucket, and Private Google Access or Cloud NAT ({slowest.text})"
            )
        case _:
            return f"last report: {slowest.text}"


def stop_deadline(
    job: Job, attempt: Attempt, present_since: datetime | None = None
) -> datetime | None:
    """A host that has not reported by then that its processes are gone is lost."""
    if attempt.stopping_at is None:
        return None
    asked_at = max(attempt.stopping_at, present_since or attempt.stopping_at)
    return asked_at + job.spec.grace + STOP_MARGIN


def leases_over_at(job: Job, attempt: Attempt) -> datetime | None:
    """No process of a stopping attempt is left by then, even without a report. An agent that still
    had contact was told to stop; any other stops when its lease expires."""
    deadline = stop_deadline(job, attempt)
    return deadline + AGENT_LEASE if deadline is not None else None


def running_time(attempts: tuple[Attempt, ...], now: datetime) -> timedelta:
    """Time spent running, over all attempts."""
    return sum(
        (
            (attempt.ended_at or now) - attempt.running_at - attempt.clock_step
            for attempt in attempts
            if attempt.running_at
        ),
        timedelta(0),
    )


def timeout_at(job: Job, attempts: tuple[Attempt, ...]) -> datetime | None:
    """When the running attempt will reach the job's time limit; None while none is running."""
    live = attempts[-1] if attempts and attempts[-1].live else None
    if job.spec.timeout is None or live is None or live.running_at is None:
        return None
    before = running_time(attempts[:-1], live.running_at)
    return live.running_at + live.clock_step + job.spec.timeout - before


def hung_at(
    job: Job,
    attempts: tuple[Attempt, ...],
    progress: Progress | None,
    present_since: datetime | None = None,
) -> datetime | None:
    """When the running attempt counts as hung: no progress for `hung_after`. Of a program that
    never reported progress, no output for so long; only where the job says how long."""
    attempt, progress = attempts[-1], progress or Progress()
    if job.spec.hung_after is None or attempt.state is not AttemptState.RUNNING:
        return None
    assert attempt.running_at is not None
    if progress.at is not None:
        hung = max(progress.at, attempt.running_at) + job.spec.hung_after
    elif any(earlier.checkpoint_step is not None for earlier in attempts[:-1]):
        hung = attempt.running_at + job.spec.hung_after
    elif job.spec.hung_after != HUNG_AFTER:
        output_at = progress.output_at or attempt.running_at
        hung = max(output_at, attempt.running_at) + job.spec.hung_after
    else:
        return None
    return hung if present_since is None else max(hung, present_since + HOST_LOST_AFTER)
