"""The provisioner's Prometheus metrics. Names and labels are relied on by alerts and dashboards."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

# Seconds. A TPU node pool takes minutes to create.
LATENCY_BUCKETS = (5, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600)

disable_created_metrics()


class ProvisionerMetrics:
    """One registry for each provisioner, so that several can live in one process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.pools = Gauge(
            "tpu_provisioner_pools", "Managed node pools, by state.", ["state"], registry=registry
        )
        self.chips = Gauge(
            "tpu_provisioner_chips", "Chips of the managed node pools.", registry=registry
        )
        self.waiting_pods = Gauge(
            "tpu_provisioner_waiting_pods",
            "Leader pods that wait for a node pool.",
            registry=registry,
        )
        self.leading = Gauge(
            "tpu_provisioner_leading", "1 on the replica that holds the lease.", registry=registry
        )
        self.calls = Counter(
            "tpu_provisioner_calls_total",
            "Calls to GKE, by verb and outcome.",
            ["verb", "outcome"],
            registry=registry,
        )
        self.pool_failures = Counter(
            "tpu_provisioner_pool_failures_total",
            "Node pools that failed, by cause.",
            ["trouble"],
            registry=registry,
        )
        self.rounds = Counter(
            "tpu_provisioner_rounds_total",
            "Reconciliations, by outcome.",
            ["outcome"],
            registry=registry,
        )
        self.provisioning_seconds = Histogram(
            "tpu_provisioner_provisioning_seconds",
            "From the request for a node pool until it runs.",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.deletion_seconds = Histogram(
            "tpu_provisioner_deletion_seconds",
            "From the end of a JobSet until its node pool is deleted.",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )

    def value(self, name: str, labels: Mapping[str, str] | None = None) -> float:
        """The current value of a sample; 0 when it has never been recorded."""
        return self.registry.get_sample_value(name, dict(labels or {})) or 0.0

    def names(self) -> set[str]:
        """As alerts use them, without the sample suffixes of histograms."""
        return {
            f"{family.name}_total" if family.type == "counter" else family.name
            for family in self.registry.collect()
        }

    def text(self) -> str:
        """In Prometheus's text format."""
        return generate_latest(self.registry).decode()
