"""Status of a dataset and its workers, derived from the records in its storage."""

from __future__ import annotations

import time
from typing import Any

from tpufleet.runtime.units import LEASE, Claim, Commit, Units
from tpufleet_activations import plans
from tpufleet_activations.io.storage import Storage


class DatasetMonitor:
    """Reads the status of a dataset repeatedly; each commit is read only once."""

    def __init__(self, storage: Storage):
        self.plan = plans.load(storage)
        self._units = Units(
            storage, count=self.plan.units, worker="reader", indexed=True, tolerant=True
        )

    def observe(
        self, now: float | None = None
    ) -> tuple[dict[int, Commit], dict[int, Claim], set[str]]:
        """Commits, open claims, and the workers with a heartbeat within the lease."""
        commits, held = self._units.committed(), self._units.open_claims()
        now = time.time() if now is None else now
        heartbeats = self._units.heartbeats()
        alive = {worker for worker, at in heartbeats.items() if now - at <= LEASE.total_seconds()}
        return commits, held, alive

    def complete(self) -> bool:
        """Raises Conflict if what is stored is of another plan."""
        plans.check_commits(self.plan, self._units.committed())
        return self._units.finished()

    def totals(self, commits: dict[int, Commit]) -> dict[str, int]:
        return {
            "samples": sum(len(self.plan.sample_range(unit)) for unit in commits),
            "bytes": sum(commit.outcome["bytes"] for commit in commits.values()),
            "tokens": sum(commit.outcome["tokens"] for commit in commits.values()),
        }

    def status(self, now: float | None = None) -> dict[str, Any]:
        commits, held, alive = self.observe(now)
        holders = {claim.worker for claim in held.values()}
        done = len(commits) == self.plan.units
        idle = "STOPPED" if held else "WAITING"
        return {
            "status": "DONE" if done else "RUNNING" if alive else idle,
            **self.totals(commits),
            "total": self.plan.samples,
            "shards": len(commits),
            "units": self.plan.units,
            "healthy": len(alive),
            "working": len(holders & alive),
            "lost": len(holders - alive),
            "workers": sorted(alive),
            "damaged": [reason for _, (_, reason) in sorted(self._units.damaged.items())],
        }
