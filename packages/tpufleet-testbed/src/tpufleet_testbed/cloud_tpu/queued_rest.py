"""Creating queued resources over REST, in v2alpha1 of the API: its fields for flex-start and for
reservations of calendar mode are in no client library (the discovery document of
tpu.googleapis.com, version v2alpha1; cloud.google.com/tpu/docs/request-using-flex-start)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from datetime import datetime, timedelta
from typing import Any

from google.cloud.tpu_v2.types import cloud_tpu
from google.protobuf import json_format

from tpufleet_testbed.cloud_tpu.api_errors import invalid_argument
from tpufleet_testbed.cloud_tpu.cloud import Cloud
from tpufleet_testbed.cloud_tpu.queued_resources import QueuedResources
from tpufleet_testbed.servers import ApiError

MODELS = ("STANDARD", "SPOT", "RESERVATION_BOUND", "FLEX_START")
LONGEST_RUN = timedelta(days=7)
_STATUSES = {3: 400, 5: 404, 6: 409, 7: 403, 8: 429, 9: 400, 14: 503}  # HTTP, by gRPC code

Answer = tuple[int, dict[str, Any]]


class QueuedRest:
    def __init__(
        self, cloud: Cloud, queue: QueuedResources,
        reservation_end: Callable[[str, str], datetime | None],
    ) -> None:  # fmt: skip
        """`reservation_end`: of one in a zone, if it is of calendar mode."""
        self._cloud = cloud
        self._queue = queue
        self._reservation_end = reservation_end
        self.requests: list[dict[str, Any]] = []  # bodies, in order

    def create(self, parent: str, query: Mapping[str, str], body: dict[str, Any]) -> Answer:
        self.requests.append(deepcopy(body))
        try:
            with self._cloud.lock:
                now = self._cloud.run_due()
                request, run_limit = _parsed(body)
                zone, _, reservation = request.reservation_name.partition("/reservations/")
                ends_at = self._reservation_end(zone.rpartition("/")[2], reservation)
                name = self._queue.create(
                    parent, query.get("queuedResourceId", ""), request, now,
                    query.get("requestId", ""), run_limit, ends_at,
                )  # fmt: skip
                return 200, json_format.MessageToDict(self._cloud.operations.get(name))
        except ApiError as error:
            status = _STATUSES.get(error.number, 500)
            content = {"code": status, "message": error.message, "status": error.code.name}
            return status, {"error": content}


def _parsed(body: dict[str, Any]) -> tuple[cloud_tpu.QueuedResource, timedelta | None]:
    """As v2 has it, and how long the nodes may run."""
    known = {key: value for key, value in body.items() if key not in _ALPHA}
    model = body.get("provisioningModel", "STANDARD")
    if model not in MODELS:
        raise invalid_argument(f"The field provisioning_model cannot be {model!r}.")
    text = str((body.get("runDuration") or {}).get("maxRunDuration", ""))
    limit = timedelta(seconds=float(text.removesuffix("s"))) if text else None
    lacks = ""
    if model == "RESERVATION_BOUND" and not body.get("reservationName"):
        lacks = "reservation_name"
    if model == "FLEX_START" and (limit is None or not timedelta(0) < limit <= LONGEST_RUN):
        lacks = "max_run_duration"
    if lacks:
        raise invalid_argument(f"{model} requires a {lacks}.")
    for spec in (known.get("tpu") or {}).get("nodeSpec", ()):
        if "multiNodeParams" in spec:
            spec["multisliceParams"] = spec.pop("multiNodeParams")
    request = cloud_tpu.QueuedResource()
    try:
        json_format.ParseDict(known, cloud_tpu.QueuedResource.pb(request))
    except json_format.ParseError as error:
        raise invalid_argument(str(error)) from error
    return request, limit


_ALPHA = ("provisioningModel", "runDuration")
