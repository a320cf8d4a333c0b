"""The bridge's Prometheus metrics, as text. Names are relied on by alerts and dashboards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class BridgeMetrics:
    """State of a bridge at one moment, and counters since it started."""

    documents: Mapping[str, int] = field(default_factory=dict)  # live ones, by status
    claimed: int = 0  # documents that this bridge runs
    retrying: int = 0  # documents that wait after an error
    loop_age_seconds: float = 0.0
    ready: bool = False
    claims: int = 0
    ended: int = 0
    errors: int = 0


def exposition(metrics: BridgeMetrics) -> str:
    """https://prometheus.io/docs/instrumenting/exposition_formats/ (text-based format)."""
    documents = [
        f'tpufleet_bridge_documents{{status="{status}"}} {count}'
        for status, count in sorted(metrics.documents.items())
    ]
    single = [
        ("claimed_documents", "gauge", "Documents that this bridge runs.", metrics.claimed),
        ("retrying_documents", "gauge", "Documents that wait after an error.", metrics.retrying),
        ("loop_age_seconds", "gauge", "Time since the main loop ran.", metrics.loop_age_seconds),
        ("ready", "gauge", "1 while the bridge does its work.", int(metrics.ready)),
        ("claims_total", "counter", "Documents claimed.", metrics.claims),
        ("ended_total", "counter", "Documents whose outcome was written.", metrics.ended),
        ("errors_total", "counter", "Failed steps of documents, retried.", metrics.errors),
    ]
    lines = [
        "# HELP tpufleet_bridge_documents Live documents of the collection, by status.",
        "# TYPE tpufleet_bridge_documents gauge",
        *documents,
    ]
    for name, kind, description, value in single:
        lines += [
            f"# HELP tpufleet_bridge_{name} {description}",
            f"# TYPE tpufleet_bridge_{name} {kind}",
            f"tpufleet_bridge_{name} {value:g}",
        ]
    return "\n".join(lines) + "\n"
