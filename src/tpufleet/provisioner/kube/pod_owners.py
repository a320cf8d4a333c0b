"""What a pod belongs to, and how long that needs nodes: a JobSet, or where it is allowed a Job, a
LeaderWorkerSet or the pod alone. Pure.

Each is known by its namespace and a name: a JobSet by its own, the others as `job/train`,
`leaderworkerset/serve-0` (its first group), `leaderworkerset/serve-0.1` (that group's second
subgroup, where each has a slice) and `pod/probe`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tpufleet.errors import BadInput
from tpufleet.provisioner.kube import label_keys

Json = Mapping[str, Any]

JOBSET, JOB, LEADER_WORKER_SET, POD = "jobset", "job", "leaderworkerset", "pod"
KINDS = {JOBSET: "JobSet", JOB: "Job", LEADER_WORKER_SET: "LeaderWorkerSet", POD: "Pod"}


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnerStatus:
    uid: str
    ended_at: datetime | None = None  # completed or failed
    suspended_at: datetime | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolParent:
    """What one pool serves: the pods that run on one slice together."""

    kind: str
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PodOwner:
    kind: str
    name: str  # as it is known
    pool_name_prefix: str  # that names of pools begin with
    is_leader: bool  # whether this pod stands for all those that share its slice

    @property
    def jobset_name(self) -> str | None:
        return self.name if self.kind == JOBSET else None


def owner_of_pod(pod: Json, served: Collection[str] = (JOBSET,)) -> PodOwner | None:
    """None: nothing that is served."""
    metadata = pod["metadata"]
    annotations, labels = metadata.get("annotations") or {}, metadata.get("labels") or {}
    index = annotations.get(label_keys.COMPLETION_INDEX)
    if label_keys.JOBSET_NAME in annotations:
        name = labels.get(label_keys.JOBSET_NAME) or annotations[label_keys.JOBSET_NAME]
        found = PodOwner(kind=JOBSET, name=name, pool_name_prefix=name, is_leader=index == "0")
    elif label_keys.LWS_NAME in labels:
        stem, leads = _group(labels, annotations)
        owner = f"{LEADER_WORKER_SET}/{stem}"
        found = PodOwner(kind=LEADER_WORKER_SET, name=owner, pool_name_prefix=stem, is_leader=leads)
    elif (controller := _controller(pod)) is None:
        name = metadata["name"]
        found = PodOwner(kind=POD, name=f"{POD}/{name}", pool_name_prefix=name, is_leader=True)
    elif controller["kind"] == "Job":
        name = controller["name"]
        leads = index in (None, "0")
        found = PodOwner(kind=JOB, name=f"{JOB}/{name}", pool_name_prefix=name, is_leader=leads)
    else:
        return None
    return found if found.kind in served else None


def _group(labels: Json, annotations: Json) -> tuple[str, bool]:
    """What shares a slice with this pod of a LeaderWorkerSet, and whether the pod stands for it."""
    name, worker = (
        f"{labels[label_keys.LWS_NAME]}-{labels.get(label_keys.LWS_GROUP, '0')}",
        _index(labels),
    )
    if not has_slice_per_subgroup(labels, annotations):
        # A leader without chips needs no place on the slice; then the first worker stands for it.
        with_leader = annotations.get(label_keys.LWS_LEADER_REQUESTS_TPUS) == "true"
        return name, worker in ((0,) if with_leader else (0, 1))
    subgroup, size = (
        int(labels[label_keys.LWS_SUBGROUP]),
        int(annotations[label_keys.LWS_SUBGROUP_SIZE]),
    )
    # Whether or not the leader has chips there, the first worker may stand for it.
    besides = _leader_besides(int(annotations[label_keys.LWS_SIZE]), size)
    first = (0, 1) if subgroup == 0 else (subgroup * size + besides,)
    return f"{name}.{subgroup}", worker in first


def has_slice_per_subgroup(labels: Json, annotations: Json) -> bool:
    """Whether each subgroup of its group has a slice of its own."""
    exclusive = annotations.get(label_keys.LWS_SUBGROUP_EXCLUSIVE) == label_keys.NODE_POOL
    member = labels.get(label_keys.LWS_SUBGROUP, "").isdecimal()
    return exclusive and member and subgroup_count(annotations) is not None


def subgroup_count(annotations: Json) -> int | None:
    """How many its group has; None: it is not divided."""
    size, each = (
        annotations.get(label_keys.LWS_SIZE, ""),
        annotations.get(label_keys.LWS_SUBGROUP_SIZE, ""),
    )
    if not size.isdecimal() or not each.isdecimal() or int(each) < 1:
        return None
    return _subgroups(int(size), int(each))


def _subgroups(size: int, each: int) -> int:
    return (size - _leader_besides(size, each)) // each


def _leader_besides(size: int, each: int) -> bool:
    """Where all others can be divided, the leader is one more in the first subgroup, or in none."""
    return (size - 1) % each == 0


def _index(labels: Json) -> int | None:
    worker = labels.get(label_keys.LWS_WORKER, "")
    return int(worker) if worker.isdecimal() else None


def parent_of_pod(pod: Json, family: PodOwner) -> PoolParent:
    if family.kind in (POD, LEADER_WORKER_SET):
        return PoolParent(kind=KINDS[family.kind], name=family.pool_name_prefix)
    controller = _controller(pod)
    if controller is None:
        raise BadInput("the pod has no controller; only pods of a Job get a node pool")
    return PoolParent(kind=controller["kind"], name=controller["name"])


def job_key_of_pod(pod: Json, family: PodOwner) -> str:
    """By which two families of one name are told apart. JobSet makes its own."""
    if family.kind == JOBSET:
        return str((pod["metadata"].get("labels") or {}).get(label_keys.JOB_KEY, ""))
    named = f"{pod['metadata']['namespace']}/{family.pool_name_prefix}"
    return hashlib.sha1(named.encode()).hexdigest()


def owner_from_labels(labels: Mapping[str, str]) -> tuple[str, str] | None:
    """Whom a pool with these labels was made for."""
    name = labels.get(label_keys.OWNER_NAME)
    if name:
        return labels.get(label_keys.OWNER_NAMESPACE) or label_keys.LEGACY_NAMESPACE, name
    legacy = labels.get(label_keys.LEGACY_OWNER)
    if legacy:
        return label_keys.LEGACY_NAMESPACE, legacy
    kind, name = labels.get(label_keys.PARENT_KIND, ""), labels.get(label_keys.PARENT_NAME)
    if name and kind in KINDS and labels.get(label_keys.OWNER_UID):
        return labels.get(label_keys.PARENT_NAMESPACE, ""), f"{kind}/{name}"
    return None


def describe(owner: tuple[str, str]) -> str:
    kind, name = split_owner_name(owner[1])
    return f"{KINDS[kind]} {owner[0]}/{name}"


def split_owner_name(name: str) -> tuple[str, str]:
    """The kind, and the name that Kubernetes knows it by."""
    kind, slash, rest = name.partition("/")
    if not slash:
        return JOBSET, name
    return kind, rest.rpartition("-")[0] if kind == LEADER_WORKER_SET else rest


def owner_statuses(kind: str, found: Iterable[Json]) -> dict[tuple[str, str], OwnerStatus]:
    """Of all resources of a kind: by namespace and name, as they are known."""
    known: dict[tuple[str, str], OwnerStatus] = {}
    for one in found:
        metadata = one["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        match kind:
            case "jobset":
                known[namespace, name] = _batch(one)
            case "job" if not _of_jobset(one):
                known[namespace, f"{JOB}/{name}"] = _batch(one)
            case "pod" if _controller(one) is None:
                known[namespace, f"{POD}/{name}"] = _pod(one)
            case "leaderworkerset":
                # A rollout makes more groups for a while; one that shrinks still has them.
                made = (one.get("status") or {}).get("replicas", 0)
                for group in range(max((one.get("spec") or {}).get("replicas", 1), made)):
                    for part in _parts(one):
                        known[namespace, f"{LEADER_WORKER_SET}/{name}-{group}{part}"] = OwnerStatus(
                            uid=metadata["uid"]
                        )
    return known


def _parts(one: Json) -> list[str]:
    """Of a group that may have a pool: the whole, and its subgroups."""
    template = (one.get("spec") or {}).get("leaderWorkerTemplate") or {}
    each = (template.get("subGroupPolicy") or {}).get("subGroupSize") or 0
    count = _subgroups(template.get("size", 1), each) if each else 0
    return ["", *(f".{number}" for number in range(count))]


def _batch(one: Json) -> OwnerStatus:
    """JobSets and Jobs tell in the same way how far they are."""
    ended = suspended = None
    for condition in (one.get("status") or {}).get("conditions") or ():
        if condition.get("status") != "True":
            continue
        at = parse_time(condition["lastTransitionTime"])
        if condition["type"] in ("Completed", "Complete", "Failed"):
            ended = at
        elif condition["type"] == "Suspended":
            suspended = at
    if not (one.get("spec") or {}).get("suspend"):
        suspended = None
    return OwnerStatus(uid=one["metadata"]["uid"], ended_at=ended, suspended_at=suspended)


def _pod(one: Json) -> OwnerStatus:
    status = one.get("status") or {}
    ended = None
    if status.get("phase") in ("Succeeded", "Failed"):
        moments = [
            parse_time(condition["lastTransitionTime"])
            for condition in status.get("conditions") or ()
            if condition.get("lastTransitionTime")
        ]
        ended = max(moments, default=parse_time(one["metadata"]["creationTimestamp"]))
    return OwnerStatus(uid=one["metadata"]["uid"], ended_at=ended)


def _controller(one: Json) -> Json | None:
    for owner in one["metadata"].get("ownerReferences") or ():
        if owner.get("controller"):
            return owner
    return None


def _of_jobset(job: Json) -> bool:
    return label_keys.JOBSET_NAME in (job["metadata"].get("labels") or {})


def parse_time(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))
