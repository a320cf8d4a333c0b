"""Why no nodes came for a pod, from events of the provisioner and the cluster autoscaler. Pure.

Decided on the reason of an event and the annotation of our provisioner; messages are for people.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from tpufleet.model.fleet.pools import RefusalKind

Json = dict[str, Any]

# Of the provisioner (upstream's and ours) and of the cluster autoscaler. NotTriggerScaleUp is not
# one: the autoscaler writes it for every pod whose pool someone else creates.
FAILURE_REASONS = ("NodePoolCreationFailed", "SliceCreationFailed", "FailedScaleUp")
FAILURE_CAUSE = "tpu-provisioner.cloud.google.com/failure-cause"  # annotation of our provisioner
GKE_MESSAGE = "tpu-provisioner.cloud.google.com/gke-message"  # annotation: Google's whole text
TRANSIENT = "passing"  # its value where the provisioner itself retries within seconds
# An invalid request may be due to a setting of the provisioner, so no job fails for it.
_KINDS = {"quota": RefusalKind.QUOTA, "permission": RefusalKind.ACCESS}
# How our provisioner begins; the job knows its zone and kind of capacity, and not its pool.
_POOL = re.compile(r"^(node pool \S+: |(node pool \S+ in )?[a-z0-9-]+ \([a-z-]+\): )?(GKE: )?")
# How GKE's cluster autoscaler puts its reasons.
_SCALE_UP = re.compile(
    r"Node scale up in zones .*?failed: (?P<reason>.*?)\. Pod is at risk of not being scheduled.*",
    re.DOTALL,
)


class CapacityEvent(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    refused: bool  # there will be no nodes here soon: try elsewhere
    kind: RefusalKind = RefusalKind.CAPACITY
    detail: str = ""  # Google's whole text, where the message is a summary


def latest_by_pod(events: Iterable[Json]) -> dict[str, CapacityEvent]:
    """By the UID of the pod. The last failure counts."""
    latest: dict[str, tuple[str, Json]] = {}
    for event in events:
        uid = (event.get("involvedObject") or {}).get("uid")
        at = event.get("lastTimestamp") or event.get("eventTime") or ""
        if uid and event.get("reason") in FAILURE_REASONS and latest.get(uid, ("",))[0] <= at:
            latest[uid] = (at, event)
    return {uid: _capacity_event(event) for uid, (_, event) in latest.items()}


def _capacity_event(event: Json) -> CapacityEvent:
    annotations = event["metadata"].get("annotations") or {}
    cause = annotations.get(FAILURE_CAUSE, "")
    message = _POOL.sub("", str(event.get("message") or ""), count=1)
    scale_up = _SCALE_UP.fullmatch(message)
    message = f"cluster autoscaler: {scale_up['reason']}" if scale_up else message
    return CapacityEvent(
        message=message,
        refused=cause != TRANSIENT,
        kind=_KINDS.get(cause, RefusalKind.CAPACITY),
        detail=annotations.get(GKE_MESSAGE, ""),
    )
