"""The checks of the kill tests see what they are there to see."""

from __future__ import annotations

import json

import pytest

from tests.chaos import ledger
from tests.chaos.ledger import Run


def run(attempt, steps, *, at=0.0, after=None, finished=False, others=(), pid=7):
    """A process that did these steps, one a second."""
    after = steps[0] - 1 if after is None and steps else after if after is not None else -1
    notes = [{"kind": "start", "at": at, "pid": pid, "after": after, "others": list(others)}]
    for number, step in enumerate(steps, start=1):
        notes.append({"kind": "step", "at": at + number, "pid": pid, "step": step, "lines": number})
    if finished:
        notes.append({"kind": "finished", "at": at + len(steps), "pid": pid, "lines": len(steps)})
    return Run(attempt=attempt, process=0, notes=tuple(notes))


def saved(before, step):
    note = {"kind": "saved", "at": before.last, "pid": 7, "step": step}
    return Run(attempt=before.attempt, process=0, notes=(*before.notes, note))


def faults(folder, *runs, state=None):
    state = state or ledger.digest_after(4, 0)
    (folder / "result.0").write_text(json.dumps({"state": state, "attempt": 1}))
    return list(ledger.violations(runs, folder, steps=4, processes=1))


GOOD = (saved(run(0, [0, 1, 2]), 1), run(1, [2, 3], at=10, finished=True))


def test_an_attempt_that_goes_on_from_the_last_checkpoint_is_in_order(tmp_path):
    assert faults(tmp_path, *GOOD) == []


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([run(0, [0, 1]), run(1, [2, 3], at=1.5, finished=True)], "before the last sign of 0"),
        ([run(0, [0]), run(1, [1, 2, 3], at=9, finished=True, others=["0.0"])], "while ['0.0']"),
        ([run(0, [0, 1]), run(1, [3], at=9, finished=True)], "never did the steps [2]"),
        ([run(0, [0, 1, 3, 2], finished=True)], "went on from step -1 with [0, 1, 3, 2]"),
        ([run(0, [0, 1, 2, 3])], "did not finish"),
        (
            [saved(run(0, [0, 1, 2]), 1), run(1, [1, 2, 3], at=9, finished=True)],
            "step 1 was saved before",
        ),
    ],
    ids=["overlapping", "alive", "missing", "disordered", "unfinished", "repeated"],
)
def test_what_is_wrong_is_found(tmp_path, runs, message):
    assert any(message in fault for fault in faults(tmp_path, *runs))


def test_a_wrong_result_is_found(tmp_path):
    assert any("has the result" in fault for fault in faults(tmp_path, *GOOD, state="other"))


def test_an_attempt_that_a_host_began_twice_is_found(tmp_path):
    twice = run(0, [0, 1, 2, 3], finished=True)
    twice = Run(attempt=0, process=0, notes=(*run(0, [], pid=6).notes, *twice.notes))
    assert any("more than once" in fault for fault in faults(tmp_path, twice))


LINES = [ledger.line_of("0.0", number) for number in (1, 2, 3, 4, 5)]


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([0, 1, 2, 3], None),
        ([0, 1, 2, 3, 4], None),  # killed between the line and the note of it
        ([0, 1, 3], "differs"),
        ([0, 1, 1, 2, 3], "differs"),
        ([1, 0, 2, 3], "differs"),
        ([0, 1, 2], "holds"),
    ],
    ids=["whole", "one more", "lost", "doubled", "reordered", "cut off"],
)
def test_a_log_is_held_against_what_was_written(pieces, message):
    text = b"[tpufleet] command: x\n" + b"".join(LINES[piece] for piece in pieces)
    fault = ledger.log_violation(text, run(0, [0, 1, 2, 3]), whole=True)
    assert fault is None if message is None else message in fault


def test_the_log_of_a_host_that_was_taken_may_lack_its_end_but_nothing_else():
    written = run(0, [0, 1, 2, 3])
    assert ledger.log_violation(b"".join(LINES[:2]) + LINES[2][:9], written, whole=False) is None
    assert "differs" in ledger.log_violation(LINES[1], written, whole=False)
