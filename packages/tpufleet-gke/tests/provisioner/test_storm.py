"""Where the dollars go over days of JobSets, faults, tenants and budgets."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("google.cloud.container_v1", reason="needs the extra `gke`")

from tests.provisioner.storm import MINUTE, OF_GKE, Storm

SLOW_GKE = {"creation": 5 * MINUTE, "deletion": 4 * MINUTE}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("days", "times"),
    [
        pytest.param(1, {}, id="a day"),
        pytest.param(0.3, SLOW_GKE, id="a slow GKE"),
        pytest.param(7, {}, id="a week", marks=[pytest.mark.chaos, pytest.mark.timeout(7200)]),
    ],
)
def test_less_than_a_hundredth_of_the_bill_is_unused(days, times, capsys):
    logging.disable(logging.CRITICAL)  # a million lines
    storm = Storm(seed=1, days=days, **times)
    try:
        storm.run()
        assert [training.name for training in storm.trainings if not training.is_over] == []
        assert storm.harness.states() == {}
        assert storm.most_over_budget == 0
        assert storm.unused(but=OF_GKE) < 0.01
    finally:
        with capsys.disabled():
            print(f"\n{storm.report()}")
        logging.disable(logging.NOTSET)
        storm.close()
