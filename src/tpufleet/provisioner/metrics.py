"""Counters and gauges in Prometheus' text format: few enough to need no library."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

Labels = tuple[tuple[str, str], ...]
LATENCY = (5, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600)  # seconds; a TPU pool takes minutes

HELP = {
    "tpu_provisioner_pools": "Node pools that we manage, by state.",
    "tpu_provisioner_chips": "Chips of the node pools that we manage.",
    "tpu_provisioner_waiting_pods": "Leader pods that wait for a node pool.",
    "tpu_provisioner_leading": "1 on the replica that acts.",
    "tpu_provisioner_calls_total": "Calls to GKE, by verb and outcome.",
    "tpu_provisioner_pool_failures_total": "Pools that failed, by trouble.",
    "tpu_provisioner_rounds_total": "Rounds of the loop, by outcome.",
    "tpu_provisioner_provisioning_seconds": "From asking for a pool until it runs.",
    "tpu_provisioner_deletion_seconds": "From the end of a JobSet until its pool is told to go.",
}


class Metrics:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[tuple[str, Labels], float] = {}
        self._gauges: dict[str, dict[Labels, float]] = {}
        self._observed: dict[str, list[float]] = {}  # counts by bound, then count and sum

    def count(self, name: str, by: float = 1, **labels: str) -> None:
        key = (name, tuple(sorted(labels.items())))
        with self._lock:
            self._counters[key] = self._counters.get(key, 0) + by

    def gauge(self, name: str, values: Mapping[Labels, float]) -> None:
        """All values of a gauge at once: labels that are gone vanish."""
        with self._lock:
            self._gauges[name] = dict(values)

    def observe(self, name: str, seconds: float) -> None:
        with self._lock:
            seen = self._observed.setdefault(name, [0.0] * (len(LATENCY) + 2))
            for index, bound in enumerate(LATENCY):
                seen[index] += seconds <= bound
            seen[-2] += 1
            seen[-1] += seconds

    def value(self, name: str, **labels: str) -> float:
        key = tuple(sorted(labels.items()))
        with self._lock:
            return self._counters.get((name, key), self._gauges.get(name, {}).get(key, 0))

    def text(self) -> str:
        with self._lock:
            return "\n".join([*self._simple(), *self._histograms(), ""])

    def _simple(self) -> Iterable[str]:
        counters: dict[str, dict[Labels, float]] = {}
        for (name, labels), value in self._counters.items():
            counters.setdefault(name, {})[labels] = value
        for kind, table in (("counter", counters), ("gauge", self._gauges)):
            for name in sorted(table):
                yield f"# HELP {name} {HELP[name]}"
                yield f"# TYPE {name} {kind}"
                for labels, value in sorted(table[name].items()):
                    yield f"{name}{_spelled(labels)} {value:g}"

    def _histograms(self) -> Iterable[str]:
        for name, seen in sorted(self._observed.items()):
            yield f"# HELP {name} {HELP[name]}"
            yield f"# TYPE {name} histogram"
            for bound, count in zip(LATENCY, seen[:-2], strict=True):
                yield f'{name}_bucket{{le="{bound}"}} {count:g}'
            yield f'{name}_bucket{{le="+Inf"}} {seen[-2]:g}'
            yield f"{name}_sum {seen[-1]:g}"
            yield f"{name}_count {seen[-2]:g}"


def _spelled(labels: Labels) -> str:
    if not labels:
        return ""
    told = ",".join(f'{key}="{_escaped(value)}"' for key, value in labels)
    return f"{{{told}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
