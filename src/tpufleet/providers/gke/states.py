"""What Kubernetes says about a slice, in the words of a provider. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from tpufleet.model.cloud_slices import CloudSlice, CloudState
from tpufleet.model.hosts import NoticeKind
from tpufleet.model.slices import LossReason, SliceId
from tpufleet.providers.gke import keys
from tpufleet.providers.gke.slice_slots import SliceSlot, SliceSlots

Json = dict[str, Any]

# Kubernetes will not get over these by trying again.
PERMANENT_IMAGE_ERRORS = ("InvalidImageName", "ErrImageNeverPull")
IMAGE_ERRORS = ("ErrImagePull", "ImagePullBackOff", *PERMANENT_IMAGE_ERRORS)
OUT_OF_MEMORY = "out of memory"  # the words are kept when the pods are gone
DISRUPTION_MESSAGES = {
    "DeletionByTaintManager": "its node was taken away",
    "DeletionByPodGC": "its node is gone",
    "EvictionByEvictionAPI": "it was evicted",
    "PreemptionByScheduler": "the scheduler gave its node to a pod of higher priority",
    "TerminationByKubelet": "its node shut down",
}


def observed_slices(
    jobset: Json, pods: Iterable[Json], workload: Json | None, slots: SliceSlots, now: datetime
) -> list[CloudSlice]:
    """One for each seat that is taken."""
    hosts = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"]
    zone = jobset["metadata"]["annotations"][keys.ZONE]
    by_seat: dict[int, list[Json]] = {}
    for pod in pods:
        by_seat.setdefault(slot_index(pod), []).append(pod)
    found = []
    for index, seat in enumerate(slots.slots):
        if seat.slice_id is None:
            continue
        state, words, dead = _state(jobset, by_seat.get(index, []), workload, seat, hosts, now)
        found.append(
            CloudSlice(
                id=SliceId(seat.slice_id), zone=zone, state=state, message=words,
                lost_hosts=dead if state is CloudState.UP else (),
                notice=seat.notice or _notice(current_pods(by_seat.get(index, []), seat), seat),
                loss=LossReason.OUT_OF_MEMORY if f"{OUT_OF_MEMORY}: host" in words else None,
            )
        )  # fmt: skip
    return found


def slot_index(pod: Json) -> int:
    return int(pod["metadata"]["labels"].get(keys.JOB_INDEX, "-1"))


def host_index(pod: Json) -> int:
    return int(pod["metadata"]["annotations"].get(keys.COMPLETION_INDEX, "-1"))


def current_pods(pods: Iterable[Json], seat: SliceSlot) -> dict[int, Json]:
    """The newest pod of each host that may serve the slice that sits here now."""
    found: dict[int, Json] = {}
    for pod in sorted(pods, key=lambda one: one["metadata"]["creationTimestamp"]):
        if pod["metadata"]["uid"] not in seat.retired_pods:
            found[host_index(pod)] = pod
    return found


def _alive(pod: Json) -> bool:
    return pod.get("status", {}).get("phase") == "Running"


def is_active(pod: Json) -> bool:
    """It has not ended, and nobody has told it to."""
    ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
    return not ended and not pod["metadata"].get("deletionTimestamp")


def is_running(pod: Json) -> bool:
    return _alive(pod) and not pod["metadata"].get("deletionTimestamp")


def _notice(found: dict[int, Json], seat: SliceSlot) -> NoticeKind | None:
    """A pod of the slice is being ended: it has its grace period, and its host works until then."""
    leaving = any(
        pod["metadata"]["uid"] in seat.pods and pod["metadata"].get("deletionTimestamp")
        for pod in found.values()
    )
    return NoticeKind.PREEMPTED if leaving else None


def dead_hosts(found: dict[int, Json], seat: SliceSlot) -> tuple[int, ...]:
    """Hosts whose pod is no longer the one that ran when the slice came up."""
    gone = {
        host
        for host, uid in enumerate(seat.pods)
        if host not in found or found[host]["metadata"]["uid"] != uid or not _alive(found[host])
    }
    return tuple(sorted(gone | set(seat.dead_hosts)))


def _state(
    jobset: Json,
    pods: Sequence[Json],
    workload: Json | None,
    seat: SliceSlot,
    hosts: int,
    now: datetime,
) -> tuple[CloudState, str, tuple[int, ...]]:
    if jobset["metadata"].get("deletionTimestamp"):
        return CloudState.STOPPING, "released", ()
    if seat.preempt_at is not None and seat.preempt_at <= now:
        return CloudState.PREEMPTED, "taken after its notice", ()
    if seat.loss_message:
        return CloudState.PREEMPTED if seat.preempted else CloudState.FAILED, seat.loss_message, ()
    failed = _condition(jobset, "Failed")
    if failed is not None:
        return CloudState.FAILED, failed.get("message") or "its JobSet failed", ()
    if seat.pods:
        return _once_up(jobset, pods, workload, seat, hosts)
    if jobset["spec"].get("suspend"):
        return CloudState.PENDING, queue_message(workload), ()
    return _coming(pods, seat, hosts)


def _once_up(
    jobset: Json, pods: Sequence[Json], workload: Json | None, seat: SliceSlot, hosts: int
) -> tuple[CloudState, str, tuple[int, ...]]:
    if jobset["spec"].get("suspend"):
        return CloudState.PREEMPTED, eviction_message(workload), ()
    found = current_pods(pods, seat)
    dead = dead_hosts(found, seat)
    if not dead:
        return CloudState.UP, "", ()
    told = _why_gone(pods, seat)
    if len(dead) == hosts:
        preempted = not told.startswith(("host", OUT_OF_MEMORY, "its agent"))
        return CloudState.PREEMPTED if preempted else CloudState.FAILED, told, dead
    return CloudState.UP, f"host {', '.join(map(str, dead))}: {told}", dead


def _coming(
    pods: Sequence[Json], seat: SliceSlot, hosts: int
) -> tuple[CloudState, str, tuple[int, ...]]:
    found = current_pods(pods, seat)
    running = sum(is_running(pod) for pod in found.values())
    if running == hosts:
        return CloudState.UP, "", ()
    for pod in found.values():
        reason, words = _image_trouble(pod)
        if reason in PERMANENT_IMAGE_ERRORS:
            return CloudState.FAILED, words, ()
        if reason:
            return CloudState.CREATING, words, ()
    for pod in found.values():
        words = _unschedulable(pod)
        if words:
            return CloudState.PENDING, words, ()
    return CloudState.CREATING, f"{running} of {hosts} hosts run", ()


def _why_gone(pods: Sequence[Json], seat: SliceSlot) -> str:
    """From the pods that ended, or the one reason that leaves no trace."""
    for pod in pods:
        # Before the condition: a kubelet that evicts says there only that it ended the pod.
        if pod.get("status", {}).get("reason") == "Evicted":
            return f"evicted: {pod['status'].get('message', 'its node ran out of something')}"
    for pod in pods:
        for condition in pod.get("status", {}).get("conditions") or ():
            if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
                known = DISRUPTION_MESSAGES.get(condition.get("reason", ""))
                return known or condition.get("message") or "it was disrupted"
    for pod in pods:
        words = _ended(pod)
        if words:
            return words
    return "its pods are gone"


def _ended(pod: Json) -> str:
    for status in pod.get("status", {}).get("containerStatuses") or ():
        ended = (status.get("state") or {}).get("terminated")
        if not ended or pod["status"].get("phase") != "Failed":
            continue
        if ended.get("reason") == "OOMKilled":
            return f"{OUT_OF_MEMORY}: host {host_index(pod)} used more than its limit"
        return f"its agent on host {host_index(pod)} ended with status {ended.get('exitCode')}"
    return ""


def _image_trouble(pod: Json) -> tuple[str, str]:
    told = pod.get("status", {})
    found = (told.get("initContainerStatuses") or (), told.get("containerStatuses") or ())
    for status in (*found[0], *found[1]):
        waiting = (status.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in IMAGE_ERRORS:
            told = waiting.get("message") or waiting["reason"]
            return waiting["reason"], f"the image {status.get('image')} cannot be pulled: {told}"
    return "", ""


def _unschedulable(pod: Json) -> str:
    for condition in pod.get("status", {}).get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("reason") == "Unschedulable":
            return f"no node has room: {condition.get('message', 'unschedulable')}"
    return ""


def queue_message(workload: Json | None) -> str:
    reserved = _condition(workload or {}, "QuotaReserved", status="False")
    if reserved is not None and reserved.get("message"):
        return f"Kueue: {reserved['message']}"
    return "waits for Kueue to admit it"


def eviction_message(workload: Json | None) -> str:
    evicted = _condition(workload or {}, "Evicted")
    told = evicted.get("message") if evicted else ""
    return f"Kueue took its quota: {told}" if told else "Kueue took its quota"


def _condition(resource: Json, kind: str, status: str = "True") -> Json | None:
    for condition in (resource.get("status") or {}).get("conditions") or ():
        if condition.get("type") == kind and condition.get("status") == status:
            return condition
    return None
