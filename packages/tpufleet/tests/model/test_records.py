"""Replacing fields of a record: the same result as `dataclasses.replace`."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime

import pytest

from tests.policy.builders import make_attempt, make_host, make_job, make_slice
from tpufleet.model.job.jobs import JobState
from tpufleet.model.values import records
from tpufleet.policy.scheduling.placement import PendingJob

CHANGES = {
    "job": (make_job(), {"state": JobState.RUNNING, "reason": "new"}),
    "attempt": (make_attempt(), {"message": "new", "ended_at": datetime(2026, 1, 1, tzinfo=UTC)}),
    "slice": (make_slice(), {"job_id": None}),
    "host": (make_host(), {}),
}


@pytest.mark.parametrize(("record", "changes"), CHANGES.values(), ids=CHANGES)
def test_the_result_equals_that_of_the_standard_library(record, changes):
    before = dataclasses.asdict(record)
    replaced = records.replace(record, **changes)
    assert replaced == dataclasses.replace(record, **changes)
    assert replaced is not record and type(replaced) is type(record)
    assert dataclasses.asdict(record) == before


def test_an_unknown_field_is_a_type_error():
    with pytest.raises(TypeError, match="Job has no field 'raeson'"):
        records.replace(make_job(), raeson="x")


def test_a_class_with_computed_fields_is_rejected():
    pending = PendingJob(job=make_job(), missing=1, sources=())
    with pytest.raises(TypeError, match="PendingJob"):
        records.replace(pending, missing=2)
