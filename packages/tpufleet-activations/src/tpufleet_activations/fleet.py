"""A fleet of extraction workers in several zones: its dataset, its job specs, its status.

All workers claim units of one shared dataset, so a zone that is out of capacity delays nothing and
a lost worker costs at most one unit. Nothing here talks to the control plane.
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
from tpufleet_activations import plans
from tpufleet_activations.inputs import sources
from tpufleet_activations.io import remote_files
from tpufleet_activations.io.storage import Storage, open_storage
from tpufleet_activations.pipeline import dataset_status
from tpufleet_migration.activations.arc import tasks

MODEL = "Qwen/Qwen2.5-0.5B"
DATASET = "barc0/200k_HEAVY_gpt4o-description-gpt4omini-code_generated_problems"
STREAMS = "streams"  # prefix of the task files in the output folder
# Accelerator names of the older scripts that the TPU API spells differently.
SPELLINGS = {"v5e": "v5litepod"}
# Job states as the older dashboard showed them; other states are shown unchanged.
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
    """A job of the fleet, as the control plane reports it."""

    name: str
    job_id: str
    state: str


def worker_name(zone: str, number: int) -> str:
    """`tpu-us-central1-a-0`; numbered from 0 in each zone."""
    return f"tpu-{zone}-{number}"


def fleet_tag(out: str) -> str:
    """The tag of all jobs that work on the dataset in `out`."""
    return f"extract-{hashlib.sha256(out.encode()).hexdigest()[:12]}"


def is_planned(out: str) -> bool:
    return _has_plan(open_storage(out))


def _has_plan(storage: Storage) -> bool:
    try:
        plans.load(storage)
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
    """Split a dataset of ARC pairs into stream files below `out`, and write the plan there."""
    from tpufleet_activations.pipeline import planning  # imports JAX, which takes long

    storage = open_storage(out)
    if _has_plan(storage):
        raise Conflict(f"{out} is already planned; pass --skip-dataset to use that plan")
    rows = sources.read_records(str(remote_files.dataset_folder(dataset)))
    with tempfile.TemporaryDirectory() as folder:
        facts = tasks.write_streams(
            (row.get(column) for row in rows),
            streams,
            Path(folder),
            max_samples=max_samples,
            first=stream_offset,
        )
        if not facts["tasks"]:
            raise BadInput(f"no ARC pairs in column {column!r} of {dataset}; name it with --column")
        uploads = {f"{STREAMS}/{path.name}": path for path in sorted(Path(folder).iterdir())}
        for name, path in uploads.items():
            storage.upload(path, name)
        # An interrupted call with more workers may have left streams that would be read too.
        for name in storage.names(f"{STREAMS}/"):
            stream = tasks.STREAM_NAME.fullmatch(name.removeprefix(f"{STREAMS}/"))
            if stream and name not in uploads:
                storage.delete(name)
    data = {"kind": "arc", "path": f"{out.rstrip('/')}/{STREAMS}"}
    if Path(model).is_dir():  # workers have other working directories
        model = str(Path(model).absolute())
    plan = planning.make_plan(model=model, data=data, choices=choices, **settings)
    plans.write(storage, plan)
    return {**facts, "samples": plan.samples, "units": plan.units, "estimate": plan.estimate}


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
    """One job per worker. Workers are numbered from `stream_offset` over all zones."""
    if "://" not in out:
        raise BadInput(
            f"{out} is a folder on this machine; a fleet needs gs://… or s3://…, "
            "or file:///… on a file system shared by all hosts"
        )
    if not zones or workers_per_zone < 1:
        raise BadInput("at least one zone and one worker per zone are required")
    if len(set(zones)) != len(zones):
        raise BadInput("--zones lists a zone twice; raise --workers-per-zone instead")
    kind, dash, size = accelerator.rpartition("-")
    accelerator = f"{SPELLINGS.get(kind, kind)}{dash}{size}"
    jobs = []
    for zone_index, zone in enumerate(zones):
        for number in range(workers_per_zone):
            stream = stream_offset + zone_index * workers_per_zone + number
            jobs.append(
                {
                    "name": worker_name(zone, number),
                    "command": ["tpu", "extract", "run", out, *run_options],
                    "accelerator": accelerator,
                    "zones": [zone],
                    "capacity": list(capacity),
                    "tags": [fleet_tag(out), f"stream_{stream:03d}"],
                    **({"pool": pool} if pool else {}),
                }
            )
    return jobs


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


@lru_cache(1)
def _monitor(out: str) -> dataset_status.DatasetMonitor:
    return dataset_status.DatasetMonitor(open_storage(out))


def _is_worker_of(worker: str, job_id: str) -> bool:
    """Workers started as jobs are named JOB_ID-SLICE-PROCESS: see `pipeline.extraction`."""
    return worker.startswith(f"{job_id}-")
