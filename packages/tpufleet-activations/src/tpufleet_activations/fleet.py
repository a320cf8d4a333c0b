"""A fleet of extraction workers in several zones: its job specs, its status.

All workers claim units of one shared dataset, so a zone that is out of capacity delays nothing and
a lost worker costs at most one unit. Nothing here talks to the server.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tpufleet.errors import BadInput
from tpufleet_activations.io.addresses import open_storage
from tpufleet_activations.pipeline import dataset_status

# Job states as the board shows them; other states are shown unchanged.
STATUS = {
    "queued": "QUEUED",
    "waiting": "MISSING",
    "starting": "STARTING",
    "running": "READY",
    "recovering": "PREEMPT",
    "succeeded": "DONE",
}
NEEDS_RECOVERY = ("recovering", "failed")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerJob:
    """A job of the fleet, as the server reports it."""

    name: str
    job_id: str
    state: str
    reason: str = ""


def worker_name(zone: str, number: int) -> str:
    """`tpu-us-central1-a-0`; numbered from 0 in each zone."""
    return f"tpu-{zone}-{number}"


def fleet_tag(out: str) -> str:
    """The tag of all jobs that work on the dataset in `out`."""
    return f"extract-{hashlib.sha256(out.encode()).hexdigest()[:12]}"


def worker_jobs(
    out: str,
    *,
    zones: Sequence[str],
    workers_per_zone: int,
    accelerator: str,
    capacity: Sequence[str] = ("spot",),
    run_options: Sequence[str] = (),
    pool: str | None = None,
) -> list[dict[str, Any]]:
    """One job per worker."""
    if "://" not in out:
        raise BadInput(
            f"{out} is a folder on this machine; a fleet needs gs://… or s3://…, "
            "or file:///… on a file system shared by all hosts"
        )
    if not zones or len(set(zones)) != len(zones):
        raise BadInput("--zones needs one or more different zones")
    return [
        {
            "name": worker_name(zone, number),
            "command": ["tpu", "extract", "run", out, *run_options],
            "accelerator": accelerator,
            "zones": [zone],
            "capacity": list(capacity),
            "tags": [fleet_tag(out)],
            **({"pool": pool} if pool else {}),
        }
        for zone in zones
        for number in range(workers_per_zone)
    ]


def to_job_file(jobs: Iterable[Mapping[str, Any]]) -> str:
    """A multi-document job file. JSON is valid YAML, and quotes what needs quoting."""
    return "".join(f"---\n{json.dumps(job, indent=2)}\n" for job in jobs)


def fleet_status(out: str, jobs: Iterable[WorkerJob], now: float | None = None) -> dict[str, Any]:
    """What each worker has committed, and which workers need recovery.

    `jobs` is sorted newest first; jobs with the same name are runs of the same worker.
    """
    monitor = _monitor(out)
    plan = monitor.plan
    commits, held, alive = monitor.observe(now)
    busy = {claim.worker for claim in held.values()} & alive
    workers: dict[str, list[WorkerJob]] = {}
    for job in jobs:
        workers.setdefault(job.name, []).append(job)
    rows = []
    for name, runs in sorted(workers.items()):
        own = [c for c in commits.values() if any(_is_worker_of(c.worker, r.job_id) for r in runs)]
        state = runs[0].state
        rows.append(
            {
                "name": name,
                "job": runs[0].job_id,
                "status": STATUS.get(state, state.upper()[:7]),
                "samples": sum(len(plan.sample_range(commit.unit)) for commit in own),
                "shards": sum(len(commit.outcome["files"]) for commit in own),
                "bytes": sum(commit.outcome["bytes"] for commit in own),
                "healthy": state == "running",
                "working": any(_is_worker_of(worker, runs[0].job_id) for worker in busy),
                "needs_recovery": state in NEEDS_RECOVERY,
                "recovery": _recovery(runs[0]),
            }
        )
    return {
        "out": out,
        "workers": rows,
        "totals": {
            **monitor.totals(commits),
            "of": plan.samples,
            "shards": sum(len(commit.outcome["files"]) for commit in commits.values()),
        },
        "healthy": sum(row["healthy"] for row in rows),
        "working": sum(row["working"] for row in rows),
        "needs_recovery": sum(row["needs_recovery"] for row in rows),
        "done": len(commits) == plan.units,
    }


def _recovery(job: WorkerJob) -> str:
    """What is done about a worker that needs it, or what to do."""
    if job.state not in NEEDS_RECOVERY:
        return ""
    if job.state == "recovering":
        return f"{job.reason}; the server starts it again"
    return f"{job.reason}; `tpu rerun {job.job_id}`, or the same deploy, starts it again"


@lru_cache(1)
def _monitor(out: str) -> dataset_status.DatasetMonitor:
    return dataset_status.DatasetMonitor(open_storage(out))


def _is_worker_of(worker: str, job_id: str) -> bool:
    """Workers started as jobs are named JOB_ID-SLICE-PROCESS: see `pipeline.extraction`."""
    return worker.startswith(f"{job_id}-")
