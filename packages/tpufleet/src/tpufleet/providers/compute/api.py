"""Compute Engine calls: short deadlines, no waiting for operations, errors translated.

REST through google-auth and requests: google-cloud-compute takes 6.6 s of CPU and 118 MB to import,
these two 0.5 s and 35 MB. Docs: cloud.google.com/compute/docs/reference/rest/v1
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tpufleet.errors import ProviderError, ProviderUnavailable
from tpufleet.providers.compute import error_mapping, naming
from tpufleet.providers.compute.naming import Location
from tpufleet.providers.tpu_vm.google_rest import Answer, GoogleRest

Json = dict[str, Any]

PAGE_SIZE = "500"
# An instance carries its metadata, startup script included: 20 kB that no listing needs.
INSTANCE_FIELDS = (
    "items(name,status,labels,creationTimestamp,scheduling/provisioningModel,"
    "resourceStatus(scheduling,upcomingMaintenance)),nextPageToken,warning(code)"
)
PARALLEL_READS = 16
MAX_HOSTS_READ = 64  # of one slice, for its bootstrap reports


class ComputeApi:
    def __init__(self, rest: GoogleRest, project: str) -> None:
        self._rest = rest
        self._project = project

    # Reading.
    def groups(self, location: Location) -> list[Json]:
        path = f"{location.zone_path}/instanceGroupManagers"
        return self._list(path, f"list groups in {location.zone}")

    def instances(self, location: Location, value: str, label: str = naming.FLEET) -> list[Json]:
        """Of a fleet, or with this value of another label."""
        return self._list(
            f"{location.zone_path}/instances",
            f"list instances in {location.zone}",
            filter=f"labels.{label}={value}",
            fields=INSTANCE_FIELDS,
        )

    def templates(self, location: Location) -> list[Json]:
        path = f"{location.region_path}/instanceTemplates"
        return self._list(path, f"list instance templates in {location.region}")

    def policies(self, location: Location) -> list[Json]:
        path = f"{location.region_path}/resourcePolicies"
        return self._list(path, f"list resource policies in {location.region}")

    def get(self, path: str) -> Json | None:
        """None if it does not exist."""
        answer = self._rest.get("compute", f"compute/v1/{path}")
        return None if answer.missing else self._checked(answer, f"get {naming.short(path)}")

    def managed(self, group: str) -> list[Json]:
        """The VMs of a group. It may have pages, as the group's author chose."""
        found: list[Json] = []
        query: dict[str, str] = {}
        while True:
            path = f"compute/v1/{group}/listManagedInstances"
            answer = self._rest.post("compute", path, None, **query)
            if answer.missing:
                return []
            body = self._checked(answer, f"list the VMs of {naming.short(group)}")
            found += body.get("managedInstances", ())
            if not body.get("nextPageToken"):
                return found
            query = {"pageToken": body["nextPageToken"]}

    def managed_errors(self, group: str) -> list[Json]:
        """What the last attempts to create the VMs of a group ended with."""
        attempts = [vm.get("lastAttempt") or {} for vm in self.managed(group)]
        return [
            error
            for attempt in attempts
            for error in (attempt.get("errors") or {}).get("errors", ())
        ]

    def past_errors(self, group: str) -> list[Json]:
        """Since the group was made, latest first."""
        items = self._list(f"{group}/listErrors", f"list the errors of {naming.short(group)}")
        items.sort(key=lambda item: str(item.get("timestamp", "")), reverse=True)
        return [item["error"] for item in items if item.get("error")]

    def guest_attributes(self, name: str, query_path: str) -> list[str]:
        """The values below a path, of the instances whose paths `name` lists."""
        paths = name.split(",")[:MAX_HOSTS_READ]
        if len(paths) == 1:
            return self._guest_attributes(paths[0], query_path)
        with ThreadPoolExecutor(min(len(paths), PARALLEL_READS)) as pool:
            answers = pool.map(lambda path: self._guest_attributes(path, query_path), paths)
            return [value for answer in answers for value in answer]

    def _guest_attributes(self, instance: str, query_path: str) -> list[str]:
        answer = self._rest.get(
            "compute", f"compute/v1/{instance}/getGuestAttributes", queryPath=f"{query_path}"
        )
        if answer.missing:
            return []
        body = self._checked(answer, f"get guest attributes of {naming.short(instance)}")
        return [str(item["value"]) for item in (body.get("queryValue") or {}).get("items", ())]

    # Writing.
    def insert(self, collection: str, body: Json, request_id: str) -> Json | None:
        """The operation; None if the name exists."""
        answer = self._rest.post("compute", f"compute/v1/{collection}", body, requestId=request_id)
        exists = answer.status == 409 and "alreadyExists" in error_mapping.reasons(answer.body)
        return None if exists else self._checked(answer, f"create {body['name']}")

    def update(self, method: str, body: Json | None = None) -> Json | None:
        """Of an instance: the operation; None if it does not exist."""
        request_id = naming.new_request_id()
        answer = self._rest.post("compute", f"compute/v1/{method}", body, requestId=request_id)
        instance, verb = method.split("/")[-2:]
        return None if answer.missing else self._checked(answer, f"{verb} of {instance}")

    def delete(self, path: str) -> Json | None:
        """The operation; None if it does not exist."""
        request_id = naming.new_request_id()
        answer = self._rest.delete("compute", f"compute/v1/{path}", requestId=request_id)
        return None if answer.missing else self._checked(answer, f"delete {naming.short(path)}")

    def wait(self, operation: Json, location: Location, action: str) -> bool:
        """Waits for the answer to one call at most: whether it is done. Raises its error. Google
        answers within two minutes, which may be later than our own deadline
        (cloud.google.com/compute/docs/reference/rest/v1/zoneOperations/wait)."""
        name, scope = operation.get("name", ""), location.zone_path
        if operation.get("region"):
            scope = location.region_path
        if operation.get("status") != "DONE":
            path = f"compute/v1/{scope}/operations/{name}/wait"
            try:
                operation = self._checked(self._rest.post("compute", path), action)
            except ProviderUnavailable:
                return False
        error = self.operation_error(operation, action)
        if error is not None:
            raise error
        return operation.get("status") == "DONE"

    def operation_error(self, operation: Json, action: str) -> ProviderError | None:
        errors = (operation.get("error") or {}).get("errors", ())
        return error_mapping.of_errors(errors, action)

    def _list(self, path: str, action: str, **query: str) -> list[Json]:
        """An incomplete listing is an error: slices missing from it would be treated as lost."""
        items: list[Json] = []
        query["maxResults"] = PAGE_SIZE
        for answer in self._rest.pages("compute", f"compute/v1/{path}", **query):
            body = self._checked(answer, action)
            if (body.get("warning") or {}).get("code") == "UNREACHABLE":
                raise ProviderUnavailable(f"{action}: incomplete")
            items += body.get("items", ())
        return items

    def _checked(self, answer: Answer, action: str) -> Json:
        if answer.status >= 400:
            raise error_mapping.of_answer(answer, action, self._project)
        return answer.body
