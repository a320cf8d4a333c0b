"""The state of a slice, from the conditions, reasons and exit codes of its pods and JobSet. Pure.

Decided on typed fields of the Kubernetes API only; messages are for people.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any

import msgspec

from tpufleet.model.fleet.cloud_slices import CloudSlice, CloudState, ExpectedSlice
from tpufleet.model.fleet.hosts import NoticeKind
from tpufleet.model.fleet.pools import RefusalKind
from tpufleet.model.fleet.slices import LossReason, SliceId
from tpufleet.providers.gke import keys
from tpufleet.providers.gke.capacity_events import CapacityEvent
from tpufleet.providers.gke.slice_slots import SliceSlot, SliceSlots

Json = dict[str, Any]
Address = tuple[str, str]  # namespace and name

MOST_NAMED = 3  # workloads that are before another

# Retrying does not help with these.
PERMANENT_IMAGE_ERRORS = ("InvalidImageName", "ErrImageNeverPull")
IMAGE_ERRORS = ("ErrImagePull", "ImagePullBackOff", *PERMANENT_IMAGE_ERRORS)
# By the reason of a pod's DisruptionTarget condition.
DISRUPTION_MESSAGES = {
    "DeletionByTaintManager": "node tainted NoExecute (preemption or maintenance)",
    "DeletionByPodGC": "node deleted",
    "EvictionByEvictionAPI": "pod evicted through the eviction API",
    "PreemptionByScheduler": "preempted by a pod of higher priority",
    "TerminationByKubelet": "node shut down, or pod terminated by the kubelet",
}


_PREEMPTOR = re.compile(r"a workload \(UID: \S+, JobUID: (?P<uid>[^)]+)\)")


class PodLossCause(StrEnum):
    """Why the pods of a running slice ended."""

    EVICTED = "evicted"  # pod status reason Evicted
    DISRUPTED = "disrupted"  # condition DisruptionTarget
    OUT_OF_MEMORY = "out_of_memory"  # container terminated with reason OOMKilled
    AGENT_EXITED = "agent_exited"  # container terminated for any other reason
    DELETED = "deleted"  # by somebody, or no trace of the pods is left

    @property
    def preemption(self) -> bool:
        return self not in (PodLossCause.OUT_OF_MEMORY, PodLossCause.AGENT_EXITED)


class PodLoss(msgspec.Struct, frozen=True, kw_only=True):
    cause: PodLossCause
    message: str

    @property
    def reason(self) -> LossReason | None:
        oom = self.cause is PodLossCause.OUT_OF_MEMORY
        return LossReason.OUT_OF_MEMORY if oom else None


class _Observation(msgspec.Struct, frozen=True):
    state: CloudState
    message: str = ""
    lost_hosts: tuple[int, ...] = ()
    loss: LossReason | None = None
    refusal: RefusalKind = RefusalKind.CAPACITY
    detail: str = ""


def observed_slices(
    jobset: Json,
    pods: Iterable[Json],
    workload: Json | None,
    slots: SliceSlots,
    now: datetime,
    capacity_events: Mapping[str, CapacityEvent] | None = None,
) -> list[CloudSlice]:
    """One for each slot in use. `capacity_events` is by the UID of the pod."""
    hosts = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"]
    zone = jobset["metadata"]["annotations"][keys.ZONE]
    by_slot: dict[int, list[Json]] = {}
    for pod in pods:
        by_slot.setdefault(slot_index(pod), []).append(pod)
    slices = []
    for index, slot in enumerate(slots.slots):
        if slot.slice_id is None:
            continue
        slot_pods = by_slot.get(index, [])
        observation = _observe(
            jobset, slot_pods, workload, slot, index, hosts, now, capacity_events or {}
        )
        leaving = _leaving(current_pods(slot_pods, slot), slot, f"{_job_name(jobset, index)}-")
        slices.append(
            CloudSlice(
                id=SliceId(slot.slice_id),
                zone=zone,
                state=observation.state,
                message=observation.message or leaving,
                lost_hosts=observation.lost_hosts,
                notice=slot.notice or (NoticeKind.PREEMPTED if leaving else None),
                loss=observation.loss,
                refusal=observation.refusal,
                detail=observation.detail,
            )
        )
    return slices


def deleted_slice(expected: ExpectedSlice, jobset: str) -> CloudSlice:
    return CloudSlice(
        id=expected.id, zone=expected.zone, state=CloudState.STOPPING,
        message=f"JobSet {jobset} was deleted", loss=LossReason.VANISHED,
    )  # fmt: skip


def slot_index(pod: Json) -> int:
    return int(pod["metadata"]["labels"].get(keys.JOB_INDEX, "-1"))


def host_index(pod: Json) -> int:
    return int(pod["metadata"]["annotations"].get(keys.COMPLETION_INDEX, "-1"))


def current_pods(pods: Iterable[Json], slot: SliceSlot) -> dict[int, Json]:
    """By host, the newest pod that may serve the slice now in this slot. Times are in seconds: a
    pod that ends is not taken for newer than its replacement of the same second."""
    current: dict[int, Json] = {}
    newest = lambda pod: (pod["metadata"]["creationTimestamp"], is_active(pod))
    for pod in sorted(pods, key=newest):
        if pod["metadata"]["uid"] not in slot.retired_pods:
            current[host_index(pod)] = pod
    return current


def _phase_running(pod: Json) -> bool:
    return pod.get("status", {}).get("phase") == "Running"


def is_active(pod: Json) -> bool:
    """Neither ended nor being deleted."""
    ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
    return not ended and not pod["metadata"].get("deletionTimestamp")


def is_running(pod: Json) -> bool:
    return _phase_running(pod) and not pod["metadata"].get("deletionTimestamp")


def _job_name(jobset: Json, index: int) -> str:
    return f"{jobset['metadata']['name']}-{keys.REPLICATED_JOB}-{index}"


def _leaving(pods: dict[int, Json], slot: SliceSlot, prefix: str) -> str:
    """Why a pod of the slice is being deleted: its host works until the end of its grace period.
    Empty if none is."""
    for host, pod in sorted(pods.items()):
        if pod["metadata"]["uid"] in slot.pods and pod["metadata"].get("deletionTimestamp"):
            known = DISRUPTION_MESSAGES.get(
                (_condition(pod, "DisruptionTarget") or {}).get("reason", "")
            )
            return known or f"pod {prefix}{host} is being deleted"
    return ""


def dead_hosts(pods: dict[int, Json], slot: SliceSlot) -> tuple[int, ...]:
    """Hosts whose pod is gone, ended, or not the one that ran when the slice came up."""
    dead = {
        host
        for host, uid in enumerate(slot.pods)
        if host not in pods
        or pods[host]["metadata"]["uid"] != uid
        or not _phase_running(pods[host])
    }
    return tuple(sorted(dead | set(slot.dead_hosts)))


def _observe(
    jobset: Json,
    pods: Sequence[Json],
    workload: Json | None,
    slot: SliceSlot,
    index: int,
    hosts: int,
    now: datetime,
    capacity_events: Mapping[str, CapacityEvent],
) -> _Observation:
    if jobset["metadata"].get("deletionTimestamp"):
        name = jobset["metadata"]["name"]
        return _Observation(CloudState.STOPPING, f"JobSet {name} is being deleted")
    if slot.preempt_at is not None and slot.preempt_at <= now:
        return _Observation(CloudState.PREEMPTED, "preempted after its notice period")
    if slot.loss_message:
        state = CloudState.PREEMPTED if slot.preempted else CloudState.FAILED
        return _Observation(state, slot.loss_message, loss=slot.loss)
    failed = _condition(jobset, "Failed")
    if failed is not None:
        return _Observation(CloudState.FAILED, failed.get("message") or "the JobSet failed")
    if slot.pods:
        return _observe_running(jobset, pods, workload, slot, index, hosts)
    if jobset["spec"].get("suspend"):
        rejected = rejection_message(workload)
        if rejected:
            return _Observation(CloudState.REFUSED, rejected)
        return _Observation(CloudState.PENDING, queue_message(workload, jobset))
    return _observe_starting(pods, slot, hosts, capacity_events)


def _observe_running(
    jobset: Json,
    pods: Sequence[Json],
    workload: Json | None,
    slot: SliceSlot,
    index: int,
    hosts: int,
) -> _Observation:
    if jobset["spec"].get("suspend"):
        return _Observation(CloudState.PREEMPTED, eviction_message(workload))
    dead = dead_hosts(current_pods(pods, slot), slot)
    if not dead:
        return _Observation(CloudState.UP)
    listed = ",".join(map(str, dead))
    name = _job_name(jobset, index)
    deleted = (
        f"pods {name}-{{{listed}}} deleted" if len(dead) > 1 else f"pod {name}-{listed} deleted"
    )
    loss = pod_loss(pods, deleted)
    if len(dead) == hosts:
        state = CloudState.PREEMPTED if loss.cause.preemption else CloudState.FAILED
        return _Observation(state, loss.message, loss=loss.reason)
    message = f"host {', '.join(map(str, dead))}: {loss.message}"
    return _Observation(CloudState.UP, message, dead, loss.reason)


def _observe_starting(
    pods: Sequence[Json],
    slot: SliceSlot,
    hosts: int,
    capacity_events: Mapping[str, CapacityEvent],
) -> _Observation:
    current = current_pods(pods, slot)
    running = sum(is_running(pod) for pod in current.values())
    if running == hosts:
        return _Observation(CloudState.UP)
    for pod in current.values():
        reason, message = _image_error(pod)
        if reason in PERMANENT_IMAGE_ERRORS:
            return _Observation(CloudState.FAILED, message)
        if reason:
            return _Observation(CloudState.CREATING, message)
    unschedulable = [pod for pod in current.values() if _unschedulable(pod)]
    for pod in unschedulable:
        event = capacity_events.get(pod["metadata"]["uid"])
        if event is not None:
            # A ComputeClass goes on to its next priority: the boot timeout applies.
            tried = keys.COMPUTE_CLASS in ((pod.get("spec") or {}).get("nodeSelector") or {})
            refused = event.refused and not tried
            state = CloudState.REFUSED if refused else CloudState.CREATING
            return _Observation(state, event.message, refusal=event.kind, detail=event.detail)
    for pod in unschedulable:
        # Flex-start waits for capacity for hours. Otherwise nodes come soon or never: the boot
        # timeout applies.
        selector = (pod.get("spec") or {}).get("nodeSelector") or {}
        waits = selector.get(keys.FLEX_START) == "true"
        state = CloudState.PENDING if waits else CloudState.CREATING
        return _Observation(state, _unschedulable(pod))
    return _Observation(CloudState.CREATING, f"{running} of {hosts} hosts running")


def pod_loss(pods: Sequence[Json], deleted: str = "pods deleted") -> PodLoss:
    """Why pods of a slice ended. An outside cause on any pod wins: the others follow from it.
    `deleted`: the message where nothing else explains it."""
    for pod in pods:
        # Before the condition: on eviction the kubelet's condition has no details.
        if pod.get("status", {}).get("reason") == "Evicted":
            detail = pod["status"].get("message") or "its node ran out of resources"
            return PodLoss(cause=PodLossCause.EVICTED, message=f"evicted: {detail}")
    for pod in pods:
        disrupted = _condition(pod, "DisruptionTarget")
        if disrupted is not None:
            known = DISRUPTION_MESSAGES.get(disrupted.get("reason", ""))
            message = known or disrupted.get("message") or "pod disrupted"
            return PodLoss(cause=PodLossCause.DISRUPTED, message=message)
    exits = [(pod, loss) for pod in pods if (loss := _container_exit(pod))]
    for pod, loss in exits:
        # An agent also exits because somebody deletes its pod.
        if not pod["metadata"].get("deletionTimestamp") or loss.reason:
            return loss
    return PodLoss(cause=PodLossCause.DELETED, message=deleted)


def _container_exit(pod: Json) -> PodLoss | None:
    host = host_index(pod)
    for status in pod.get("status", {}).get("containerStatuses") or ():
        terminated = (status.get("state") or {}).get("terminated")
        if not terminated or pod["status"].get("phase") != "Failed":
            continue
        if terminated.get("reason") == "OOMKilled":
            message = f"out of memory: host {host} exceeded its memory limit"
            return PodLoss(cause=PodLossCause.OUT_OF_MEMORY, message=message)
        message = f"agent on host {host} exited with status {terminated.get('exitCode')}"
        return PodLoss(cause=PodLossCause.AGENT_EXITED, message=message)
    return None


def _image_error(pod: Json) -> tuple[str, str]:
    """The reason and a message; empty if images are fine."""
    status = pod.get("status", {})
    for container in (
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    ):
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in IMAGE_ERRORS:
            detail = waiting.get("message") or waiting["reason"]
            return waiting["reason"], f"cannot pull image {container.get('image')}: {detail}"
    return "", ""


def is_unschedulable(pod: Json) -> bool:
    return bool(_unschedulable(pod))


def _unschedulable(pod: Json) -> str:
    scheduled = _condition(pod, "PodScheduled", status="False")
    if scheduled is None or scheduled.get("reason") != "Unschedulable":
        return ""
    return f"no node fits the pod: {scheduled.get('message', 'unschedulable')}"


def queue_message(workload: Json | None, jobset: Json) -> str:
    metadata = jobset["metadata"]
    queue = f"LocalQueue {metadata['namespace']}/{metadata['labels'].get(keys.QUEUE)}"
    if workload is None:
        return f"Kueue has not queued it yet in {queue}: `tpu cluster doctor`"
    for check in (workload.get("status") or {}).get("admissionChecks") or ():
        if check.get("state") in ("Pending", "Retry"):
            detail = check.get("message") or check["state"]
            return f"Kueue: quota is reserved, admission check {check.get('name')}: {detail}"
    reserved = _condition(workload, "QuotaReserved", status="False")
    if reserved is not None and reserved.get("message"):
        return f"Kueue: {reserved['message']}"
    return f"Kueue has queued it in {queue}, and not considered it yet"


def rejection_message(workload: Json | None) -> str:
    """Kueue gave up on an admission check, such as a ProvisioningRequest; empty if it has not."""
    for check in ((workload or {}).get("status") or {}).get("admissionChecks") or ():
        if check.get("state") == "Rejected":
            detail = check.get("message") or "rejected"
            return f"Kueue: admission check {check.get('name')}: {detail}"
    return ""


def explained(workloads: Sequence[Json], jobs: Mapping[str, str]) -> list[Json]:
    """With messages of Kueue that name the job for which it evicted another, in the place of UIDs,
    and what is before one that waits for quota. `jobs` is by the UID of the JobSet; one of another
    fleet is not in it."""
    places = _queue_places(workloads, jobs)

    def message(workload: Json, condition: Json) -> str:
        text = condition.get("message") or ""
        if condition["type"] == "QuotaReserved" and condition["status"] == "False" and text:
            return text + places[_address(workload)]
        found = _PREEMPTOR.search(text)
        if not found or found["uid"] not in jobs:
            return text
        named = f"{text[: found.start()]}job {jobs[found['uid']]}{text[found.end() :]}"
        return named.partition("; preemptor path")[0]

    return [
        {**workload, "status": {**status, "conditions": [
            {**condition, "message": message(workload, condition)}
            for condition in status.get("conditions") or ()
        ]}}
        for workload in workloads
        for status in [workload.get("status") or {}]
    ]  # fmt: skip


def _queue_places(workloads: Sequence[Json], jobs: Mapping[str, str]) -> dict[Address, str]:
    """What is before each in its LocalQueue, of those that wait for quota."""
    queues: dict[Address, list[Json]] = {}
    for workload in workloads:
        if _condition(workload, "QuotaReserved", status="False") is not None:
            queue = (workload.get("spec") or {}).get("queueName", "")
            queues.setdefault((workload["metadata"]["namespace"], queue), []).append(workload)
    places = {}
    for (namespace, queue), waiting in queues.items():
        waiting.sort(key=_queue_order)
        names: list[str] = []
        for index, workload in enumerate(waiting):
            listed = ", ".join([*names, "…"] if index > len(names) else names)
            before = f"; {index} before it in LocalQueue {namespace}/{queue}: {listed}"
            places[_address(workload)] = before if index else ""
            if len(names) < MOST_NAMED:
                owners = workload["metadata"].get("ownerReferences") or ()
                job = next((jobs[each["uid"]] for each in owners if each["uid"] in jobs), "")
                names.append(f"job {job}" if job else f"Workload {workload['metadata']['name']}")
    return places


def _queue_order(workload: Json) -> tuple[int, str]:
    """https://kueue.sigs.k8s.io/docs/concepts/cluster_queue: by priority, then by age."""
    priority = (workload.get("spec") or {}).get("priority") or 0
    return -priority, workload["metadata"].get("creationTimestamp", "")


def _address(workload: Json) -> Address:
    return workload["metadata"]["namespace"], workload["metadata"]["name"]


def eviction_message(workload: Json | None) -> str:
    evicted = _condition(workload or {}, "Evicted")
    detail = evicted.get("message") if evicted else ""
    return f"Kueue evicted its workload: {detail}" if detail else "Kueue evicted its workload"


def _condition(resource: Json, kind: str, status: str = "True") -> Json | None:
    for condition in (resource.get("status") or {}).get("conditions") or ():
        if condition.get("type") == kind and condition.get("status") == status:
            return dict(condition)
    return None
