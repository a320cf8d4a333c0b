"""The emulated GKE of `tpu cluster local up --gke-plan`, without a cluster."""

from __future__ import annotations

import pytest

pytest.importorskip("google.cloud.container_v1", reason="needs the extra `gke`")

from tpufleet.errors import BadInput
from tpufleet_testbed.kubernetes import emulated_gke


def test_a_plan_with_zones_of_two_regions_is_refused(tmp_path):
    plan = tmp_path / "gke.yaml"
    plan.write_text("zones: [us-central1-a, us-east5-b]\n")
    with pytest.raises(BadInput, match="us-east5-b are not in one region"):
        emulated_gke.load_plan(plan)


def test_a_plan_of_any_one_region_is_accepted(tmp_path):
    plan = tmp_path / "gke.yaml"
    plan.write_text("zones: [us-east5-a, us-east5-b]\n")
    emulated_gke.load_plan(plan)
