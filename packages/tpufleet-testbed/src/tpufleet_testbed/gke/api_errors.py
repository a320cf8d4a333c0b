"""Errors of the emulated GKE, with GKE's own texts, by name: see api_errors.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import yaml

from tpufleet_testbed.servers import ApiError

TEXTS: dict[str, str] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)
# By accelerator label: of on-demand, and of spot. v6e and tpu7x have none of their own on demand.
# v4 and v5e are in the reference of Compute Engine (regions, `Quota.metric`). The others are those
# that users of Cloud Quotas see: TPU-V5P-per-project-region, TPUS-PER-TPU-FAMILY-per-project-region
# (with tpu_family: CT6E) and the PREEMPTIBLE-… of each.
QUOTA_METRICS = {
    "tpu-v4-podslice": ("TPU_PODSLICE_V4", "PREEMPTIBLE_TPU_PODSLICE_V4"),
    "tpu-v5-lite-podslice": ("TPU_LITE_PODSLICE_V5", "PREEMPTIBLE_TPU_LITE_PODSLICE_V5"),
    "tpu-v5p-slice": ("TPU_V5P", "PREEMPTIBLE_TPU_V5P"),
    "tpu-v6e-slice": ("TPUS_PER_TPU_FAMILY", "PREEMPTIBLE_TPU_V6E"),
    "tpu7x": ("TPUS_PER_TPU_FAMILY", "PREEMPTIBLE_TPU7X"),
}


def text(error: str, **values: Any) -> str:
    return TEXTS[error].format(**values)


def invalid_argument(error: str, **values: Any) -> ApiError:
    return ApiError(grpc.StatusCode.INVALID_ARGUMENT, text(error, **values))


def quota(project: str, metric: str, requested: int, limit: int, available: int) -> str:
    return text(
        "quota", project=project, metric=metric, requested=requested, short=requested - available,
        limit=limit, available=available,
    )  # fmt: skip
