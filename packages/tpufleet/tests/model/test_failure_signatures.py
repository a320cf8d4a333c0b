"""Reading the last lines of a failed program: every tail of the corpus gets its reason.

Naive rules, as older tools have them, on the same corpus: `[eE]rror` anywhere means failure of
unknown kind, `GRPC error` (case-sensitive) anywhere a lost connection, `Allocation type`
anywhere out of memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.model.log_corpus import TAILS, Tail
from tpufleet.model.job import failure_signatures
from tpufleet.model.job.end_reasons import END_REASONS, EndReason, RetryBudget

Reader = Callable[[list[str]], EndReason | None]


def ours(lines: list[str]) -> EndReason | None:
    evidence = failure_signatures.find_evidence(lines)
    return evidence.reason if evidence else None


def naive(lines: list[str]) -> EndReason | None:
    text = "\n".join(lines)
    if "Allocation type" in text:
        return EndReason.OUT_OF_HBM
    if "GRPC error" in text:
        return EndReason.CONNECTION_LOST
    if "Could not open any log file" in text:
        return EndReason.DEVICE_BUSY
    return None


def naive_words_anywhere(lines: list[str]) -> EndReason | None:
    """The naive rules again, with every status word that an engineer would add first."""
    text = "\n".join(lines)
    for pattern, reason in (
        (r"RESOURCE_EXHAUSTED|Allocation type", EndReason.OUT_OF_HBM),
        (r"MemoryError|bad_alloc|Cannot allocate", EndReason.OUT_OF_HOST_MEMORY),
        (r"No space left", EndReason.DISK_FULL),
        (r"already in use|Could not open any log file", EndReason.DEVICE_BUSY),
        (r"(?i)grpc error|UNAVAILABLE|DEADLINE_EXCEEDED|heartbeat", EndReason.CONNECTION_LOST),
    ):
        if re.search(pattern, text):
            return reason
    return None


def precision_and_recall(read: Reader) -> tuple[float, float]:
    classified = [(read(tail.lines), tail.expected) for tail in TAILS]
    named = [(reason, expected) for reason, expected in classified if reason is not None]
    known = [(reason, expected) for reason, expected in classified if expected is not None]
    return (
        sum(reason is expected for reason, expected in named) / len(named),
        sum(reason is expected for reason, expected in known) / len(known),
    )


@pytest.mark.parametrize("tail", TAILS, ids=lambda tail: tail.name)
def test_every_tail_gets_its_reason(tail: Tail):
    assert ours(tail.lines) is tail.expected


def test_every_tail_is_classified_correctly_and_naive_rules_fail():
    assert len(TAILS) >= 40
    assert precision_and_recall(ours) == (1.0, 1.0)
    precision, recall = precision_and_recall(naive)
    assert precision < 0.75 and recall < 0.25
    precision, recall = precision_and_recall(naive_words_anywhere)
    assert precision < 0.75 and recall < 0.95


def test_the_word_error_alone_is_not_evidence():
    """It is in the tail of nearly every failure, and so tells none of them apart."""
    with_word = [tail for tail in TAILS if re.search("[eE]rror", tail.text)]
    own = [tail for tail in with_word if tail.expected is None]
    assert len(with_word) / len(TAILS) > 0.7
    assert len(own) / len(with_word) > 0.3


def test_the_corpus_has_several_tails_of_every_reason_that_a_log_can_tell():
    reasons = {signature.reason for signature in failure_signatures.SIGNATURES}
    for reason in reasons:
        assert sum(tail.expected is reason for tail in TAILS) >= 5, reason
        assert END_REASONS[reason].budget is not RetryBudget.FREE, (
            "a log is no proof of a preemption"
        )
    assert sum(tail.expected is None for tail in TAILS) >= 20


def test_every_signature_is_needed_by_some_tail():
    """A pattern that no known message needs is a guess; it only costs precision."""
    lines = [line for tail in TAILS for line in tail.lines]
    unused = [
        signature.pattern.pattern
        for signature in failure_signatures.SIGNATURES
        if not any(signature.pattern.search(line) for line in lines)
    ]
    assert unused == []


def test_the_evidence_is_the_matching_line_truncated():
    line = "  OSError: [Errno 28] No space left on device" + "x" * 900
    evidence = failure_signatures.find_evidence(["step 1", line])
    assert evidence is not None
    assert evidence.line.startswith("OSError: [Errno 28]")
    assert len(evidence.line) == 500


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_truncated_tail_never_gets_another_reason(cut):
    for tail in TAILS:
        if tail.expected is not None:
            assert ours(tail.lines[cut:]) in (tail.expected, None), tail.name
