"""Which Jobs of a JobSet run at the same time, and so need all of their slices or none. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tpufleet.errors import BadInput
from tpufleet_gke.provisioner.model import label_keys, pool_shapes, scheduling
from tpufleet_gke.provisioner.model.pool_shapes import PoolShape

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class GangMember:
    """A Job of a JobSet that needs a slice."""

    shape: PoolShape
    stage: int  # 1 for Jobs that start when those of stage 0 are complete, and so on
    pods: int  # at a time


def gang_members(jobset: Json) -> dict[str, GangMember]:
    """By the name of the Job."""
    members: dict[str, GangMember] = {}
    stages: dict[str, int] = {}
    for replicated in (jobset.get("spec") or {}).get("replicatedJobs") or ():
        name = replicated["name"]
        stages[name] = max(
            (
                stages.get(needed["name"], 0) + (needed.get("status") == "Complete")
                for needed in replicated.get("dependsOn") or ()
            ),
            default=0,
        )
        job = (replicated.get("template") or {}).get("spec") or {}
        pod = job.get("template") or {}
        shape = _shape(pod.get("spec") or {})
        marks = (
            ((pod.get("metadata") or {}).get(kind) or {}) for kind in ("labels", "annotations")
        )
        disabled = any(each.get(label_keys.DISABLE) == "true" for each in marks)
        if shape is not None and not disabled:
            member = GangMember(shape, stages[name], job.get("parallelism", 1))
            for index in range(replicated.get("replicas", 1)):
                members[f"{jobset['metadata']['name']}-{name}-{index}"] = member
    return members


def _shape(pod_spec: Json) -> PoolShape | None:
    """None for pods that need no slice, or an impossible one."""
    labels = scheduling.wanted_labels(pod_spec, scheduling.affinity_terms(pod_spec)[0])
    requests = [
        ((container.get("resources") or {}).get("requests") or {}).get(label_keys.TPU)
        or ((container.get("resources") or {}).get("limits") or {}).get(label_keys.TPU, "0")
        for container in pod_spec.get("containers") or ()
    ]
    try:
        return pool_shapes.find_shape(
            labels.get(label_keys.ACCELERATOR, ""),
            labels.get(label_keys.TOPOLOGY, ""),
            sum(int(chips) for chips in requests),
        )
    except (BadInput, ValueError):
        return None
