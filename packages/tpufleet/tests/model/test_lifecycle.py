"""State transitions: complete tables, and walks that always end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpufleet.model.fleet import slices
from tpufleet.model.fleet.slices import SliceState
from tpufleet.model.job import jobs
from tpufleet.model.job.attempts import AttemptState
from tpufleet.model.job.jobs import JobState
from tpufleet.model.job.lifecycle import (
    ATTEMPT_TRANSITIONS,
    JOB_TRANSITIONS,
    SLICE_TRANSITIONS,
    can_reach,
    can_transition,
)

TABLES = {
    "job": (JobState, JOB_TRANSITIONS, {JobState.QUEUED}, jobs.ENDED_STATES),
    "attempt": (AttemptState, ATTEMPT_TRANSITIONS, {AttemptState.STARTING}, {AttemptState.ENDED}),
    "slice": (SliceState, SLICE_TRANSITIONS, {SliceState.REQUESTED}, {SliceState.GONE}),
}
each_table = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)


@each_table
def test_every_state_has_a_row_and_only_ended_ones_lead_nowhere(table):
    states, moves, _, ended = table
    assert set(moves) == set(states)
    assert {state for state in states if not moves[state]} == set(ended)


@each_table
def test_rows_hold_states_of_the_table_and_never_the_state_itself(table):
    states, moves, _, _ = table
    for state, row in moves.items():
        assert row <= set(states)
        assert state not in row


@each_table
def test_every_state_can_be_reached_and_every_state_can_end(table):
    states, moves, starts, ended = table
    reached = set(starts)
    while more := set().union(*(moves[state] for state in reached)) - reached:
        reached |= more
    assert reached == set(states)
    for state in set(states) - set(ended):
        assert moves[state] & set(ended), f"{state} cannot end at once"


@pytest.mark.parametrize("name", ["attempt", "slice"])
def test_nothing_returns_to_the_initial_state(name):
    _, moves, starts, _ = TABLES[name]
    assert not any(row & starts for row in moves.values())


def test_a_job_is_queued_again_only_while_nothing_was_started_for_it():
    into = {state for state, row in JOB_TRANSITIONS.items() if JobState.QUEUED in row}
    assert into == {JobState.WAITING}


def test_a_job_succeeds_only_after_an_attempt_began():
    into = {state for state, row in JOB_TRANSITIONS.items() if JobState.SUCCEEDED in row}
    assert into == {JobState.STARTING, JobState.RUNNING, JobState.RECOVERING}


def test_a_released_slice_is_never_usable_again():
    for state in (SliceState.DOOMED, SliceState.RELEASING, SliceState.GONE):
        assert not SLICE_TRANSITIONS[state] & {
            SliceState.REQUESTED, SliceState.BOOTING, SliceState.READY,
        }  # fmt: skip
    assert set(SliceState) - slices.LIVE_STATES == {SliceState.RELEASING, SliceState.GONE}


@each_table
def test_the_tables_define_every_transition(table):
    states, moves, _, _ = table
    for before in states:
        for after in states:
            assert can_transition(before, after) == (before is after or after in moves[before])


@given(st.sampled_from(["attempt", "slice"]), st.data())
def test_walks_of_attempts_and_slices_are_finite(name, data):
    states, moves, starts, ended = TABLES[name]
    state, path = next(iter(starts)), []
    while moves[state]:
        path.append(state)
        # Only a slice whose hosts went silent boots again, as often as they do.
        onward = moves[state] - ({SliceState.BOOTING} if state is SliceState.READY else set())
        state = data.draw(st.sampled_from(sorted(onward)))
        assert can_transition(path[-1], state)
        assert state not in path, "no state comes twice"
    assert state in ended
    assert len(path) < len(states)


@given(st.lists(st.sampled_from(list(JobState)), min_size=1, max_size=40))
def test_no_walk_leaves_an_end_state(wishes):
    state, ended_as = JobState.QUEUED, None
    for wish in wishes:
        if can_transition(state, wish):
            state = wish
        if ended_as is not None:
            assert state is ended_as
        elif state in jobs.ENDED_STATES:
            ended_as = state


REACH = {
    "several transitions": (JobState.QUEUED, JobState.SUCCEEDED, True),
    "none": (SliceState.READY, SliceState.READY, True),
    "an attempt stops before it runs": (AttemptState.STARTING, AttemptState.STOPPING, True),
    "not back to the queue": (JobState.STARTING, JobState.QUEUED, False),
    "not out of an end state": (JobState.FAILED, JobState.RUNNING, False),
    "a slice does not come back": (SliceState.GONE, SliceState.READY, False),
    "a doomed slice stays doomed": (SliceState.DOOMED, SliceState.READY, False),
}


@pytest.mark.parametrize(("before", "after", "expected"), REACH.values(), ids=REACH)
def test_one_commit_may_hold_several_transitions(before, after, expected):
    assert can_reach(before, after) is expected
