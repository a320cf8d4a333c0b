"""Operations of the emulated Compute Engine: PENDING, RUNNING, DONE, with an error or without."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from tpufleet_testbed.compute_engine.api_errors import ErrorBody

ROOT = "https://www.googleapis.com/compute/v1"
_STATUS_OF_CODE = {"QUOTA": (403, "FORBIDDEN"), "EXHAUSTED": (503, "SERVICE UNAVAILABLE")}


def timestamp(at: datetime) -> str:
    """RFC 3339, with milliseconds."""
    return at.isoformat(timespec="milliseconds")


@dataclass(slots=True)
class Operations:
    now: Callable[[], datetime]
    changed: threading.Condition
    _known: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)  # by scope, name
    _doomed: dict[str, Sequence[ErrorBody]] = field(default_factory=dict)  # by name
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def begin(
        self,
        project: str,
        scope: str,
        kind: str,
        target: str,
        target_id: int,
        *,
        pending: bool = True,
    ) -> dict[str, Any]:
        """`scope` is global, zones/Z or regions/R; `target` a link from the scope on."""
        number, at = next(self._numbers), timestamp(self.now())
        name = f"operation-{int(self.now().timestamp() * 1000)}-{number:013x}"
        link = f"{ROOT}/projects/{project}/{scope}"
        operation: dict[str, Any] = {
            "kind": "compute#operation", "id": str(10**18 + number), "name": name,
            "operationType": kind, "targetLink": f"{link}/{target}", "targetId": str(target_id),
            "status": "PENDING" if pending else "RUNNING", "progress": 0, "user": "you@example.com",
            "insertTime": at, "selfLink": f"{link}/operations/{name}",
        }  # fmt: skip
        if not pending:
            operation["startTime"] = at
        if scope != "global":
            field_name = "zone" if scope.startswith("zones/") else "region"
            operation[field_name] = link
        self._known[scope, name] = operation
        return operation

    def run(self, operation: dict[str, Any]) -> None:
        if operation["status"] == "PENDING":
            operation |= {"status": "RUNNING", "startTime": timestamp(self.now())}

    def finish(self, operation: dict[str, Any] | None, errors: Sequence[ErrorBody] = ()) -> None:
        """No-op if it is DONE already."""
        if operation is None or operation["status"] == "DONE":
            return
        self.run(operation)
        errors = self._doomed.pop(operation["name"], errors)
        operation |= {"status": "DONE", "progress": 100, "endTime": timestamp(self.now())}
        if errors:
            operation["error"] = {"errors": list(errors)}
            code = str(errors[0]["code"])
            status, text = next(
                (each for part, each in _STATUS_OF_CODE.items() if part in code),
                (400, "BAD REQUEST"),
            )
            operation |= {"httpErrorStatusCode": status, "httpErrorMessage": text}
        self.changed.notify_all()

    def doom(self, operation: dict[str, Any], errors: Sequence[ErrorBody]) -> None:
        """It will fail with these, whatever becomes of what it does."""
        self._doomed[operation["name"]] = errors

    def get(self, scope: str, name: str) -> dict[str, Any] | None:
        return self._known.get((scope, name))

    def inside(self, scope: str = "") -> list[tuple[str, dict[str, Any]]]:
        return [
            (where, operation) for (where, _), operation in self._known.items()
            if scope in ("", where)
        ]  # fmt: skip

    def remove(self, scope: str, name: str) -> None:
        del self._known[scope, name]
