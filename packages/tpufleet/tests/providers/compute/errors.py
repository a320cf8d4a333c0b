"""Errors as Compute Engine words them (cluster-autoscaler's reader of group errors, and public
reports)."""

from __future__ import annotations

STOCKOUT = {
    "code": "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS",
    "message": "The zone 'projects/my-project/zones/us-central1-a' does not have enough resources "
    "available to fulfill the request.",
    "errorDetails": [
        {
            "errorInfo": {
                "reason": "stockout",
                "domain": "compute.googleapis.com",
                "metadatas": {"vmType": "ct6e-standard-4t", "zonesAvailable": "us-east5-b"},
            }
        }
    ],
}
NO_QUOTA = {
    "code": "QUOTA_EXCEEDED",
    "message": "Quota 'TPUS_PER_TPU_FAMILY' exceeded.  Limit: 0.0 in region us-central1.",
    "errorDetails": [
        {
            "quotaInfo": {
                "metricName": "compute.googleapis.com/tpus_per_tpu_family",
                "limitName": "TPUS-PER-TPU-FAMILY-per-project-region",
                "dimensions": {"region": "us-central1", "tpu_family": "CT6E"},
                "limit": 0.0,
            }
        }
    ],
}
