"""What the time of an attempt went into."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from tests.policy.builders import after, make_attempt
from tpufleet.model.job.attempts import Attempt, AttemptState, Startup
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.model.people.costs import Badput
from tpufleet.policy.accounting import goodput

# Setup 10 s, start 50 s with 5 s of connecting, 4 of restoring; 100 steps of a second from 60 on.
STARTUP = Startup(
    assigned_at=after(1),
    started_at=after(10),
    imported_at=after(30),
    connect_seconds=5.0,
    restore_seconds=4.0,
    compile_seconds=15.0,
    stepped_at=after(61),
    first_step=1,
    advanced_at=after(61),
)
ENDED = make_attempt(
    0,
    state=AttemptState.ENDED,
    startup=STARTUP,
    running_at=after(11),
    progress_at=after(160),
    stopping_at=after(163),
    ended_at=after(170),
    end_reason=EndReason.USER_ERROR,
    fault_at=after(162),
    last_step=100,
    checkpoint_step=80,
    save_seconds=10.0,
)


def seconds(attempt: Attempt, **more) -> dict[str, float]:
    """By class; what counts is `useful`."""
    sums: dict[str, float] = {}
    for span in goodput.spans(attempt, after(200), **more):
        length = (span.end - span.begin).total_seconds()
        for kind, share in {**span.badput, "useful": 1 - sum(span.badput.values())}.items():
            sums[str(kind)] = sums.get(str(kind), 0.0) + length * share
    return {kind: round(value, 3) for kind, value in sums.items() if value > 1e-9}


def test_every_second_of_a_faulted_attempt_has_a_class():
    assert seconds(ENDED) == {
        "other": 10.0, "program_startup": 41.0, "tpu_initialization": 5.0,
        "unproductive_checkpoint_restore_time": 4.0, "unproductive_checkpoint_save_time": 10.0,
        "useful": 72.0, "wasted_progress_from_disruption": 18.0 + 2.0,
        "infrastructure_recovery_from_disruption": 8.0,
    }  # fmt: skip


def test_setup_of_a_later_attempt_is_recovery_and_an_end_on_request_is_none():
    assert seconds(replace(ENDED, number=1))[Badput.INFRASTRUCTURE_RECOVERY] == 18.0
    finished = replace(ENDED, end_reason=EndReason.FINISHED, fault_at=None)
    assert seconds(finished)[Badput.OTHER] == 20.0
    assert Badput.WASTED_PROGRESS not in seconds(finished)


@pytest.mark.parametrize(
    ("facts", "resumed", "wasted"),
    [
        pytest.param({"checkpoint_step": 100}, None, 0.0, id="saved at the end"),
        pytest.param({"checkpoint_step": 40}, None, 60.0, id="by its checkpoint"),
        pytest.param({"checkpoint_step": None}, 51, 50.0, id="by where the next one began"),
        pytest.param({"checkpoint_step": None}, None, 100.0, id="nothing is known to be kept"),
        pytest.param({"checkpoint_step": 40}, 91, 10.0, id="the next one found a newer checkpoint"),
    ],
)
def test_steps_that_are_made_again_are_wasted(facts, resumed, wasted):
    ended = replace(ENDED, save_seconds=0.0, fault_at=after(160), **facts)
    next_one = resumed and make_attempt(1, startup=replace(STARTUP, first_step=resumed))
    found = seconds(ended, after=next_one or None)
    assert found.get(Badput.WASTED_PROGRESS, 0.0) == wasted


def test_steps_that_were_saved_and_never_reported_are_not_wasted():
    """The slice was lost before its next heartbeat, two seconds later: with a checkpoint of 101."""
    ended = replace(ENDED, save_seconds=0.0)
    later = make_attempt(1, start_step=101, startup=replace(STARTUP, first_step=102))
    assert seconds(ended, after=later)[Badput.WASTED_PROGRESS] == 1.0


def test_a_program_that_saved_on_request_wasted_nothing():
    """Its last step took longer than those before it, and was never reported."""
    asked = replace(ENDED, save_seconds=0.0, stop_reason=EndReason.PREEMPTED, checkpoint_step=101)
    later = make_attempt(1, start_step=101, startup=replace(STARTUP, first_step=102))
    assert Badput.WASTED_PROGRESS not in seconds(asked, after=later)
    assert seconds(replace(asked, aborted=True), after=later)[Badput.WASTED_PROGRESS] == 1.0


def test_steps_before_the_first_report_are_not_the_start_of_the_program():
    """It reports each tenth step: at 70 for the first time."""
    every_tenth = replace(STARTUP, stepped_at=after(70), first_step=10)
    found = seconds(replace(ENDED, startup=every_tenth, start_step=0, save_seconds=0.0))
    assert found["useful"] + found[Badput.WASTED_PROGRESS] == 100.0 + 2.0


@pytest.mark.parametrize("reporting", [True, False])
def test_a_live_attempt_is_useful_once_it_reports_steps(reporting):
    live = make_attempt(0, running_at=after(10))
    assert seconds(live, reporting=reporting) == {
        "other": 10.0, "useful" if reporting else "unknown": 190.0,
    }  # fmt: skip
    stepping = replace(live, startup=STARTUP)
    assert seconds(stepping)["useful"] == pytest.approx(200 - 61)


def test_an_attempt_whose_steps_are_unknown_has_no_goodput():
    silent = make_attempt(running_at=after(10))
    assert goodput.useful_share(goodput.spans(silent, after(60))) is None
    whole = goodput.spans(ENDED, after(200))
    assert whole[-1].end - whole[0].begin == timedelta(seconds=170)
    assert goodput.useful_share(whole) == pytest.approx(72 / 170)


@pytest.mark.parametrize(
    "forged",
    [
        pytest.param({"save_seconds": 1e300}, id="saving"),
        pytest.param(
            {"start_step": 1, "last_step": 2**53, "checkpoint_step": 1,
             "startup": replace(STARTUP, first_step=2**53 - 1)}, id="steps",
        ),
        pytest.param(
            {"startup": replace(STARTUP, connect_seconds=3e8, restore_seconds=3e8)}, id="parts"
        ),
    ],
)  # fmt: skip
def test_what_a_program_makes_up_changes_neither_the_sum_nor_ends_the_server(forged):
    found = seconds(replace(ENDED, **forged))
    assert sum(found.values()) == pytest.approx(sum(seconds(ENDED).values()))
    assert all(0 <= value <= 170 for value in found.values())
