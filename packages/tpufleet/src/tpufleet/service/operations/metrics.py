"""Prometheus metrics of a server: its HTTP requests, and the fleet as the store has it.

The number of series is bounded: single jobs are exported while they are live, and at most
MAX_JOBS of them.
"""

from __future__ import annotations

import threading
from collections import Counter as Count
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

import tpufleet
from tpufleet.clocks import Clock
from tpufleet.model.api_types import JobRow
from tpufleet.model.job.attempts import Attempt, AttemptId
from tpufleet.model.job.jobs import LIVE_STATES, JobState
from tpufleet.model.tpu import type_lookup
from tpufleet.policy.recovery import recovery_time
from tpufleet.service.jobs import queries
from tpufleet.service.operations import server_status
from tpufleet.stores.base import JobQuery, Store

MAX_JOBS = 500
# Of two scrapers, the second gets what the first has read.
CACHE_SECONDS = 5.0
_LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_RECOVERY_BUCKETS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)
_COUNTED_BY_THEN = timedelta(minutes=1)
_JOB = ("job_id", "name", "owner")


class ServerMetrics:
    """One registry for each server, so that several can live in one process."""

    def __init__(self, store: Store, clock: Clock, state: Path) -> None:
        self.registry = registry = CollectorRegistry()
        self._requests = Counter(
            "tpufleet_http_requests_total",
            "Requests, by operation and status.",
            ["operation", "status"],
            registry=registry,
        )
        self._seconds = Histogram(
            "tpufleet_http_request_seconds",
            "Time until the response begins, by operation.",
            ["operation"],
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self._recovery_seconds = Histogram(
            "tpufleet_recovery_seconds",
            "From a fault to the next step of the job, by the reason for which its attempt ended. "
            "Counted by the server that leads.",
            ["reason"],
            buckets=_RECOVERY_BUCKETS,
            registry=registry,
        )
        self._store = store
        self._clock = clock
        self._recovered: set[AttemptId] = set()  # live ones that are counted
        self._by_operation: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        registry.register(_FleetCollector(store, clock, state))

    def count(self, operation: str, status: int, seconds: float) -> None:
        counted = self._by_operation.get((operation, status))
        if counted is None:  # finding it takes longer than counting
            counted = (
                self._requests.labels(operation, str(status)),
                self._seconds.labels(operation),
            )
            self._by_operation[operation, status] = counted
        counted[0].inc()
        counted[1].observe(seconds)

    def count_recoveries(self, changed: Sequence[Attempt]) -> None:
        """Of attempts that were just recorded; each once."""
        for attempt in changed:
            startup, known = attempt.startup, attempt.id in self._recovered
            if not attempt.live:
                self._recovered.discard(attempt.id)
            if known or attempt.number == 0 or startup is None or startup.advanced_at is None:
                continue
            if self._clock.now() - startup.advanced_at > _COUNTED_BY_THEN:
                continue  # by this server or another one, when it happened
            if attempt.live:
                self._recovered.add(attempt.id)
            for each in recovery_time.recoveries(self._store.attempts(attempt.job_id)):
                if each.attempt == attempt.number:
                    self._recovery_seconds.labels(each.reason.value).observe(each.seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _FleetCollector(Collector):
    def __init__(self, store: Store, clock: Clock, state: Path) -> None:
        self._store = store
        self._clock = clock
        self._state = state
        self._lock = threading.Lock()
        self._read: tuple[timedelta, list[Metric]] | None = None

    def describe(self) -> Iterable[Metric]:
        return []  # so that registering it does not read the store

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            now = self._clock.uptime()
            if self._read is None or (now - self._read[0]).total_seconds() >= CACHE_SECONDS:
                self._read = (now, list(self._collect()))
            return self._read[1]

    def _collect(self) -> Iterable[Metric]:
        info = GaugeMetricFamily("tpufleet_info", "Always 1.", labels=["version"])
        info.add_metric([tpufleet.__version__], 1)
        yield info
        yield GaugeMetricFamily(
            "tpufleet_writable",
            "1 while the server can record submissions and ends of jobs; 0 on a full disk.",
            0 if server_status.write_problem(self._store, self._state) else 1,
        )
        counts = self._store.count_jobs()
        jobs = GaugeMetricFamily("tpufleet_jobs", "Jobs, by state.", labels=["state"])
        for state in JobState:
            jobs.add_metric([state.value], counts.get(state, 0))
        yield jobs
        yield from self._slices()
        yield from self._control_plane()
        yield from self._live_jobs(sum(counts.get(state, 0) for state in LIVE_STATES))
        yield from self._running_chips(counts.get(JobState.RUNNING, 0))

    def _slices(self) -> Iterable[Metric]:
        labels = ["provider", "accelerator", "capacity", "state"]
        slices = GaugeMetricFamily("tpufleet_slices", "Slices that are not gone.", labels=labels)
        chips = GaugeMetricFamily("tpufleet_chips", "Chips of these slices.", labels=labels)
        live = self._store.slices()
        kinds = Count((s.provider, s.accelerator, s.capacity.value, s.state.value) for s in live)
        for kind, count in sorted(kinds.items()):
            slices.add_metric(kind, count)
            chips.add_metric(kind, count * type_lookup.find(kind[1]).chips)
        yield slices
        yield chips

    def _control_plane(self) -> Iterable[Metric]:
        now = self._clock.now()
        status = server_status.status(self._store, now)
        report = status.controller
        yield GaugeMetricFamily(
            "tpufleet_hosts", "Hosts that sent a heartbeat within two minutes.", status.hosts
        )
        yield GaugeMetricFamily(
            "tpufleet_controller_up",
            "1 while a controller holds the lease and reports.",
            0 if status.controller_stale else 1,
        )
        age = GaugeMetricFamily(
            "tpufleet_provider_answer_age_seconds",
            "Time since a provider answered a call successfully.",
            labels=["provider"],
        )
        problems = GaugeMetricFamily(
            "tpufleet_provider_problems",
            "Kinds of calls to a provider that fail.",
            labels=["provider", "call"],
        )
        for provider in report.providers if report is not None else ():
            if provider.answered_at is not None:
                age.add_metric([provider.name], (now - provider.answered_at).total_seconds())
            failing = Count(problem.call for problem in provider.problems)
            for call in ("listing", "request", "release"):
                problems.add_metric([provider.name, call], failing[call])
        yield age
        yield problems
        refused = GaugeMetricFamily(
            "tpufleet_capacity_refusals",
            "Sources of capacity that refused and are not asked now.",
            labels=["provider", "accelerator", "capacity", "zone"],
        )
        for refusal in status.waiting_for:
            refused.add_metric(
                [refusal.provider, refusal.accelerator, refusal.capacity.value, refusal.zone], 1
            )
        yield refused
        yield GaugeMetricFamily(
            "tpufleet_oldest_queued_seconds",
            "How long the oldest queued job has waited since it was submitted.",
            0
            if status.oldest_queued_at is None
            else (now - status.oldest_queued_at).total_seconds(),
        )

    def _live_jobs(self, live: int) -> Iterable[Metric]:
        rows = queries.job_rows(
            self._store, self._store.jobs(JobQuery(states=LIVE_STATES, limit=MAX_JOBS))
        )
        info = GaugeMetricFamily(
            "tpufleet_job_info",
            "A live job. Always 1.",
            labels=[*_JOB, "state", "accelerator", "pool"],
        )
        attempts = GaugeMetricFamily("tpufleet_job_attempts", "Attempts so far.", labels=_JOB)
        step = GaugeMetricFamily("tpufleet_job_step", "Last step reported.", labels=_JOB)
        total = GaugeMetricFamily("tpufleet_job_steps", "Steps until the end.", labels=_JOB)
        for row in rows:
            info.add_metric([*_labels(row), row.state.value, row.accelerator, row.pool or ""], 1)
            attempts.add_metric(_labels(row), row.attempts)
            if row.progress is not None and row.progress.step is not None:
                step.add_metric(_labels(row), row.progress.step)
            if row.progress is not None and row.progress.total is not None:
                total.add_metric(_labels(row), row.progress.total)
        yield from (info, attempts, step, total)
        yield GaugeMetricFamily(
            "tpufleet_jobs_left_out",
            f"Live jobs beyond the newest {MAX_JOBS}, which have no series of their own.",
            max(0, live - len(rows)),
        )

    def _running_chips(self, running: int) -> Iterable[Metric]:
        """Of all running jobs, and not only of those with series of their own."""
        query = JobQuery(states=frozenset({JobState.RUNNING}), limit=running)
        counts: Count[str] = Count()
        jobs = self._store.jobs(query)
        elastic = [job.id for job in jobs if job.spec.min_slices < job.spec.max_slices]
        newest = self._store.newest_attempts(elastic) if elastic else {}
        for job in jobs:
            kind = type_lookup.find(job.spec.accelerator)
            attempt = newest.get(job.id)
            slices = job.spec.max_slices if attempt is None else len(attempt.slices)
            counts[kind.name] += slices * kind.chips
        chips = GaugeMetricFamily(
            "tpufleet_running_chips",
            "Chips of jobs whose program runs; of tpufleet_chips, the others boot, set up or idle.",
            labels=["accelerator"],
        )
        for accelerator, count in sorted(counts.items()):
            chips.add_metric([accelerator], count)
        yield chips


def _labels(row: JobRow) -> list[str]:
    return [row.id, row.name, row.owner]
