"""The emulator against Google's documentation, through Google's client."""

from __future__ import annotations

from datetime import timedelta

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from tests.testbed.cloud_tpu import conformance_rows as rows
from tests.testbed.cloud_tpu.conformance_rows import ERROR_ROWS, Row
from tests.testbed.cloud_tpu.guide_rows import GUIDE_ROWS
from tests.testbed.cloud_tpu.node_sentences import NODE_SENTENCES
from tests.testbed.cloud_tpu.queue_sentences import OTHER_SENTENCES, QUEUE_SENTENCES
from tests.testbed.cloud_tpu.sentences import Sentence
from tpufleet_testbed.cloud_tpu.fault_plan import CallFault, CloudFaultPlan
from tpufleet_testbed.cloud_tpu.locations import Latencies
from tpufleet_testbed.latencies import DurationRange

ROWS = (*rows.ROWS, *GUIDE_ROWS)
SENTENCES = (*NODE_SENTENCES, *QUEUE_SENTENCES, *OTHER_SENTENCES)


@pytest.fixture
def world(emulated):
    """With the default durations."""
    return emulated(latencies=None)


@pytest.mark.parametrize("row", ROWS, ids=[row.id for row in ROWS])
def test_the_emulator_answers_as_documented(world, row: Row):
    if row.refused is not None:
        with pytest.raises(row.refused) as refused:
            row.call(world)
        assert row.text in str(refused.value)
    else:
        assert row.check(row.call(world)), row.source


@pytest.mark.parametrize("row", SENTENCES, ids=[row.id for row in SENTENCES])
def test_the_emulator_does_what_the_documentation_says(world, row: Sentence):
    if row.refused:
        with pytest.raises(row.refused):
            row.call(world)
    else:
        assert row.check(row.call(world)), f"{row.source}: {row.sentence}"


@pytest.mark.parametrize(
    ("fault", "method", "kind", "reason", "text"),
    ERROR_ROWS,
    ids=[f"{row[0]} of {row[1]}" for row in ERROR_ROWS],
)
def test_errors_have_the_documented_code_text_and_error_info(
    emulated, fault, method, kind, reason, text
):
    world = emulated(plan=CloudFaultPlan(calls=(CallFault(error=fault),)))
    error = rows.refusal(world, fault, method)
    assert isinstance(error, kind) and text in error.message
    assert (error.reason or "") == reason
    if reason:
        assert error.domain and error.metadata["service"] == "tpu.googleapis.com"


def test_every_row_has_its_own_name():
    assert len({row.id for row in ROWS}) == len(ROWS)
    assert len({row.id for row in SENTENCES}) == len(SENTENCES)
    assert len(ROWS) + len(ERROR_ROWS) >= 77 and len(SENTENCES) >= 80


def durations(world) -> tuple[float, float]:
    """Seconds until a node is READY, and until its deletion is complete."""
    rows.create(world)
    boot = world.seconds_until(lambda: world.state("a") == "READY")
    operation = world.client.delete_node(name=rows.name(), timeout=900)
    return boot, world.seconds_until(operation.done)


def test_durations_are_minutes_within_the_range_and_reproducible_by_the_seed(emulated):
    found = [
        durations(emulated(latencies=None, plan=CloudFaultPlan(seed=seed))) for seed in (1, 1, 2)
    ]
    assert found[0] == found[1] != found[2]
    for boot, deletion in found:
        assert 75 <= boot <= 240 and 30 <= deletion <= 180


def test_the_plan_sets_durations(emulated):
    latencies = Latencies(
        boot=timedelta(seconds=4),
        deletion=DurationRange(shortest=timedelta(seconds=6), longest=timedelta(seconds=8)),
    )
    boot, deletion = durations(emulated(latencies=None, plan=CloudFaultPlan(latencies=latencies)))
    assert boot == 4 and 6 <= deletion <= 8
