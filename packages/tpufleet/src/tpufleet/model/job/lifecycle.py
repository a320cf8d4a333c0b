"""Which state may follow which. Every store checks every commit against these tables."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from tpufleet.model.fleet.slices import SliceState
from tpufleet.model.job.attempts import AttemptState
from tpufleet.model.job.jobs import JobState

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


_TABLES: dict[type[StrEnum], Mapping[StrEnum, frozenset[StrEnum]]] = {
    JobState: JOB_TRANSITIONS,  # type: ignore[dict-item]  # keys of a Mapping are invariant
    AttemptState: ATTEMPT_TRANSITIONS,  # type: ignore[dict-item]
    SliceState: SLICE_TRANSITIONS,  # type: ignore[dict-item]
}


def can_transition(before: StrEnum, after: StrEnum) -> bool:
    """Whether this is one transition, or none."""
    return before is after or after in _TABLES[type(before)][before]


def can_reach(before: StrEnum, after: StrEnum) -> bool:
    """Whether any number of transitions leads there. One commit may hold several: a gang starts
    and is lost within the same tick."""
    return after in _REACHABLE[type(before)][before]


def _reachable(
    state: StrEnum, transitions: Mapping[StrEnum, frozenset[StrEnum]]
) -> frozenset[StrEnum]:
    reached, new = {state}, {state}
    while new:
        new = {after for before in new for after in transitions[before]} - reached
        reached |= new
    return frozenset(reached)


# By type first: members of two enums with the same text are equal.
_REACHABLE = {
    kind: {state: _reachable(state, table) for state in table} for kind, table in _TABLES.items()
}
