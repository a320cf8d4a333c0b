"""From a fault to the next step: parts add up, and attempts without a new step are one fault."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.policy.builders import after, make_attempt
from tpufleet.model.job.attempts import Attempt, AttemptState, Startup
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.policy.recovery.recovery_time import program_parts, recoveries, resumed_step

STARTUP = Startup(
    assigned_at=after(4),
    started_at=after(6),
    imported_at=after(9),
    connect_seconds=1.0,
    restore_seconds=0.5,
    compile_seconds=2.0,
    stepped_at=after(13),
    first_step=21,
    advanced_at=after(14),
)
FAILED = make_attempt(
    0,
    state=AttemptState.ENDED,
    fault_at=after(0),
    stopping_at=after(1),
    ended_at=after(2),
    end_reason=EndReason.PREEMPTED,
    last_step=25,
)


def attempt(number: int, **facts) -> Attempt:
    return make_attempt(number, created_at=after(3.5), **facts)


def test_the_parts_of_a_recovery_add_up_to_its_time():
    [found] = recoveries([FAILED, attempt(1, startup=STARTUP, start_step=20)])
    assert found.parts == {
        "detect": 1.0, "stop": 1.0, "slice": 1.5, "agent": 0.5, "setup": 2.0, "import": 3.0,
        "connect": 1.0, "restore": 0.5, "compile": 2.0, "first step": 0.5, "redo": 1.0,
    }  # fmt: skip
    assert sum(found.parts.values()) == found.seconds == 14.0
    assert (found.attempt, found.reason, found.resumed_step, found.lost_steps) == (
        1, EndReason.PREEMPTED, 20, 5,
    )  # fmt: skip


def test_what_a_program_without_the_runtime_does_until_its_first_step_is_one_part():
    plain = Startup(assigned_at=after(4), started_at=after(6), stepped_at=after(13))
    assert {name: taken for name, taken in program_parts(plain) if taken} == {"program": 7.0}


@pytest.mark.parametrize(
    ("seconds", "compiled"), [(3.0, 3.0), (1e9, 4.0), (-5.0, 0.0)], ids=["said", "more", "less"]
)
def test_what_a_program_says_of_itself_never_exceeds_its_time(seconds, compiled):
    told = replace(STARTUP, connect_seconds=0, restore_seconds=0, compile_seconds=seconds)
    parts = dict(program_parts(told))
    assert parts["compile"] == compiled
    assert sum(parts.values()) == 7.0


def test_attempts_that_made_no_new_step_prolong_the_recovery():
    again = attempt(
        1, state=AttemptState.ENDED, ended_at=after(3), fault_at=after(2.8), last_step=21,
        end_reason=EndReason.USER_ERROR, startup=replace(STARTUP, advanced_at=None),
    )  # fmt: skip
    [found] = recoveries([FAILED, again, attempt(2, startup=STARTUP)])
    assert (found.attempt, found.reason, found.seconds) == (2, EndReason.PREEMPTED, 14.0)
    assert (found.resumed_step, found.lost_steps) == (20, 5), "by its first step"
    assert recoveries([FAILED, again]) == ()


@pytest.mark.parametrize(
    ("start", "first", "resumed"),
    [(20, 21, 20), (20, 20, 20), (20, 30, 20), (20, 11, 10), (None, 21, 20), (20, None, 20)],
    ids=["next", "from-0", "each-tenth", "newest-is-damaged", "not-seen", "no-step"],
)
def test_where_an_attempt_resumed(start, first, resumed):
    at = replace(STARTUP, first_step=first) if first else None
    assert resumed_step(attempt(1, startup=at, start_step=start)) == resumed


def test_two_faults_are_two_recoveries():
    second = attempt(
        1, state=AttemptState.ENDED, fault_at=after(20), stopping_at=after(20),
        ended_at=after(21), end_reason=EndReason.HUNG, startup=STARTUP, last_step=30,
    )  # fmt: skip
    began = replace(STARTUP, advanced_at=after(32), first_step=31)
    last = attempt(2, startup=began, start_step=30)
    found = recoveries([FAILED, second, last])
    assert [(each.attempt, each.reason, each.seconds) for each in found] == [
        (1, EndReason.PREEMPTED, 14.0), (2, EndReason.HUNG, 12.0),
    ]  # fmt: skip
    assert found[1].lost_steps == 0
