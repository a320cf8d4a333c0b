"""The provisioner's Prometheus metrics. Names and labels are relied on by alerts and dashboards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from tpufleet_gke.provisioner.planning.bill import KEPT_FOR, Charge

# Seconds. A TPU node pool takes minutes to create.
LATENCY_BUCKETS = (5, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600)

disable_created_metrics()


class ProvisionerMetrics:
    """One registry for each provisioner, so that several can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        gauge = partial(Gauge, registry=self.registry)
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, buckets=LATENCY_BUCKETS, registry=self.registry)
        self.pools = gauge("tpu_provisioner_pools", "Managed node pools, by state.", ["state"])
        self.chips = gauge("tpu_provisioner_chips", "Chips of the managed node pools.")
        self.waiting_pods = gauge(
            "tpu_provisioner_waiting_pods", "Leader pods that wait for a node pool."
        )
        self.oldest_wait = gauge(
            "tpu_provisioner_oldest_wait_seconds", "How long the first of them has waited."
        )
        self.chip_seconds = counter(
            "tpu_provisioner_chip_seconds_total",
            "Paid time of chips, by JobSet (or other owner), and whether a pod used them.",
            ["namespace", "owner", "used"],
        )
        self.dollars = counter(
            "tpu_provisioner_dollars_total",
            "Cost of node pools at list prices, by JobSet (or other owner).",
            ["namespace", "owner"],
        )
        self._charged_at: dict[tuple[str, str], datetime] = {}  # by namespace and owner
        self.leading = gauge("tpu_provisioner_leading", "1 on the replica that holds the lease.")
        self.calls = counter(
            "tpu_provisioner_calls_total",
            "Calls to GKE, by verb and outcome.",
            ["verb", "outcome"],
        )
        self.pool_failures = counter(
            "tpu_provisioner_pool_failures_total", "Node pools that failed, by cause.", ["trouble"]
        )
        self.rounds = counter(
            "tpu_provisioner_rounds_total", "Reconciliations, by outcome.", ["outcome"]
        )
        self.provisioning_seconds = histogram(
            "tpu_provisioner_provisioning_seconds",
            "From the request for a node pool until it runs.",
        )
        self.deletion_seconds = histogram(
            "tpu_provisioner_deletion_seconds",
            "From the end of a JobSet until its node pool is deleted.",
        )

    def charge(self, charges: Sequence[Charge], now: datetime) -> None:
        """Owners without a node pool are forgotten, so that series do not pile up."""
        for one in charges:
            key = one.namespace, one.owner
            self._charged_at[key] = now
            for used, counts in (("true", one.used), ("false", not one.used)):
                self.chip_seconds.labels(*key, used).inc(one.chip_seconds if counts else 0)
            self.dollars.labels(*key).inc(one.dollars)
        for key, at in list(self._charged_at.items()):
            if at + KEPT_FOR < now:
                del self._charged_at[key]
                self.dollars.remove(*key)
                for used in ("true", "false"):
                    self.chip_seconds.remove(*key, used)

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
