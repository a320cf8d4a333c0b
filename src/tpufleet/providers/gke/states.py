"""What Kubernetes says about a slice, in the words of a provider. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from tpufleet.model.clouds import CloudSlice, CloudState
from tpufleet.model.hosts import NoticeKind
from tpufleet.model.slices import Loss, SliceId
from tpufleet.providers.gke import keys
from tpufleet.providers.gke.seats import Seat, Seats

Json = dict[str, Any]

# Kubernetes will not get over these by trying again.
HOPELESS_IMAGES = ("InvalidImageName", "ErrImageNeverPull")
IMAGE_TROUBLES = ("ErrImagePull", "ImagePullBackOff", *HOPELESS_IMAGES)
OUT_OF_MEMORY = "out of memory"  # the words are kept when the pods are gone
TAKEN = {
    "DeletionByTaintManager": "its node was taken away",
    "DeletionByPodGC": "its node is gone",
    "EvictionByEvictionAPI": "it was evicted",
    "PreemptionByScheduler": "the scheduler gave its node to a pod of higher priority",
    "TerminationByKubelet": "its node shut down",
}


def slices_of(
    jobset: Json, pods: Iterable[Json], workload: Json | None, seated: Seats, now: datetime
) -> list[CloudSlice]:
    """One for each seat that is taken."""
    hosts = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"]
    zone = jobset["metadata"]["annotations"][keys.ZONE]
    by_seat: dict[int, list[Json]] = {}
    for pod in pods:
        by_seat.setdefault(seat_of(pod), []).append(pod)
    found = []
    for index, seat in enumerate(seated.all):
        if seat.slice_id is None:
            continue
        state, words, dead = _state(jobset, by_seat.get(index, []), workload, seat, hosts, now)
        found.append(
            CloudSlice(
                id=SliceId(seat.slice_id), zone=zone, state=state, words=words,
                lost_hosts=dead if state is CloudState.UP else (),
                notice=seat.notice or _notice(current(by_seat.get(index, []), seat), seat),
                loss=Loss.OUT_OF_MEMORY if f"{OUT_OF_MEMORY}: host" in words else None,
            )
        )  # fmt: skip
    return found


def seat_of(pod: Json) -> int:
    return int(pod["metadata"]["labels"].get(keys.JOB_INDEX, "-1"))


def host_of(pod: Json) -> int:
    return int(pod["metadata"]["annotations"].get(keys.COMPLETION_INDEX, "-1"))


def current(pods: Iterable[Json], seat: Seat) -> dict[int, Json]:
    """The newest pod of each host that may serve the slice that sits here now."""
    found: dict[int, Json] = {}
    for pod in sorted(pods, key=lambda one: one["metadata"]["creationTimestamp"]):
        if pod["metadata"]["uid"] not in seat.past:
            found[host_of(pod)] = pod
    return found


def _alive(pod: Json) -> bool:
    return pod.get("status", {}).get("phase") == "Running"


def goes_on(pod: Json) -> bool:
    """It has not ended, and nobody has told it to."""
    ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
    return not ended and not pod["metadata"].get("deletionTimestamp")


def runs(pod: Json) -> bool:
    return _alive(pod) and not pod["metadata"].get("deletionTimestamp")


def _notice(found: dict[int, Json], seat: Seat) -> NoticeKind | None:
    """A pod of the slice is being ended: it has its grace period, and its host works until then."""
    leaving = any(
        pod["metadata"]["uid"] in seat.pods and pod["metadata"].get("deletionTimestamp")
        for pod in found.values()
    )
    return NoticeKind.PREEMPTED if leaving else None


def dead_hosts(found: dict[int, Json], seat: Seat) -> tuple[int, ...]:
    """Hosts whose pod is no longer the one that ran when the slice came up."""
    gone = {
        host
        for host, uid in enumerate(seat.pods)
        if host not in found or found[host]["metadata"]["uid"] != uid or not _alive(found[host])
    }
    return tuple(sorted(gone | set(seat.dead)))


def _state(
    jobset: Json, pods: Sequence[Json], workload: Json | None, seat: Seat, hosts: int, now: datetime
) -> tuple[CloudState, str, tuple[int, ...]]:
    if jobset["metadata"].get("deletionTimestamp"):
        return CloudState.STOPPING, "released", ()
    if seat.taken_at is not None and seat.taken_at <= now:
        return CloudState.PREEMPTED, "taken after its notice", ()
    if seat.lost:
        return CloudState.PREEMPTED if seat.preempted else CloudState.FAILED, seat.lost, ()
    failed = _condition(jobset, "Failed")
    if failed is not None:
        return CloudState.FAILED, failed.get("message") or "its JobSet failed", ()
    if seat.pods:
        return _once_up(jobset, pods, workload, seat, hosts)
    if jobset["spec"].get("suspend"):
        return CloudState.PENDING, queue_words(workload), ()
    return _coming(pods, seat, hosts)


def _once_up(
    jobset: Json, pods: Sequence[Json], workload: Json | None, seat: Seat, hosts: int
) -> tuple[CloudState, str, tuple[int, ...]]:
    if jobset["spec"].get("suspend"):
        return CloudState.PREEMPTED, eviction_words(workload), ()
    found = current(pods, seat)
    dead = dead_hosts(found, seat)
    if not dead:
        return CloudState.UP, "", ()
    told = _why_gone(pods, seat)
    if len(dead) == hosts:
        preempted = not told.startswith(("host", OUT_OF_MEMORY, "its agent"))
        return CloudState.PREEMPTED if preempted else CloudState.FAILED, told, dead
    return CloudState.UP, f"host {', '.join(map(str, dead))}: {told}", dead


def _coming(
    pods: Sequence[Json], seat: Seat, hosts: int
) -> tuple[CloudState, str, tuple[int, ...]]:
    found = current(pods, seat)
    running = sum(runs(pod) for pod in found.values())
    if running == hosts:
        return CloudState.UP, "", ()
    for pod in found.values():
        reason, words = _image_trouble(pod)
        if reason in HOPELESS_IMAGES:
            return CloudState.FAILED, words, ()
        if reason:
            return CloudState.CREATING, words, ()
    for pod in found.values():
        words = _unschedulable(pod)
        if words:
            return CloudState.PENDING, words, ()
    return CloudState.CREATING, f"{running} of {hosts} hosts run", ()


def _why_gone(pods: Sequence[Json], seat: Seat) -> str:
    """From the pods that ended, or the one reason that leaves no trace."""
    for pod in pods:
        # Before the condition: a kubelet that evicts says there only that it ended the pod.
        if pod.get("status", {}).get("reason") == "Evicted":
            return f"evicted: {pod['status'].get('message', 'its node ran out of something')}"
    for pod in pods:
        for condition in pod.get("status", {}).get("conditions") or ():
            if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
                known = TAKEN.get(condition.get("reason", ""))
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
            return f"{OUT_OF_MEMORY}: host {host_of(pod)} used more than its limit"
        return f"its agent on host {host_of(pod)} ended with status {ended.get('exitCode')}"
    return ""


def _image_trouble(pod: Json) -> tuple[str, str]:
    told = pod.get("status", {})
    found = (told.get("initContainerStatuses") or (), told.get("containerStatuses") or ())
    for status in (*found[0], *found[1]):
        waiting = (status.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in IMAGE_TROUBLES:
            told = waiting.get("message") or waiting["reason"]
            return waiting["reason"], f"the image {status.get('image')} cannot be pulled: {told}"
    return "", ""


def _unschedulable(pod: Json) -> str:
    for condition in pod.get("status", {}).get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("reason") == "Unschedulable":
            return f"no node has room: {condition.get('message', 'unschedulable')}"
    return ""


def queue_words(workload: Json | None) -> str:
    reserved = _condition(workload or {}, "QuotaReserved", status="False")
    if reserved is not None and reserved.get("message"):
        return f"Kueue: {reserved['message']}"
    return "waits for Kueue to admit it"


def eviction_words(workload: Json | None) -> str:
    evicted = _condition(workload or {}, "Evicted")
    told = evicted.get("message") if evicted else ""
    return f"Kueue took its quota: {told}" if told else "Kueue took its quota"


def _condition(resource: Json, kind: str, status: str = "True") -> Json | None:
    for condition in (resource.get("status") or {}).get("conditions") or ():
        if condition.get("type") == kind and condition.get("status") == status:
            return condition
    return None
