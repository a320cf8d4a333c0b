"""Deadlines: when a host counts as lost, a boot as failed and a program as hung."""

from __future__ import annotations

from datetime import datetime, timedelta

from tpufleet.model.attempts import Attempt, AttemptState
from tpufleet.model.hosts import Progress
from tpufleet.model.jobs import Job
from tpufleet.model.slices import SliceState, TpuSlice

# Rides out a network blip, yet frees a dead slice within a minute.
HOST_LOST_AFTER = timedelta(seconds=50)
# A TPU VM takes 2 to 8 minutes from created to agent; queued capacity is not booting yet.
BOOT_LIMIT = timedelta(minutes=20)
# Machines that run for this long without an agent need an explanation.
SILENT_AFTER = timedelta(minutes=3)
# Slices of one job in a row that were paid for and never connected. More would fail the same way.
MAX_FUTILE_CREATIONS = 3
# An agent reports that it stopped within the job's grace period plus this.
STOP_MARGIN = timedelta(seconds=30)
# How long an agent keeps its workload running without a reply from the control plane.
AGENT_LEASE = timedelta(minutes=10)


def boot_failed(tpu_slice: TpuSlice, since: datetime, now: datetime, limit: timedelta) -> bool:
    """The machines are up, but not every agent has checked in."""
    return tpu_slice.state is SliceState.BOOTING and now - since > limit


def silent_reason(
    tpu_slice: TpuSlice, connected: int, expected: int, server_url: str, now: datetime
) -> str:
    """Why no agent connects from machines that run, as far as can be told; empty if it is too early
    to ask, or if the provider knows more."""
    if tpu_slice.up_at is None or now - tpu_slice.up_at < SILENT_AFTER:
        return ""
    minutes = SILENT_AFTER // timedelta(minutes=1)
    return (
        f"machines run for {minutes} min, but {connected} of {expected} agents have connected; "
        f"most likely hosts cannot reach {server_url}, or cannot install tpufleet: check "
        "`public_url`, the firewall and the wheel, and read the serial console of a host"
    )


def stop_deadline(job: Job, attempt: Attempt) -> datetime | None:
    """A host that has not reported by then that its processes are gone is lost."""
    if attempt.stopping_at is None:
        return None
    return attempt.stopping_at + job.spec.grace + STOP_MARGIN


def leases_over_at(job: Job, attempt: Attempt) -> datetime | None:
    """No process of a stopping attempt is left by then, even without a report. An agent that still
    had contact was told to stop; any other stops when its lease expires."""
    deadline = stop_deadline(job, attempt)
    return deadline + AGENT_LEASE if deadline is not None else None


def running_time(attempts: tuple[Attempt, ...], now: datetime) -> timedelta:
    """Time spent running, over all attempts."""
    return sum(
        (
            (attempt.ended_at or now) - attempt.running_at
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
    return live.running_at + job.spec.timeout - before


def hung_at(job: Job, attempts: tuple[Attempt, ...], progress: Progress | None) -> datetime | None:
    """When the running attempt counts as hung: no progress for `hung_after`.

    A program that has never reported progress never counts as hung.
    """
    attempt = attempts[-1]
    if job.spec.hung_after is None or attempt.state is not AttemptState.RUNNING:
        return None
    assert attempt.running_at is not None
    if progress is not None and progress.at is not None:
        return max(progress.at, attempt.running_at) + job.spec.hung_after
    reported_before = any(earlier.checkpoint_step is not None for earlier in attempts[:-1])
    return attempt.running_at + job.spec.hung_after if reported_before else None
