"""The bridge's Prometheus metrics, as text. Names are relied on by alerts and dashboards."""

from __future__ import annotations

from collections.abc import Mapping

_METRICS = {
    "claimed_documents": ("gauge", "Documents that this bridge runs."),
    "retrying_documents": ("gauge", "Documents that wait after an error."),
    "loop_age_seconds": ("gauge", "Time since the main loop ran."),
    "ready": ("gauge", "1 while the bridge does its work."),
    "claims_total": ("counter", "Documents claimed."),
    "oldest_running_seconds": ("gauge", "How long the document runs that has run longest."),
    "ended_total": ("counter", "Documents whose outcome was written."),
    "failed_total": ("counter", "Documents whose outcome was that their job failed."),
    "errors_total": ("counter", "Failed steps of documents, retried."),
    "quota_errors_total": ("counter", "Those that a quota of Firestore made fail."),
}


def exposition(documents: Mapping[str, int], values: Mapping[str, float]) -> str:
    """`documents` are the live ones by status, `values` those of the other metrics.

    https://prometheus.io/docs/instrumenting/exposition_formats/ (text-based format)."""
    lines = [
        "# HELP tpufleet_bridge_documents Live documents of the collection, by status.",
        "# TYPE tpufleet_bridge_documents gauge",
    ]
    for status, count in sorted(documents.items()):
        lines.append(f'tpufleet_bridge_documents{{status="{status}"}} {count}')
    for name, (kind, description) in _METRICS.items():
        lines += [
            f"# HELP tpufleet_bridge_{name} {description}",
            f"# TYPE tpufleet_bridge_{name} {kind}",
            f"tpufleet_bridge_{name} {values[name]:g}",
        ]
    return "\n".join(lines) + "\n"
