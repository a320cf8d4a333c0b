"""Which workload a pod belongs to, and how long that workload needs nodes. Pure.

The owner is a JobSet or, where SERVE_KINDS allows it, a Job, a LeaderWorkerSet or a single pod. An
owner is identified by its namespace and a name: a JobSet by its own name, the others as
`job/train`, `leaderworkerset/serve-0` (group 0), `leaderworkerset/serve-0.1` (subgroup 1 of that
group, where each subgroup has its own slice) and `pod/probe`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from tpufleet.errors import BadInput
from tpufleet_gke.provisioner.model import gangs, label_keys
from tpufleet_gke.provisioner.model.gangs import GangMember

Json = Mapping[str, Any]

JOBSET, JOB, LEADER_WORKER_SET, POD = "jobset", "job", "leaderworkerset", "pod"
KINDS = {JOBSET: "JobSet", JOB: "Job", LEADER_WORKER_SET: "LeaderWorkerSet", POD: "Pod"}


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnerStatus:
    uid: str
    ended_at: datetime | None = None  # completed or failed
    suspended_at: datetime | None = None
    members: Mapping[str, GangMember] = field(default_factory=dict)  # of a JobSet: by Job


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolParent:
    """What one node pool serves: the pods that share one slice."""

    kind: str
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PodOwner:
    kind: str
    name: str  # see the module docstring
    pool_name_prefix: str
    is_leader: bool  # the pod that represents all pods of its slice

    @property
    def jobset_name(self) -> str | None:
        return self.name if self.kind == JOBSET else None


def owner_of_pod(pod: Json, served_kinds: Collection[str] = (JOBSET,)) -> PodOwner | None:
    """None when the pod belongs to nothing that is served."""
    metadata = pod["metadata"]
    annotations, labels = metadata.get("annotations") or {}, metadata.get("labels") or {}
    index = annotations.get(label_keys.COMPLETION_INDEX)
    if label_keys.JOBSET_NAME in annotations:
        name = labels.get(label_keys.JOBSET_NAME) or annotations[label_keys.JOBSET_NAME]
        owner = PodOwner(kind=JOBSET, name=name, pool_name_prefix=name, is_leader=index == "0")
    elif label_keys.LWS_NAME in labels:
        group, is_leader = _slice_group(labels, annotations)
        owner = PodOwner(
            kind=LEADER_WORKER_SET,
            name=f"{LEADER_WORKER_SET}/{group}",
            pool_name_prefix=group,
            is_leader=is_leader,
        )
    elif (controller := _controller(pod)) is None:
        name = metadata["name"]
        owner = PodOwner(kind=POD, name=f"{POD}/{name}", pool_name_prefix=name, is_leader=True)
    elif controller["kind"] == "Job":
        name = controller["name"]
        is_leader = index in (None, "0")
        owner = PodOwner(kind=JOB, name=f"{JOB}/{name}", pool_name_prefix=name, is_leader=is_leader)
    else:
        return None
    return owner if owner.kind in served_kinds else None


def _slice_group(labels: Json, annotations: Json) -> tuple[str, bool]:
    """The group or subgroup that shares a slice, and whether this pod represents it."""
    group = f"{labels[label_keys.LWS_NAME]}-{labels.get(label_keys.LWS_GROUP, '0')}"
    worker = _worker_index(labels)
    if not has_slice_per_subgroup(labels, annotations):
        # A leader without chips does not run on the slice; the first worker represents the group.
        with_leader = annotations.get(label_keys.LWS_LEADER_REQUESTS_TPUS) == "true"
        return group, worker in ((0,) if with_leader else (0, 1))
    subgroup = int(labels[label_keys.LWS_SUBGROUP])
    size = int(annotations[label_keys.LWS_SUBGROUP_SIZE])
    extra_leader = _has_extra_leader(int(annotations[label_keys.LWS_SIZE]), size)
    # In subgroup 0 the leader may have no chips there; then the first worker represents it.
    first = (0, 1) if subgroup == 0 else (subgroup * size + extra_leader,)
    return f"{group}.{subgroup}", worker in first


def has_slice_per_subgroup(labels: Json, annotations: Json) -> bool:
    exclusive = annotations.get(label_keys.LWS_SUBGROUP_EXCLUSIVE) == label_keys.NODE_POOL
    in_subgroup = labels.get(label_keys.LWS_SUBGROUP, "").isdecimal()
    return exclusive and in_subgroup and subgroup_count(annotations) is not None


def subgroup_count(annotations: Json) -> int | None:
    """Of the pod's group; None when the group has no subgroups."""
    size = annotations.get(label_keys.LWS_SIZE, "")
    subgroup_size = annotations.get(label_keys.LWS_SUBGROUP_SIZE, "")
    if not size.isdecimal() or not subgroup_size.isdecimal() or int(subgroup_size) < 1:
        return None
    return _count_subgroups(int(size), int(subgroup_size))


