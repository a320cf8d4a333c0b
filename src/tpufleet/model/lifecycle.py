"""Which state may follow which. Journeys and stores hold every change against these tables."""

from __future__ import annotations

from enum import StrEnum

from tpufleet.model.attempts import AttemptState
from tpufleet.model.jobs import JobState
from tpufleet.model.slices import SliceState

JOB_TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset(
        {JobState.WAITING, JobState.STARTING, JobState.FAILED, JobState.CANCELLED}
    ),
    JobState.WAITING: frozenset(
        {JobState.QUEUED, JobState.STARTING, JobState.FAILED, JobState.CANCELLED}
    ),
    JobState.STARTING: frozenset(
        {
            JobState.RUNNING,
            JobState.RECOVERING,
            JobState.SUCCEEDED,
            JobState.FAILED,
            JobState.CANCELLED,
        }
    ),
    JobState.RUNNING: frozenset(
        {JobState.RECOVERING, JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}
    ),
    JobState.RECOVERING: frozenset(
        {JobState.STARTING, JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}
    ),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}

ATTEMPT_TRANSITIONS: dict[AttemptState, frozenset[AttemptState]] = {
    AttemptState.STARTING: frozenset(
        {AttemptState.RUNNING, AttemptState.STOPPING, AttemptState.ENDED}
    ),
    AttemptState.RUNNING: frozenset({AttemptState.STOPPING, AttemptState.ENDED}),
    AttemptState.STOPPING: frozenset({AttemptState.ENDED}),
    AttemptState.ENDED: frozenset(),
}

SLICE_TRANSITIONS: dict[SliceState, frozenset[SliceState]] = {
    SliceState.REQUESTED: frozenset(
        {SliceState.BOOTING, SliceState.READY, SliceState.RELEASING, SliceState.GONE}
    ),
    SliceState.BOOTING: frozenset(
        {SliceState.READY, SliceState.DOOMED, SliceState.RELEASING, SliceState.GONE}
    ),
    SliceState.READY: frozenset({SliceState.DOOMED, SliceState.RELEASING, SliceState.GONE}),
    SliceState.DOOMED: frozenset({SliceState.RELEASING, SliceState.GONE}),
    SliceState.RELEASING: frozenset({SliceState.GONE}),
    SliceState.GONE: frozenset(),
}


_TABLES: dict[type, dict] = {
    JobState: JOB_TRANSITIONS,
    AttemptState: ATTEMPT_TRANSITIONS,
    SliceState: SLICE_TRANSITIONS,
}


def can_transition(before: StrEnum, after: StrEnum) -> bool:
    """Staying is always allowed; every other move must be in its table."""
    return before is after or after in _TABLES[type(before)][before]
