"""Queued resources with what only v2alpha1 of the API has: flex-start, and reservations of calendar
mode. Google's client lacks these fields, so they go over REST: the discovery document of
tpu.googleapis.com v2alpha1, as `gcloud alpha compute tpus queued-resources create` uses it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from google.cloud import tpu_v2
from google.protobuf import json_format
from google.rpc import code_pb2

from tpufleet.providers.tpu_vm import error_mapping
from tpufleet.providers.tpu_vm.google_rest import GoogleRest

FLEX_START, RESERVATION_BOUND = "FLEX_START", "RESERVATION_BOUND"


def body(queued: tpu_v2.QueuedResource, model: str, run_duration: timedelta | None) -> Any:
    """As JSON; the gang has another name there."""
    content = json_format.MessageToDict(tpu_v2.QueuedResource.pb(queued))
    content.pop("guaranteed", None)  # the tier of v2
    for spec in content["tpu"]["nodeSpec"]:
        if "multisliceParams" in spec:
            spec["multiNodeParams"] = spec.pop("multisliceParams")
    content["provisioningModel"] = model
    if run_duration is not None:
        seconds = int(run_duration.total_seconds())
        content["runDuration"] = {"maxRunDuration": f"{seconds}s"}
    return content


def create(rest: GoogleRest, parent: str, queued_id: str, content: Any) -> None:
    """Succeeds if it exists."""
    action = f"create queued resource {queued_id} in {parent.rpartition('/')[2]}"
    path = f"v2alpha1/{parent}/queuedResources"
    answer = rest.post("tpu", path, content, queuedResourceId=queued_id)
    error = answer.body.get("error") or {}
    if answer.status == 409 and error.get("status") == "ALREADY_EXISTS":
        return
    if error or answer.status >= 400:
        name = str(error.get("status", "UNAVAILABLE"))
        code = error.get("code", 0) if answer.status < 400 else _number(name)
        raise error_mapping.translate_status(code, str(error.get("message", name)), action)


def _number(status: str) -> int:
    known = code_pb2.Code.keys()
    return int(code_pb2.Code.Value(status if status in known else "UNKNOWN"))
