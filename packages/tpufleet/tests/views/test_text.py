"""How values are displayed: ages, progress, events, untrusted text."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from random import Random

import pytest
from msgspec import structs

from tpufleet.model.api_types import JobRow
from tpufleet.model.events import Event, EventKind
from tpufleet.model.fleet.hosts import Progress
from tpufleet.model.fleet.slices import SliceState
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.model.job.jobs import JobState
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
        (Progress(checkpoint_step=35), "checkpoint 35"),
        (Progress(step=7), "step 7"),
        (Progress(step=30, total=120), "30/120 (25%)"),
        (Progress(step=9, total=3), "9/3 (100%)"),
        (Progress(step=0, total=0), "step 0"),
    ],
)
def test_progress_shows_what_is_known(reported, expected):
    assert text.progress(reported) == expected


@pytest.mark.parametrize(
    ("output", "activity"),
    [
        ("Compiling train_step\n", "compiling"),
        ("jit compilation of f\n", "compiling"),
        ("Compile sampler\nSampling 50k images\n", "sampling"),
        ("compiling\nEpoch 12: loss 0.3\nsaved\n", "running, epoch 12"),
        ("I1116 ep = 3.25, loss 0.1\n", "running, epoch 3.25"),
        ("Initializing TPU system\n", "initializing"),
        ("staging files\n", "staging"),
        ("Epoch 1\nstep = 4\nCompiling eval_step\n", "compiling"),
        ("compiled in 3 s\nresampling rate 0.1\n", ""),
        ("", ""),
    ],
)
def test_an_activity_is_read_from_the_newest_line_that_names_one(output, activity):
    assert text.activity(output) == activity


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


ATTACKS = {
    "title": ("a\x1b]0;PWNED\x07b", "ab"),
    "title, other end": ("a\x1b]0;PWNED\x1b\\b", "ab"),
    "clipboard": ("a\x1b]52;c;cHduZWQ=\x07b", "ab"),
    "link": ("\x1b]8;;http://evil\x07here\x1b]8;;\x07", "here"),
    "unfinished string": ("a\x1b]0;PWNED", "a"),
    "clear screen": ("a\x1b[2J\x1b[Hb", "ab"),
    "C1 sequence": ("a\x9b2Jb", "ab"),
    "C1 string": ("a\x9d0;PWNED\x9cb", "ab"),
    "device control": ("a\x1bP$q\x1b\\b", "ab"),
    "report": ("a\x1b[6n\x1b[cb", "ab"),
    "reset": ("a\x1bcb", "ab"),
    "charset": ("a\x1b(0b", "ab"),
    "bell and backspace": ("a\x07\x08b", "ab"),
    "bidirectional": ("a\u202eb\u2066c", "abc"),
    "private colours": ("a\x1b[>4;2mb", "ab"),
    "end of input": ("a\x1b", "a"),
}


@pytest.mark.parametrize(("line", "shown"), ATTACKS.values(), ids=ATTACKS)
def test_output_of_a_program_cannot_control_the_terminal(line, shown):
    assert text.program_output(line) == shown


def test_output_of_a_program_keeps_colours_tabs_and_progress_bars():
    assert text.program_output("\x1b[1;31mred\x1b[0m") == "\x1b[1;31mred\x1b[0m\x1b[0m"
    assert text.program_output("10%\r20%\tx ü → 漢") == "10%\r20%\tx ü → 漢"


def test_a_progress_bar_stays_beside_its_host():
    assert text.program_output("[0] 10%\r20%") == "[0] 10%\r[0] 20%"


def test_no_combination_of_bytes_gets_through():
    """Removing one sequence must not join the halves of another."""
    signs = "\x1b]\x07[2J\x9b\\;m0P\x9d\x9c\r\u202e"
    random = Random(1)
    for _ in range(5000):
        line = "".join(random.choices(signs, k=12))
        left = re.sub(r"\x1b\[[0-9;:]*m|\r", "", text.program_output(line))
        assert left.isprintable(), repr(line)


@pytest.mark.parametrize("at", range(12))
def test_a_sequence_that_is_split_between_pieces_is_removed(at):
    whole = "a\x1b]0;PWN\x07b\nc"
    assert "".join(text.program_lines([whole[:at], whole[at:]])) == "ab\nc"


@pytest.mark.parametrize("sign", "\u202e\u2066\u2069\u200f\u061c\u2028\x9b\x1b\x07\x08\r")
def test_texts_of_users_have_no_control_characters(sign):
    assert text.one_line(f"a{sign}b") in ("a\ufffdb", "a b")
    assert sign not in text.without_control_characters(f"a{sign}b")


@pytest.mark.parametrize(
    ("minutes", "state", "expected"),
    [
        (9, JobState.RUNNING, "step 7"),
        (25, JobState.RUNNING, "step 7, 25 min ago"),
        (25, JobState.SUCCEEDED, "step 7"),
    ],
)
def test_the_last_step_of_a_silent_job_has_its_age(minutes, state, expected):
    row = JobRow(
        id="j", name="j", owner="mel", state=state, reason="", accelerator="v5litepod-16",
        slices=1, pool=None, priority=0, tags=(), submitted_at=NOW, ended_at=None, attempts=1,
        progress=Progress(step=7, at=NOW - timedelta(minutes=minutes)), parent=None,
    )  # fmt: skip
    assert text.job_progress(row, NOW) == expected
    output = Progress(output_at=NOW - timedelta(minutes=minutes))
    quiet = {"step 7": "-", "step 7, 25 min ago": "no output for 25 min"}[expected]
    assert text.job_progress(structs.replace(row, progress=output), NOW) == quiet
