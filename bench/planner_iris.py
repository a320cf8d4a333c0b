"""Iris's plan for the fleets of `planner.py`: `planner.py --iris PYTHON` runs this with the Python
that marin-iris is installed in.

Reads the fleets as JSON from standard input, and prints the CPU milliseconds of each plan. Timed is
what Iris does in a cycle with the rows that it has read: assign tasks to workers, and derive the
demand for new slices. Routing that demand to zones is left out, and so is its database.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from iris.cluster.constraints import (
    AttributeValue,
    Constraint,
    ConstraintOp,
    WellKnownAttribute,
    device_variant_constraint,
)
from iris.cluster.controller.codec import constraints_to_json, proto_to_json
from iris.cluster.controller.scheduling.policy import (
    compute_demand_entries,
    job_requirements_from_job,
)
from iris.cluster.controller.scheduling.scheduler import (
    DEFAULT_MAX_ASSIGNMENTS_PER_WORKER,
    Scheduler,
    SchedulingContext,
    WorkerSnapshot,
)
from iris.cluster.types import JobName, PendingTask, UserBudgetDefaults, WorkerId
from iris.rpc import job_pb2
from rigging.timing import Timestamp

CPU_MILLICORES, MEMORY_BYTES = 112_000, 192 * 2**30


def workers(hosts: Sequence[Mapping[str, Any]]) -> list[WorkerSnapshot]:
    return [
        WorkerSnapshot(
            worker_id=WorkerId(f"{host['slice']}-{host['index']}"),
            total_cpu_millicores=CPU_MILLICORES,
            total_memory_bytes=MEMORY_BYTES,
            total_gpu_count=0,
            total_tpu_count=host["chips"],
            committed_cpu_millicores=0 if host["free"] else CPU_MILLICORES // 2,
            committed_memory_bytes=0 if host["free"] else MEMORY_BYTES // 2,
            committed_gpu_count=0,
            committed_tpu_count=0 if host["free"] else host["chips"],
            attributes={
                WellKnownAttribute.TPU_NAME: AttributeValue(host["slice"]),
                WellKnownAttribute.TPU_WORKER_ID: AttributeValue(host["index"]),
                WellKnownAttribute.DEVICE_VARIANT: AttributeValue(host["type"]),
                WellKnownAttribute.ZONE: AttributeValue(host["zone"]),
                "pool": AttributeValue(host["pool"] or ""),
            },
        )
        for host in hosts
    ]


def pending_tasks(jobs: Sequence[Mapping[str, Any]]) -> list[PendingTask]:
    """One task for each host that a job needs, as read from its database."""
    return [
        task for number, job in enumerate(jobs) for task in _tasks_of_job(number, job, job["hosts"])
    ]


def _tasks_of_job(number: int, job: Mapping[str, Any], hosts: int) -> list[PendingTask]:
    name = JobName.root(job["owner"], job["id"])
    constraints = [device_variant_constraint([job["type"]])]
    if job["pool"]:
        constraints.append(Constraint.create(key="pool", op=ConstraintOp.EQ, value=job["pool"]))
    if job["zones"]:
        zones = tuple(job["zones"])
        key = WellKnownAttribute.ZONE
        constraints.append(Constraint.create(key=key, op=ConstraintOp.IN, values=zones))
    device = job_pb2.DeviceConfig(tpu=job_pb2.TpuDevice(variant=job["type"], count=job["chips"]))
    return [
        PendingTask(
            task_id=name.task(index),
            job_id=name,
            submitting_user=job["owner"],
            backend_id="",
            state=job_pb2.TASK_STATE_PENDING,
            current_attempt_id=0,
            max_retries_failure=0,
            max_retries_preemption=100,
            submitted_at_ms=Timestamp.from_ms(number),
            priority_band=job_pb2.PRIORITY_BAND_INTERACTIVE,
            priority_neg_depth=0,
            priority_root_submitted_ms=number,
            priority_insertion=number,
            job_state=job_pb2.JOB_STATE_PENDING,
            scheduling_deadline_epoch_ms=None,
            scheduling_timeout_ms=None,
            has_coscheduling=hosts > 1,
            coscheduling_group_by=WellKnownAttribute.TPU_NAME if hosts > 1 else None,
            constraints_json=constraints_to_json([each.to_proto() for each in constraints]),
            res_cpu_millicores=CPU_MILLICORES // 2,
            res_memory_bytes=MEMORY_BYTES // 2,
            res_disk_bytes=0,
            res_device_json=proto_to_json(device),
        )
        for index in range(hosts)
    ]


@dataclass(frozen=True)
class PlanTime:
    """CPU milliseconds."""

    assignments: float
    demand: float


def plan(fleet: Mapping[str, Any]) -> PlanTime:
    snapshots, rows = workers(fleet["hosts"]), pending_tasks(fleet["jobs"])
    scheduler = Scheduler()
    gc.collect()
    began = time.process_time()
    context = SchedulingContext(
        workers=snapshots,
        building_counts={},
        max_building_tasks=scheduler.max_building_tasks_per_worker,
        max_assignments_per_worker=DEFAULT_MAX_ASSIGNMENTS_PER_WORKER,
        pending_tasks=[row.task_id for row in rows],
        jobs={row.job_id: job_requirements_from_job(row) for row in rows},
        pending_task_rows=rows,
        user_spend={},
        user_budget_limits={},
        requested_bands={},
        user_budget_defaults=UserBudgetDefaults(),
    )
    assigned = {task for task, _ in scheduler.find_assignments(context).assignments}
    half = time.process_time()
    demand = compute_demand_entries(context, scheduler, assigned)
    ended = time.process_time()
    started = len({task.parent for task in assigned})
    assert started == fleet["placed"], f"Iris started {started} jobs"
    assert demand, "jobs that do not fit ask for slices"
    return PlanTime(
        assignments=round((half - began) * 1000, 1), demand=round((ended - half) * 1000, 1)
    )


def main() -> None:
    request = json.load(sys.stdin)
    for name, fleet in request["fleets"].items():
        plans = [plan(fleet) for _ in range(request["rounds"])]
        best = min(plans, key=lambda each: each.assignments + each.demand)
        print(json.dumps({"fleet": name, **asdict(best)}), flush=True)


if __name__ == "__main__":
    main()
