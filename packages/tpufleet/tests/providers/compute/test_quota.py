"""Which entry of a quota applies to a zone, with answers as Cloud Quotas gives them:
cloud.google.com/docs/quotas/reference/rest/v1/projects.locations.services.quotaInfos."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from tpufleet.model.job.jobs import Capacity
from tpufleet.model.tpu.type_lookup import find
from tpufleet.providers.compute.quota import SHARED_ID, QuotaReader
from tpufleet.providers.tpu_vm.google_rest import Answer, GoogleRest


class CloudQuotas(GoogleRest):
    def __init__(self, infos: list[dict[str, Any]]) -> None:
        super().__init__()
        self._infos = infos

    def _call(self, method: str, api: str, path: str, query: dict[str, Any], body: Any) -> Answer:
        if path.endswith(f"/{SHARED_ID}"):
            return Answer(status=200, body={"dimensionsInfos": self._infos})
        return Answer(status=404, body={})


def info(chips: int, *locations: str, **dimensions: str) -> dict[str, Any]:
    return {
        "dimensions": dimensions,
        "details": {"value": str(chips)},
        "applicableLocations": list(locations),
    }


INFOS = [
    info(8, "us-central1", "europe-west4"),
    info(16, "europe-west4", tpu_family="CT6E"),
    info(64, "us-east5", region="us-east5"),
]


@pytest.mark.parametrize(
    ("infos", "zone", "chips"),
    [
        (INFOS, "us-central1-b", 8),
        (INFOS, "europe-west4-a", 16),
        (INFOS, "us-east5-a", 64),
        (INFOS, "asia-northeast1-b", None),
        ([info(4, "global")], "us-east5-a", 4),
    ],
    ids=["default", "family", "region", "no entry", "global"],
)
def test_an_entry_applies_only_to_the_locations_that_it_names(infos, zone, chips):
    reader = QuotaReader(CloudQuotas(infos), "my-project")
    now = datetime(2026, 1, 1, tzinfo=UTC)
    quota = reader.get(find("v6e-4"), zone, Capacity.ON_DEMAND, now, in_use=False)
    assert (quota and quota.most.chips) == chips
