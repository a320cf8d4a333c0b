"""Workload policies and instance templates, which slices of the same configuration share: created
on first use, deleted when no group uses them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from typing import Any

from tpufleet.errors import BadRequest, ProviderBusy, ProviderError
from tpufleet.providers.compute import naming, states
from tpufleet.providers.compute.api import ComputeApi
from tpufleet.providers.compute.naming import Location

# A new one may belong to a group that is about to be created.
UNUSED_FOR = timedelta(minutes=10)
COLLECT_INTERVAL = timedelta(minutes=5)

Json = dict[str, Any]


class SharedResources:
    def __init__(self, api: ComputeApi, fleet: str) -> None:
        self._api = api
        self._prefix = naming.shared_prefix(fleet)
        self._lock = threading.Lock()
        self._ready: dict[str, datetime] = {}  # path, and when it was used last
        self._collected_at: dict[str, datetime] = {}  # by region

    def ensure(self, location: Location, path: str, body: Json, now: datetime) -> None:
        """ProviderBusy while it is being created; then the request is repeated."""
        with self._lock:
            known = path in self._ready
            self._ready[path] = now
            self._collected_at.setdefault(location.region, now)
        if known:
            return
        try:
            self._create(location, path, body)
        except ProviderError:
            with self._lock:
                self._ready.pop(path, None)
            raise

    def lacks(self, names: Collection[str]) -> bool:
        """Whether one of these missing resources is shared: someone else deleted it."""
        with self._lock:
            deleted = [path for path in self._ready if naming.short(path) in names]
            for path in deleted:
                del self._ready[path]
        return bool(deleted)

    def _create(self, location: Location, path: str, body: Json) -> None:
        existing = self._api.get(path)
        action = f"create {body['name']}"
        if existing is None:
            collection = path.rpartition("/")[0]
            operation = self._api.insert(collection, body, naming.new_request_id())
            if operation is not None and not self._api.wait(operation, location, action):
                raise ProviderBusy(f"{action}: in progress")
            return
        wanted, found = body.get("workloadPolicy"), existing.get("workloadPolicy") or {}
        if wanted and found.get("acceleratorTopology") != wanted["acceleratorTopology"]:
            raise BadRequest(
                f"the workload policy {body['name']} in {location.region} has the topology "
                f"{found.get('acceleratorTopology')}; delete it"
            )
        if existing.get("status") == "DELETING":
            raise ProviderBusy(f"{action}: an older one is being deleted")

    def collect(
        self, location: Location, used: Mapping[str, Collection[str]], now: datetime
    ) -> None:
        """Delete those of a region that are unused. `used`: names by kind, of all its zones."""
        with self._lock:
            last = self._collected_at.get(location.region)
            if last is not None and now - last < COLLECT_INTERVAL:
                return
            self._collected_at[location.region] = now
        found = {
            "templates": [(location.template, each) for each in self._api.templates(location)],
            "policies": [(location.policy, each) for each in self._api.policies(location)],
        }
        for kind, items in found.items():
            for path_of, body in items:
                name = body["name"]
                if name.startswith(self._prefix) and name not in used[kind]:
                    self._delete_unused(path_of(name), body, now)

    def _delete_unused(self, path: str, body: Json, now: datetime) -> None:
        with self._lock:
            made = states.moment(body.get("creationTimestamp"), now)
            if now - max(made, self._ready.get(path, made)) < UNUSED_FOR:
                return
            self._ready.pop(path, None)
        with contextlib.suppress(ProviderBusy, BadRequest):  # in use after all: it stays
            self._api.delete(path)
