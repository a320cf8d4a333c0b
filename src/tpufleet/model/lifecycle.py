"""Which state may follow which. Journeys and stores hold every change against these tables."""

from __future__ import annotations

from tpufleet.model.attempts import AttemptState
from tpufleet.model.jobs import JobState
from tpufleet.model.slices import SliceState

JOB_MOVES: dict[JobState, frozenset[JobState]] = {
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

ATTEMPT_MOVES: dict[AttemptState, frozenset[AttemptState]] = {
    AttemptState.STARTING: frozenset(
        {AttemptState.RUNNING, AttemptState.STOPPING, AttemptState.ENDED}
    ),
    AttemptState.RUNNING: frozenset({AttemptState.STOPPING, AttemptState.ENDED}),
    AttemptState.STOPPING: frozenset({AttemptState.ENDED}),
    AttemptState.ENDED: frozenset(),
}

SLICE_MOVES: dict[SliceState, frozenset[SliceState]] = {
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


def may_move(before: object, after: object) -> bool:
    """Staying is always allowed; every other move must be in its table."""
    if before == after:
        return True
    for table in (JOB_MOVES, ATTEMPT_MOVES, SLICE_MOVES):
        if before in table:
            return after in table[before]  # type: ignore[index]
    raise KeyError(before)
