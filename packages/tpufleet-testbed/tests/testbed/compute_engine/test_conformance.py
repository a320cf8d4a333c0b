"""The emulated Compute Engine against Google's documentation, through Google's client."""

from __future__ import annotations

import pytest

pytest.importorskip("google.cloud.compute_v1", reason="pip install google-cloud-compute")

from google.api_core import exceptions

from tests.testbed.compute_engine.conformance_rows import ROWS, SOURCES, Row


@pytest.mark.parametrize("row", ROWS, ids=[row.id for row in ROWS])
def test_the_emulator_answers_as_documented(world, row: Row):
    if isinstance(row.check, tuple):
        status, text = row.check
        with pytest.raises(exceptions.GoogleAPICallError) as refused:
            row.call(world)
        assert refused.value.code == status and text in str(refused.value), SOURCES[row.source]
    else:
        assert row.check(row.call(world)), SOURCES[row.source]


def test_every_row_has_its_own_name_and_a_source():
    assert len({row.id for row in ROWS}) == len(ROWS) >= 120
    assert {row.source for row in ROWS} == set(SOURCES)