def _count_subgroups(size: int, subgroup_size: int) -> int:
    return (size - _has_extra_leader(size, subgroup_size)) // subgroup_size


def _has_extra_leader(size: int, subgroup_size: int) -> bool:
    """Whether the workers alone fill the subgroups, so that the leader is one pod more."""
    return (size - 1) % subgroup_size == 0


def _worker_index(labels: Json) -> int | None:
    index = labels.get(label_keys.LWS_WORKER, "")
    return int(index) if index.isdecimal() else None


def parent_of_pod(pod: Json, owner: PodOwner) -> PoolParent:
    if owner.kind in (POD, LEADER_WORKER_SET):
        return PoolParent(kind=KINDS[owner.kind], name=owner.pool_name_prefix)
    controller = _controller(pod)
    if controller is None:
        raise BadInput("the pod has no controller; node pools are created for pods of a Job only")
    return PoolParent(kind=controller["kind"], name=controller["name"])


def parent_name(pod: Json, owner: PodOwner) -> str:
    """Empty where the pod has lost its controller."""
    try:
        return parent_of_pod(pod, owner).name
    except BadInput:
        return ""


def job_key_of_pod(pod: Json, owner: PodOwner) -> str:
    """Distinguishes pools of equally named owners. JobSet sets the key itself, as a label."""
    if owner.kind == JOBSET:
        return str((pod["metadata"].get("labels") or {}).get(label_keys.JOB_KEY, ""))
    name = f"{pod['metadata']['namespace']}/{owner.pool_name_prefix}"
    return hashlib.sha1(name.encode()).hexdigest()


def owner_from_labels(labels: Mapping[str, str]) -> tuple[str, str] | None:
    """Namespace and name of the owner that a pool with these labels was created for."""
    name = labels.get(label_keys.OWNER_NAME)
    if name:
        return labels.get(label_keys.OWNER_NAMESPACE) or label_keys.LEGACY_NAMESPACE, name
    kind, name = labels.get(label_keys.PARENT_KIND, ""), labels.get(label_keys.PARENT_NAME)
    if name and kind in KINDS and labels.get(label_keys.OWNER_UID):
        return labels.get(label_keys.PARENT_NAMESPACE, ""), f"{kind}/{name}"
    # Last: the key is in no reserved domain, so that any pod may select it.
    legacy = labels.get(label_keys.LEGACY_OWNER)
    if legacy:
        return label_keys.LEGACY_NAMESPACE, legacy
    return None


def describe(owner: tuple[str, str]) -> str:
    kind, name = split_owner_name(owner[1])
    return f"{KINDS[kind]} {owner[0]}/{name}"


def split_owner_name(name: str) -> tuple[str, str]:
    """The kind, and the name of the Kubernetes object."""
    kind, slash, rest = name.partition("/")
    if not slash:
        return JOBSET, name
    return kind, rest.rpartition("-")[0] if kind == LEADER_WORKER_SET else rest


