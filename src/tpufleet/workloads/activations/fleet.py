"""A fleet of extraction workers over zones: its dataset, its jobs, and how they are getting on.

All workers share one dataset and one queue of units, so no zone has a share of its own that must
wait for it, and a worker that is lost costs at most the unit it was doing. Who talks to the control
plane calls this; nothing here does.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tpufleet.errors import BadInput, Conflict, NotFound
from tpufleet.workloads.activations import inputs, plans
from tpufleet.workloads.activations.arc import tasks
from tpufleet.workloads.activations.io import remote_files
from tpufleet.workloads.activations.io.storage import open_storage
from tpufleet.workloads.activations.pipeline import dataset_status, planning

MODEL = "Qwen/Qwen2.5-0.5B"
DATASET = "barc0/200k_HEAVY_gpt4o-description-gpt4omini-code_generated_problems"
STREAMS = "streams"  # where, below a dataset, the tasks lie that it is made from
# Former names of accelerators that the TPU API spells differently.
SPELLINGS = {"v5e": "v5litepod"}
# The words of the former dashboard for a job's states; other states show as they are.
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
    """One of a fleet's jobs, as the control plane sees it."""

    name: str
    job_id: str
    state: str


def worker_name(zone: str, number: int) -> str:
    """`tpu-us-central1-a-0`: numbers start again in each zone."""
    return f"tpu-{zone}-{number}"


def fleet_tag(out: str) -> str:
    """What the jobs of a dataset's fleet are found by."""
    return f"extract-{hashlib.sha256(out.encode()).hexdigest()[:12]}"


def is_planned(out: str) -> bool:
    try:
        plans.load(open_storage(out))
    except NotFound:
        return False
    return True


def prepare_dataset(
    out: str,
    *,
    streams: int,
    stream_offset: int = 0,
    dataset: str = DATASET,
    column: str = "examples",
    max_samples: int | None = None,
    model: str = MODEL,
    choices: Sequence[str] = ("resid_post.*",),
    **settings: Any,
) -> dict[str, Any]:
    """Cut a dataset of ARC pairs into streams, put them beside OUT's plan, and make that plan."""
    storage = open_storage(out)
    if is_planned(out):
        raise Conflict(f"{out} is planned already; --skip-dataset sets a fleet on it as it is")
    rows = inputs.read_records(str(remote_files.dataset_folder(dataset)))
    with tempfile.TemporaryDirectory() as folder:
        facts = tasks.write_streams(
            (row.get(column) for row in rows),
            streams,
            Path(folder),
            max_samples=max_samples,
            first=stream_offset,
        )
        if not facts["tasks"]:
            raise BadInput(f"{dataset} holds no ARC pairs in the column {column!r}")
        placed = {f"{STREAMS}/{path.name}": path for path in sorted(Path(folder).iterdir())}
        for name, path in placed.items():
            storage.upload(path, name)
        # What an interrupted call with more workers left would be read as well.
        for name in storage.names(f"{STREAMS}/"):
            if name not in placed:
                storage.delete(name)
    data = {"kind": "arc", "path": f"{out.rstrip('/')}/{STREAMS}"}
    if Path(model).is_dir():  # workers start in other folders
        model = str(Path(model).absolute())
    made = planning.make_plan(model=model, data=data, choices=choices, **settings)
    plans.write(storage, made)
    return {**facts, "samples": made.samples, "units": made.units, "estimate": made.estimate}


def worker_jobs(
    out: str,
    *,
    zones: Sequence[str],
    workers_per_zone: int,
    accelerator: str,
    stream_offset: int = 0,
    capacity: Sequence[str] = ("spot",),
    run_options: Sequence[str] = (),
    pool: str | None = None,
) -> list[dict[str, Any]]:
    """One job for each worker. `stream_offset` is where the workers' running numbers begin."""
    if "://" not in out:
        raise BadInput(
            f"{out} is a folder of this machine; a fleet needs gs://… or s3://…, "
            "or file:///… on a file system that all hosts share"
        )
    if not zones or workers_per_zone < 1:
        raise BadInput("name at least one zone and one worker a zone")
    if len(set(zones)) != len(zones):
        raise BadInput("a zone is named twice; raise --workers-per-zone instead")
    kind, dash, size = accelerator.rpartition("-")
    accelerator = f"{SPELLINGS.get(kind, kind)}{dash}{size}"
    found = []
    for place, zone in enumerate(zones):
        for number in range(workers_per_zone):
            running = stream_offset + place * workers_per_zone + number
            found.append(
                {
                    "name": worker_name(zone, number),
                    "command": ["tpu", "extract", "run", out, *run_options],
                    "accelerator": accelerator,
                    "zones": [zone],
                    "capacity": list(capacity),
                    "tags": [fleet_tag(out), f"stream_{running:03d}"],
                    **({"pool": pool} if pool else {}),
                }
            )
    return found


def to_job_file(jobs: Iterable[Mapping[str, Any]]) -> str:
    """A job file of several documents. JSON is YAML, and quotes what must be quoted."""
    return "".join(f"---\n{json.dumps(job, indent=2)}\n" for job in jobs)


def fleet_status(out: str, jobs: Iterable[WorkerJob], now: float | None = None) -> dict[str, Any]:
    """How a fleet is getting on: what each worker has committed, and who needs help.

    `seen` has the newest jobs first; those of one name are one worker, started again.
    """
    watched = _watched(out)
    plan = watched.plan
    commits, held, alive = watched.observe(now)
    busy = {claim.worker for claim in held.values()} & alive
    workers: dict[str, list[WorkerJob]] = {}
    for job in jobs:
        workers.setdefault(job.name, []).append(job)
    rows = []
    for name, runs in sorted(workers.items()):
        mine = [c for c in commits.values() if any(_belongs(c.worker, run.job_id) for run in runs)]
        state = runs[0].state
        rows.append(
            {
                "name": name,
                "job": runs[0].job_id,
                "status": STATUS.get(state, state.upper()[:7]),
                "samples": sum(len(plan.sample_range(commit.unit)) for commit in mine),
                "shards": sum(len(commit.outcome["files"]) for commit in mine),
                "bytes": sum(commit.outcome["bytes"] for commit in mine),
                "healthy": state == "running",
                "working": any(_belongs(worker, runs[0].job_id) for worker in busy),
                "needs_recovery": state in NEEDS_RECOVERY,
            }
        )
    return {
        "out": out,
        "workers": rows,
        "totals": {
            **watched.totals(commits),
            "of": plan.samples,
            "shards": sum(len(commit.outcome["files"]) for commit in commits.values()),
        },
        "healthy": sum(row["healthy"] for row in rows),
        "working": sum(row["working"] for row in rows),
        "needs_recovery": sum(row["needs_recovery"] for row in rows),
        "done": len(commits) == plan.units,
    }


@lru_cache(1)
def _watched(out: str) -> dataset_status.DatasetMonitor:
    return dataset_status.DatasetMonitor(open_storage(out))


def _belongs(worker: str, job_id: str) -> bool:
    """A worker of the platform is called by its job, its slice and its process."""
    return worker.startswith(f"{job_id}-")
