"""End reasons: each has a description, a detection and one budget."""

from __future__ import annotations

import pytest

from tpufleet.model.job.end_reasons import END_REASONS, EndReason, RetryBudget
from tpufleet.model.job.jobs import Retries

PAYS = {
    EndReason.FINISHED: RetryBudget.NONE,
    EndReason.USER_ERROR: RetryBudget.FAILURE,
    EndReason.DATA_ERROR: RetryBudget.NONE,
    EndReason.TIMEOUT: RetryBudget.NONE,
    EndReason.OUT_OF_HBM: RetryBudget.NONE,
    EndReason.OUT_OF_HOST_MEMORY: RetryBudget.MEMORY,
    EndReason.DISK_FULL: RetryBudget.INFRASTRUCTURE,
    EndReason.DEVICE_BUSY: RetryBudget.INFRASTRUCTURE,
    EndReason.CONNECTION_LOST: RetryBudget.INFRASTRUCTURE,
    EndReason.SETUP_FAILED: RetryBudget.SETUP,
    EndReason.HUNG: RetryBudget.HANG,
    EndReason.HOST_LOST: RetryBudget.INFRASTRUCTURE,
    EndReason.PREEMPTED: RetryBudget.FREE,
    EndReason.MAINTENANCE: RetryBudget.FREE,
    EndReason.CANCELLED: RetryBudget.NONE,
    EndReason.OVER_BUDGET: RetryBudget.NONE,
    EndReason.SUPERSEDED: RetryBudget.FREE,
    EndReason.RESIZED: RetryBudget.FREE,
}
NOTHING_TO_DO = {
    EndReason.FINISHED, EndReason.CANCELLED, EndReason.PREEMPTED, EndReason.MAINTENANCE,
    EndReason.SUPERSEDED, EndReason.RESIZED, EndReason.HOST_LOST, EndReason.CONNECTION_LOST,
}  # fmt: skip


@pytest.mark.parametrize("reason", EndReason)
def test_a_reason_has_a_description_a_detection_and_a_budget(reason):
    ending = END_REASONS[reason]
    assert ending.description and ending.detected_by
    assert ending.budget is PAYS[reason]
    assert bool(ending.advice) == (reason not in NOTHING_TO_DO)


def test_no_two_reasons_read_the_same():
    assert (
        len({ending.description for ending in END_REASONS.values()})
        == len(EndReason)
        == len(END_REASONS)
    )


def test_every_limited_budget_is_a_field_of_retries():
    counted = set(RetryBudget) - {RetryBudget.NONE, RetryBudget.FREE}
    names = Retries.__struct_fields__
    assert set(names) == {budget.value for budget in counted}
    retries = Retries(failure=1, setup=2, memory=3, hang=4, infrastructure=5)
    assert [retries.limit(RetryBudget(name)) for name in names] == [
        1,
        2,
        3,
        4,
        5,
    ]