def owner_statuses(kind: str, resources: Iterable[Json]) -> dict[tuple[str, str], OwnerStatus]:
    """By namespace and owner name, from all resources of one kind."""
    statuses: dict[tuple[str, str], OwnerStatus] = {}
    for resource in resources:
        metadata = resource["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        match kind:
            case "jobset":
                status = _batch_status(resource)
                if status.ended_at is None:
                    status = replace(status, members=gangs.gang_members(resource))
                statuses[namespace, name] = status
            case "job" if not _is_part_of_jobset(resource):
                statuses[namespace, f"{JOB}/{name}"] = _batch_status(resource)
            case "pod" if _controller(resource) is None:
                statuses[namespace, f"{POD}/{name}"] = _pod_status(resource)
            case "leaderworkerset":
                status = OwnerStatus(uid=metadata["uid"])
                for group in _group_names(resource):
                    statuses[namespace, f"{LEADER_WORKER_SET}/{group}"] = status
    return statuses


def completed_jobs(jobs: Iterable[Json]) -> dict[tuple[str, str], datetime]:
    """By namespace and name: Jobs that have succeeded, and when. JobSet deletes a Job that it runs
    again."""
    completed = {}
    for job in jobs:
        metadata = job["metadata"]
        for condition in (job.get("status") or {}).get("conditions") or ():
            if condition["type"] == "Complete" and condition.get("status") == "True":
                at = parse_time(condition["lastTransitionTime"])
                completed[metadata["namespace"], metadata["name"]] = at
    return completed


def _group_names(lws: Json) -> Iterable[str]:
    """The groups and subgroups of a LeaderWorkerSet that may have a pool."""
    name, spec = lws["metadata"]["name"], lws.get("spec") or {}
    template = spec.get("leaderWorkerTemplate") or {}
    subgroup_size = (template.get("subGroupPolicy") or {}).get("subGroupSize") or 0
    subgroups = _count_subgroups(template.get("size", 1), subgroup_size) if subgroup_size else 0
    # A rollout adds surge groups, and a scale-down removes groups later than its spec says.
    existing = (lws.get("status") or {}).get("replicas", 0)
    for group in range(max(spec.get("replicas", 1), existing)):
        yield f"{name}-{group}"
        for subgroup in range(subgroups):
            yield f"{name}-{group}.{subgroup}"


def _batch_status(resource: Json) -> OwnerStatus:
    """Of a JobSet or a Job: both have the same conditions."""
    ended_at = suspended_at = None
    for condition in (resource.get("status") or {}).get("conditions") or ():
        if condition.get("status") != "True":
            continue
        at = parse_time(condition["lastTransitionTime"])
        if condition["type"] in ("Completed", "Complete", "Failed"):
            ended_at = at
        elif condition["type"] == "Suspended":
            suspended_at = at
    if not (resource.get("spec") or {}).get("suspend"):
        suspended_at = None
    uid = resource["metadata"]["uid"]
    return OwnerStatus(uid=uid, ended_at=ended_at, suspended_at=suspended_at)


def _pod_status(pod: Json) -> OwnerStatus:
    status = pod.get("status") or {}
    ended_at = None
    if status.get("phase") in ("Succeeded", "Failed"):
        transitions = [
            parse_time(condition["lastTransitionTime"])
            for condition in status.get("conditions") or ()
            if condition.get("lastTransitionTime")
        ]
        ended_at = max(transitions, default=parse_time(pod["metadata"]["creationTimestamp"]))
    return OwnerStatus(uid=pod["metadata"]["uid"], ended_at=ended_at)


def _controller(resource: Json) -> Json | None:
    for reference in resource["metadata"].get("ownerReferences") or ():
        if reference.get("controller"):
            return dict(reference)
    return None


def _is_part_of_jobset(job: Json) -> bool:
    return label_keys.JOBSET_NAME in (job["metadata"].get("labels") or {})


def parse_time(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))
