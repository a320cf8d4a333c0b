"""How values are displayed: ages, progress, events, untrusted text."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from tpufleet.model.end_reasons import EndReason
from tpufleet.model.events import Event, EventKind
from tpufleet.model.hosts import Progress
from tpufleet.model.jobs import JobState
from tpufleet.model.slices import SliceState
from tpufleet.views import text

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "just now"), (12, "12 s ago"), (59, "59 s ago"), (180, "3 min ago"), (3600, "1 h ago"),
     (3900, "1 h 5 min ago"), (86400, "1 d ago"), (100800, "1 d 4 h ago"), (-300, "in 5 min")],
)  # fmt: skip
def test_times_are_shown_as_ages(seconds, expected):
    assert text.age(NOW - timedelta(seconds=seconds), NOW) == expected


def test_no_time_is_a_dash():
    assert text.age(None, NOW) == "-"


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        (None, "-"),
        (Progress(), "-"),
        (Progress(message="compiling"), "compiling"),
        (Progress(step=7), "step 7"),
        (Progress(step=30, total=120), "30/120 (25%)"),
        (Progress(step=9, total=3), "9/3 (100%)"),
        (Progress(step=0, total=0), "step 0"),
    ],
)
def test_progress_shows_what_is_known(reported, expected):
    assert text.progress(reported) == expected


def test_every_state_of_jobs_and_slices_has_a_colour():
    assert all(text.colour(state) for state in [*JobState, *SliceState])
    assert text.colour("preempted") == text.colour(EndReason.PREEMPTED) == text.AMBER
    assert text.colour("no such state") == ""


def test_untrusted_text_cannot_control_the_terminal():
    event = Event(at=NOW, kind=EventKind.JOB, state="failed", message="bad \x1b[2J\x07\ntext\x9b1m")
    line = text.event(event)
    assert not {"\x1b", "\x07", "\x9b"} & set(line)
    assert line.endswith("bad �[2J� text�1m")


def test_an_event_names_the_user_once():
    by = {"at": NOW, "kind": EventKind.JOB, "state": "cancelled", "by": "ada"}
    assert text.event(Event(message="cancelled", **by)).endswith("cancelled (by ada)")
    assert text.event(Event(message="ada cancelled it", **by)).endswith("ada cancelled it")


def test_a_time_has_its_date_unless_it_is_today():
    assert len(text.local_time(NOW, NOW)) == len("12:00:00")
    assert text.local_time(NOW - timedelta(days=2), NOW).startswith("2025-12-")
