"""Which state may follow which. Every store checks every commit against these tables."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from tpufleet.model.fleet.slices import SliceState
from tpufleet.model.job.attempts import AttemptState
from tpufleet.model.job.jobs import ENDED_STATES, JobState

J, A, S = JobState, AttemptState, SliceState

JOB_TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    J.QUEUED: frozenset({J.WAITING, J.STARTING, J.FAILED, J.CANCELLED}),
    J.WAITING: frozenset({J.QUEUED, J.STARTING, J.FAILED, J.CANCELLED}),
    J.STARTING: frozenset({J.RUNNING, J.RECOVERING, *ENDED_STATES}),
    J.RUNNING: frozenset({J.RECOVERING, *ENDED_STATES}),
    J.RECOVERING: frozenset({J.STARTING, *ENDED_STATES}),
    **dict.fromkeys(ENDED_STATES, frozenset()),
}

ATTEMPT_TRANSITIONS: dict[AttemptState, frozenset[AttemptState]] = {
    A.STARTING: frozenset({A.RUNNING, A.STOPPING, A.ENDED}),
    A.RUNNING: frozenset({A.STOPPING, A.ENDED}),
    A.STOPPING: frozenset({A.ENDED}),
    A.ENDED: frozenset(),
}

SLICE_TRANSITIONS: dict[SliceState, frozenset[SliceState]] = {
    S.REQUESTED: frozenset({S.BOOTING, S.READY, S.RELEASING, S.GONE}),
    S.BOOTING: frozenset({S.READY, S.DOOMED, S.RELEASING, S.GONE}),
    S.READY: frozenset({S.BOOTING, S.DOOMED, S.RELEASING, S.GONE}),
    S.DOOMED: frozenset({S.RELEASING, S.GONE}),
    S.RELEASING: frozenset({S.GONE}),
    S.GONE: frozenset(),
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
