"""The REST API of the emulated Compute Engine: routes, request ids, faults of calls, pages.

What has no TPUs (other VMs, addresses, disks, firewall rules) is in `plain_resources`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from tpufleet.clocks import SystemClock
from tpufleet_testbed.compute_engine import (
    admin,
    api_errors,
    catalog,
    catalog_routes,
    listings,
    metadata,
    validation,
    views,
)
from tpufleet_testbed.compute_engine.api_errors import (
    RestError,
    call_error,
    invalid,
    invalid_field,
    required,
)
from tpufleet_testbed.compute_engine.calls import Body, Call, parse_call
from tpufleet_testbed.compute_engine.capacity import Want
from tpufleet_testbed.compute_engine.engine import ComputeEngine
from tpufleet_testbed.compute_engine.fault_plan import ComputeCallFault
from tpufleet_testbed.compute_engine.operations import timestamp
from tpufleet_testbed.compute_engine.plain_resources import SCOPES, PlainResources
from tpufleet_testbed.compute_engine.records import Group, Vm
from tpufleet_testbed.faults import CallFaults

Reply = tuple[int, dict[str, Any]]

HANG_SECONDS = 60.0  # a call with the fault `hang` fails after this
WAIT_SECONDS = 120.0  # operations.wait
SINGULAR = {"resourcePolicies": "resourcePolicy"}
# Verbs whose permission is not that of an update.
_PERMISSIONS = {
    "insert": "create", "aggregatedList": "list", "patch": "update", "listManagedInstances": "get",
    "listErrors": "get", "getFromFamily": "useReadOnly", "wait": "get",
    "getGuestAttributes": "getGuestAttributes", "setMetadata": "setMetadata",
    "setLabels": "setLabels",
}  # fmt: skip


Handler = Callable[[Call], Body | None]


@dataclass(slots=True)
class Stored:
    """A policy or a template. `ready`: the operation that creates it is DONE."""

    body: Body
    number: int
    ready: bool = False
    deleting: bool = False


@dataclass(slots=True)
class ComputeRest:
    engine: ComputeEngine
    others: PlainResources
    is_denied: Callable[[str], bool] = lambda permission: False
    missing: Iterable[str] = ()  # last parts of names of networks and images that do not exist
    stored: dict[tuple[str, str, str], Stored] = field(default_factory=dict)  # scope, kind, name
    calls: list[tuple[str, str]] = field(default_factory=list)  # method and place, in order
    requests: list[tuple[str, str, Body]] = field(default_factory=list)  # method, path, body
    closing: threading.Event = field(default_factory=threading.Event)
    _answered: dict[tuple[str, str, str], Body] = field(default_factory=dict)  # by request id
    _listed: dict[str, Body] = field(default_factory=dict)
    # In this minute: by region, and whether they read.
    _counted: tuple[datetime, Counter[tuple[str, bool]]] = field(
        default_factory=lambda: (datetime.min, Counter())
    )
    _faults: CallFaults = field(init=False)
    _handlers: dict[str, Handler] = field(init=False)
    _plain: dict[str, Callable[[Call], Body]] = field(init=False)  # where a handler gives None

    def __post_init__(self) -> None:
        self._faults = CallFaults(self.engine.plan)
        groups = ("instanceGroupManagers", self._groups())
        self._plain = self.others.routes()
        self._handlers = {
            **self._plain,
            **{f"{kind}.list": lambda call: self._page(call, []) for kind in SCOPES},
            **{
                f"{kind}.aggregatedList": lambda call: self._aggregated(call, [])
                for kind in (*SCOPES, "forwardingRules", "subnetworks")
            },
            **{f"{groups[0]}.{verb}": handler for verb, handler in groups[1].items()},
            **{f"instances.{verb}": handler for verb, handler in self._instances().items()},
            **{f"operations.{verb}": handler for verb, handler in self._operations().items()},
            **self._stored_routes(),
            **self._reservation_routes(),
            **catalog_routes.routes(self._page, self.others.machine_types, self.missing),
        }

    def answer(self, method: str, path: str, query: Mapping[str, str], body: Body) -> Reply | None:
        """None: not a path of this API."""
        if path.startswith(admin.PREFIX):
            return self._safely(lambda: admin.answer(self.engine, path, body))
        call = parse_call(method, path, query, body)
        handler = self._handlers.get(call.method) if call is not None else None
        if call is None or handler is None:
            return None
        return self._safely(lambda: self._answer(call, handler, path))

    def _safely(self, act: Callable[[], Body | None]) -> Reply | None:
        try:
            found = act()
        except RestError as error:
            return error.status, error.body()
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            return 400, invalid(f"Invalid JSON payload received. {error}").body()
        return None if found is None else (200, found)

    def _answer(self, call: Call, handler: Handler, path: str) -> Body | None:
        with self.engine.lock:
            now = self.engine.run_due()
            self.calls.append((call.method, call.place))
            self.requests.append((call.method, path, call.body))
            self._count(call, now)
            fault = self._faults.match(call.method, call.place, now - self.engine.started_at)
            self._refuse(call, fault)
        if fault is not None and fault.error == "hang":
            self.closing.wait(HANG_SECONDS)
            raise call_error("unavailable")
        with self.engine.lock:
            identity = self._identity(call)
            if identity in self._answered:
                return dict(self._answered[identity])
            found = self._inconsistent(call, handler, fault)
            if found is None:
                return None
            if identity[0]:
                self._answered[identity] = found
            if fault is not None and fault.late and fault.error in api_errors.OPERATIONS:
                self._fail_late(call, found, fault)
            self.engine.run_due()
            answer = dict(found)
            if selector := call.query.get("fields", ""):
                answer = listings.partial(answer, selector)
        while self.others.started:  # without the lock: what boots may call the API
            self.others.boot(self.others.started.pop())
        if fault is not None and fault.error == "lost-answer":
            raise call_error("unavailable")
        return answer

    def _count(self, call: Call, now: datetime) -> None:
        """Against the rate quota of the project, which is full again when a minute begins."""
        most = self.engine.plan.calls_per_minute
        minute = now.replace(second=0, microsecond=0)
        if self._counted[0] != minute:
            self._counted = (minute, Counter())
        region = catalog.region_of(call.place) if call.scope.startswith("zones/") else call.place
        verb = call.method.rpartition(".")[2]
        group = (region, verb.startswith(("get", "list", "aggregated", "wait")))
        self._counted[1][group] += 1
        if most is not None and self._counted[1][group] > most:
            raise call_error("rate")

    def _refuse(self, call: Call, fault: ComputeCallFault | None) -> None:
        verb = call.method.rpartition(".")[2]
        permission = f"compute.{call.kind or 'projects'}.{_PERMISSIONS.get(verb, verb)}"
        target = call.target()
        if self.others.state.denied or self.is_denied(permission):
            raise call_error("forbidden", permission=permission, target=target)
        if fault is not None and not fault.late and fault.error in api_errors.CALLS:
            raise call_error(
                fault.error, permission=permission, target=target, project=call.project,
                kind=call.kind, zone=call.place,
            )  # fmt: skip

    def _identity(self, call: Call) -> tuple[str, str, str]:
        text = call.query.get("requestId", "")
        target = f"{call.scope}/{call.kind}/{call.name or call.body.get('name', '')}"
        return (validation.request_id(text) if text else "", call.method, target)

    def _inconsistent(
        self, call: Call, handler: Handler, fault: ComputeCallFault | None
    ) -> Body | None:
        """The answer; of a listing perhaps an old one, or one that lacks everything."""
        listing = f"{call.method} {call.scope} {sorted(call.query.items())}"
        error = fault.error if fault is not None else ""
        if error == "stale" and listing in self._listed:
            return self._listed[listing]
        found = handler(call)
        if found is None and call.method in self._plain:
            found = self._plain[call.method](call)
        if error == "omitted" and found is not None:
            listed = "managedInstances" if "managedInstances" in found else "items"
            return {**found, listed: {} if isinstance(found.get(listed), dict) else []}
        if error == "unreachable" and call.method.endswith(".list"):
            warning = {"code": "UNREACHABLE", "message": f"{call.kind} are not reachable."}
            return {**(found or {}), "items": [], "warning": warning}
        if error == "unreachable" and isinstance((found or {}).get("items"), dict):
            warning = {"code": "UNREACHABLE", "message": f"{call.kind} are not reachable."}
            items = {scope: {"warning": warning} for scope in (found or {})["items"]}
            return {**(found or {}), "items": items}
        if found is not None and call.method.endswith(("list", "List")):
            self._listed[listing] = found
        return found

    def _fail_late(self, call: Call, operation: Body, fault: ComputeCallFault) -> None:
        """The call is accepted, and what it began is undone when its operation fails."""
        region = catalog.region_of(call.place) if call.scope.startswith("zones/") else call.place
        error = api_errors.operation_error(
            fault.error, project=call.project, zone=call.place, region=region,
            name=call.body.get("name", call.name), reservation="r", limit="0.0",
            metric_upper="TPUS_PER_TPU_FAMILY",
        )  # fmt: skip
        name = str(call.body.get("name", ""))
        self.engine.operations.doom(operation, [error])
        if call.method == "instances.insert":
            vm = self.engine.vms[call.place, name]
            vm.operation = None
            vm.generation += 1
            del self.engine.vms[call.place, name]
        elif call.method == "instanceGroupManagers.insert":
            group = self.engine.groups.pop((call.scope, name))
            group.generation += 1
            for member in list(group.members.values()):
                member.action, member.generation = "DELETING", member.generation + 1
                if member.vm is not None:  # without bulk mode
                    self.engine.vanish(member.vm, self.engine.clock.now())
        elif call.method.endswith(".insert"):
            self.stored.pop((call.scope, call.kind, name), None)
        now = self.engine.clock.now()
        self.engine.after(
            now, "stockout", name, lambda at: self.engine.operations.finish(operation)
        )

    # Policies and templates
    def _stored_routes(self) -> dict[str, Handler]:
        routes: dict[str, Handler] = {}
        for kind in ("resourcePolicies", "instanceTemplates"):
            routes |= {
                f"{kind}.insert": self._store,
                f"{kind}.get": lambda call: self._shown(call, self._stored(call)),
                f"{kind}.list": self._list_stored,
                f"{kind}.aggregatedList": self._list_all_stored,
                f"{kind}.delete": self._unstore,
            }
        return routes

    def _store(self, call: Call) -> Body:
        name = validation.name_of(call.body)
        self._check_scope(call)
        if call.kind == "resourcePolicies":
            body = validation.workload_policy(call.body, self.engine.switches)
        else:
            body = call.body
            validation.template(body, call.scope, self.engine.switches)
            self._check_networks(body["properties"])
        key = (call.scope, call.kind, name)
        if key in self.stored:
            raise call_error("exists", target=call.target(name))
        now = self.engine.clock.now()
        created = Stored(
            body={**body, "creationTimestamp": timestamp(now)}, number=self.engine.number()
        )
        self.stored[key] = created
        ready = partial(setattr, created, "ready", True)
        return self._done_later(call, "insert", name, created.number, ready)

    def _check_scope(self, call: Call) -> None:
        if call.scope.startswith("regions/") and call.place not in catalog.regions():
            raise invalid_field("region", call.place, "Unknown region.")
        if call.scope.startswith("zones/") and call.place not in catalog.zones():
            raise invalid_field("zone", call.place, "Unknown zone.")

    def _stored(self, call: Call) -> Stored:
        return self.find(call.project, call.scope, call.kind, call.name)

    def find(self, project: str, scope: str, kind: str, name: str) -> Stored:
        found = self.stored.get((scope, kind, name))
        if found is None or not found.ready:
            raise validation.missing(project, scope, kind, name)
        return found

    def _shown(self, call: Call, found: Stored) -> Body:
        return self._stored_view(call.project, call.scope, call.kind, found)

    def _stored_view(self, project: str, scope: str, kind: str, found: Stored) -> Body:
        name = found.body["name"]
        shown = {
            "kind": f"compute#{SINGULAR.get(kind, kind.removesuffix('s'))}",
            **found.body,
            "id": str(found.number),
            "selfLink": views.link(project, f"{scope}/{kind}/{name}"),
        }
        if scope.startswith("regions/"):
            shown["region"] = views.link(project, scope)
        if kind == "resourcePolicies":
            shown["status"] = "READY"
        return shown

    def _list_stored(self, call: Call) -> Body:
        return self._page(call, [
            self._stored_view(call.project, scope, kind, found)
            for (scope, kind, _), found in self.stored.items()
            if (scope, kind) == (call.scope, call.kind) and found.ready
        ])  # fmt: skip

    def _list_all_stored(self, call: Call) -> Body:
        return self._aggregated(call, [
            (scope, self._stored_view(call.project, scope, kind, found))
            for (scope, kind, _), found in self.stored.items()
            if kind == call.kind and found.ready
        ])  # fmt: skip

    def _unstore(self, call: Call) -> Body:
        found = self._stored(call)
        where = (call.scope, call.name)
        for group in self.engine.groups.values():
            if where in (group.template, group.policy):
                raise call_error(
                    "in-use", kind=SINGULAR.get(call.kind, "instance_template"),
                    target=views.link(call.project, f"{call.scope}/{call.kind}/{call.name}"),
                    user=views.link(
                        group.project, f"{group.scope}/instanceGroupManagers/{group.name}"
                    ),
                )  # fmt: skip
        if found.deleting:
            raise call_error("not-ready", target=call.target())
        found.deleting = True
        forget = lambda: self.stored.pop((call.scope, call.kind, call.name), None)
        return self._done_later(call, "delete", call.name, found.number, forget)

    def _check_networks(self, properties: Mapping[str, Any]) -> None:
        for interface in properties.get("networkInterfaces", ()):
            for kind in ("network", "subnetwork"):
                url = str(interface.get(kind, ""))
                if url and url.rpartition("/")[2] in self.missing:
                    raise invalid_field(
                        f"resource.properties.networkInterfaces[0].{kind}", url,
                        "The referenced resource does not exist.",
                    )  # fmt: skip
        for disk in properties.get("disks", ()):
            image = str(disk.get("initializeParams", {}).get("sourceImage", ""))
            if image:
                catalog_routes.check_image(image, self.missing)

    # Groups
    def _groups(self) -> dict[str, Handler]:
        engine = self.engine
        found = lambda call: engine.group(call.project, call.scope, call.name)
        return {
            "insert": self._insert_group,
            "get": lambda call: self._group_view(found(call)),
            "list": lambda call: self._page(call, [
                self._group_view(group) for (scope, _), group in engine.groups.items()
                if scope == call.scope
            ]),
            "aggregatedList": lambda call: self._aggregated(call, [
                (scope, self._group_view(group)) for (scope, _), group in engine.groups.items()
            ]),
            "delete": lambda call: engine.delete_group(found(call), engine.clock.now()),
            "resize": self._resize,
            "patch": self._patch_group,
            "listManagedInstances": self._list_managed,
            "listErrors": self._list_errors,
            "deleteInstances": self._delete_members,
            "recreateInstances": self._recreate_members,
            "resizeRequests": self._refuse_resize_request,
        }  # fmt: skip

    def _group_view(self, group: Group) -> Body:
        stable = views.is_stable(group, after_loss=self.engine.switches.stable_after_loss)
        return views.group(group, stable=stable)

    def _insert_group(self, call: Call) -> Body | None:
        body, switches = call.body, self.engine.switches
        self._check_scope(call)
        validation.group_fields(body)
        versions = body.get("versions") or [{}]
        url = body.get("instanceTemplate") or versions[0].get("instanceTemplate", "")
        if not url:
            raise required("resource.instanceTemplate")
        region = call.place if call.scope.startswith("regions/") else catalog.region_of(call.place)
        template = validation.reference("resource.instanceTemplate", url, "instanceTemplates")
        if template[0] not in ("global", f"regions/{region}"):
            raise invalid_field("resource.instanceTemplate", url, f"Not in region {region}.")
        stored = self.find(call.project, template[0], "instanceTemplates", template[1]).body
        properties = _configured(stored["properties"], body.get("allInstancesConfig") or {})
        policy, fields = self._policy_of(call, region)
        regional = call.scope.startswith("regions/")
        machine = catalog.machines().get(properties["machineType"])
        validation.group({**body, "_regional": regional}, machine, properties, fields, switches)
        if (call.scope, body["name"]) in self.engine.groups:
            raise call_error("exists", target=call.target(body["name"]))
        if machine is None:
            return None  # of another machine type
        bulk = (body.get("targetSizePolicy") or {}).get("mode") == "BULK"
        return self.engine.create_group(
            Group(
                name=body["name"], project=call.project, scope=call.scope,
                zones=self._zones_of(call, region), number=self.engine.number(), body=body,
                template=template, properties=properties, machine=machine,
                model=validation.model_of(properties), target_size=int(body["targetSize"]),
                bulk=bulk, created_at=self.engine.clock.now(), policy=policy,
                topology=(fields or {}).get("acceleratorTopology", ""),
            )
        )  # fmt: skip

    def _policy_of(
        self, call: Call, region: str
    ) -> tuple[tuple[str, str] | None, Mapping[str, Any] | None]:
        url = (call.body.get("resourcePolicies") or {}).get("workloadPolicy", "")
        if not url:
            return None, None
        name = "resource.resourcePolicies.workloadPolicy"
        scope, policy = validation.reference(name, url, "resourcePolicies")
        if scope != f"regions/{region}":
            raise invalid_field(name, url, f"Not in region {region}.")
        stored = self.find(call.project, scope, "resourcePolicies", policy)
        return (scope, policy), stored.body["workloadPolicy"]

    def _zones_of(self, call: Call, region: str) -> tuple[str, ...]:
        if call.scope.startswith("zones/"):
            return (call.place,)
        chosen = (call.body.get("distributionPolicy") or {}).get("zones") or []
        names = tuple(str(each.get("zone", "")).rpartition("/")[2] for each in chosen)
        inside = tuple(zone for zone in catalog.zones() if catalog.region_of(zone) == region)
        # An AI zone is used only when it is named.
        return names or tuple(zone for zone in inside if "-ai" not in zone)

    def _resize(self, call: Call) -> Body:
        group = self.engine.group(call.project, call.scope, call.name)
        wanted, present = call.number("size"), group.target_size
        validation.size(wanted, "size")
        if group.deletion is not None:
            raise call_error("not-ready", target=group.name)
        if group.bulk and wanted != present:
            if wanted > present and present > 0:
                raise invalid("Instances can be added to a MIG in BULK mode only if its size is 0.")
            if 0 < wanted < present and group.in_progress:
                raise invalid(
                    "A MIG in BULK mode cannot be reduced to a size other than 0 while a bulk "
                    "operation is in progress."
                )
            if wanted and not self.engine.switches.resize_again and group.version:
                raise invalid("The size of a MIG with an accelerator topology cannot be changed.")
        return self.engine.resize(group, wanted, self.engine.clock.now())

    def _patch_group(self, call: Call) -> Body:
        group, body = self.engine.group(call.project, call.scope, call.name), call.body
        stated = body.get("fingerprint")
        if stated is not None and stated != views.fingerprint(group):
            raise call_error("stale-fingerprint")
        mode = (body.get("targetSizePolicy") or {}).get("mode")
        if mode is not None and (mode == "BULK") is not group.bulk:
            raise invalid_field(
                "resource.targetSizePolicy.mode", mode, "The mode of a MIG cannot be changed."
            )
        changed = {
            key: value for key, value in body.items()
            if key in ("instanceLifecyclePolicy", "updatePolicy", "description",
                       "listManagedInstancesResults", "allInstancesConfig")
        }  # fmt: skip
        lifecycle = changed.get("instanceLifecyclePolicy", {})
        if (
            group.bulk
            and group.model == "FLEX_START"
            and (lifecycle.get("defaultActionOnFailure", "DO_NOTHING") != "DO_NOTHING")
        ):
            raise invalid("Repairs must be disabled for MIGs with FLEX_START instances.")
        group.body = {**group.body, **changed}
        group.version += 1
        if "targetSize" in body:
            return self._resize(replace(call, query={"size": str(body["targetSize"])}))
        return self.engine.noted(group, "patch")

    def _list_managed(self, call: Call) -> Body:
        group = self.engine.group(call.project, call.scope, call.name)
        items = [views.managed_instance(group, member) for member in group.members.values()]
        items = listings.matching(items, call.query.get("filter", ""))
        if group.body.get("listManagedInstancesResults") != "PAGINATED":
            found, token = sorted(items, key=lambda item: item["name"]), ""
        else:
            found, token = listings.page(items, call.query, self.engine.switches.page_size)
        return {"managedInstances": found, **({"nextPageToken": token} if token else {})}

    def _list_errors(self, call: Call) -> Body:
        if call.query.get("filter") or call.query.get("orderBy"):
            raise invalid_field("filter", call.query.get("filter"), "Not supported.")
        group = self.engine.group(call.project, call.scope, call.name)
        newest = [
            {**error, "name": f"{index:08d}"} for index, error in enumerate(reversed(group.errors))
        ]
        found, token = listings.page(newest, call.query, self.engine.switches.page_size)
        items = [{key: each[key] for key in each if key != "name"} for each in found]
        return {"items": items, **({"nextPageToken": token} if token else {})}

    def _members(self, call: Call, group: Group) -> list[str]:
        urls = call.body.get("instances") or []
        if not urls or len(urls) > catalog.LIMITS["group_vms"]:
            raise required("instances") if not urls else invalid_field("instances", len(urls))
        names = [str(url).rpartition("/")[2] for url in urls]
        for name in names:
            if name not in group.members:
                raise invalid_field("instances", name, "Not a member of this MIG.")
        return names

    def _delete_members(self, call: Call) -> Body:
        group = self.engine.group(call.project, call.scope, call.name)
        names = self._members(call, group)
        if group.bulk and group.in_progress and len(names) < len(group.members):
            raise invalid("Instances cannot be deleted while a bulk operation is in progress.")
        group.target_size -= len(names)
        group.version += 1
        self.engine.delete_members(group, names, self.engine.clock.now())
        return self.engine.noted(group, "deleteInstances")

    def _recreate_members(self, call: Call) -> Body:
        group = self.engine.group(call.project, call.scope, call.name)
        self.engine.recreate_members(group, self._members(call, group), self.engine.clock.now())
        return self.engine.noted(group, "recreateInstances")

    def _refuse_resize_request(self, call: Call) -> Body:
        self.engine.group(call.project, call.scope, call.name)
        raise invalid("Creating resize requests for managed instance group with TPU is not allowed")

    # Instances
    def _instances(self) -> dict[str, Handler]:
        engine = self.engine

        def of(act: Callable[[Call, Vm], Body]) -> Handler:
            """None for one without TPUs."""
            return lambda call: act(call, vm) if (vm := self._vm(call)) else None

        return {
            "insert": self._insert_vm,
            "get": of(lambda call, vm: views.instance(vm)),
            "list": lambda call: self._page(call, [
                views.instance(vm) for vm in engine.vms.values() if vm.zone == call.place
            ]),
            "aggregatedList": lambda call: self._aggregated(call, [
                (f"zones/{vm.zone}", views.instance(vm)) for vm in engine.vms.values()
            ]),
            "delete": of(lambda call, vm: engine.delete_vm(vm, engine.clock.now())),
            "performMaintenance": of(self._perform_maintenance),
            "simulateMaintenanceEvent": of(self._simulate_maintenance),
            "reportHostAsFaulty": of(self._report_faulty),
            "stop": of(self._stop_vm),
            "start": of(self._start_vm),
            "reset": of(self._reset_vm),
            "setLabels": of(self._set_labels),
            "setMetadata": of(self._set_metadata),
            "setScheduling": of(self._set_scheduling),
            "getGuestAttributes": of(self._guest_attributes),
            "bulkInsert": self._refuse_bulk_insert,
        }  # fmt: skip

    def _vm(self, call: Call) -> Vm | None:
        if self.others.has(call):
            return None
        return self.engine.vm(call.project, call.place, call.name)

    def _insert_vm(self, call: Call) -> Body | None:
        body = call.body
        name = str(body.get("name", ""))
        url = str(body.get("machineType", ""))
        if url.rpartition("/")[2] not in catalog.machines():
            return None
        validation.name_of(body)
        self._check_scope(call)
        machine = validation.machine_of(url, call.place, "resource.machineType")
        assert machine is not None
        if machine.generation.refused:
            raise invalid(
                f"This user agent is not allowed to use the machine type [{machine.name}]"
            )
        if policies := body.get("resourcePolicies"):
            scope, policy = validation.reference(
                "resource.resourcePolicies", str(policies[0]), "resourcePolicies"
            )
            self.find(call.project, scope, "resourcePolicies", policy)
            raise invalid(
                "Resource policy must have one of [VmMaintenancePolicy, GroupPlacementPolicy, "
                "InstanceSchedulePolicy]"
            )
        validation.vm_properties(body, "resource", machine)
        validation.scheduling(body, "resource.scheduling")
        self._check_networks(body)
        if (call.place, name) in self.engine.vms or self.others.has(call, name):
            raise call_error("exists", target=call.target(name))
        limit = ((body.get("params") or {}).get("requestValidForDuration") or {}).get("seconds")
        if limit is not None and not 0 <= int(limit) <= catalog.LIMITS["request_valid_for"]:
            raise invalid_field("resource.params.requestValidForDuration", f"{limit}s")
        want = Want(
            project=call.project, zone=call.place, machine=machine,
            model=validation.model_of(body), count=1, properties=body,
        )  # fmt: skip
        valid_for = None if limit is None else timedelta(seconds=int(limit))
        return self.engine.create_vm(want, name, valid_for)

    def _refuse_bulk_insert(self, call: Call) -> Body | None:
        properties = call.body.get("instanceProperties") or {}
        if properties.get("machineType", "") not in catalog.machines():
            return None
        raise invalid("Bulk insert of instances with TPUs is not supported.")

    def _perform_maintenance(self, call: Call, vm: Vm) -> Body:
        window = vm.maintenance
        if window is None or window.ongoing or not window.can_reschedule:
            raise invalid(f"No maintenance of {vm.name} can be started.")
        self.engine.begin_maintenance(vm, self.engine.clock.now())
        return self.engine.noted_vm(vm, "performMaintenance")

    def _simulate_maintenance(self, call: Call, vm: Vm) -> Body:
        if vm.status != "RUNNING":
            raise call_error("not-ready", target=vm.name)
        self.engine.announce_maintenance(vm, timedelta(0), scheduled=False)
        self.engine.run_due()
        return self.engine.noted_vm(vm, "simulateMaintenanceEvent")

    def _report_faulty(self, call: Call, vm: Vm) -> Body:
        if not call.body.get("faultReasons"):
            raise required("faultReasons")
        self.engine.host_error(vm, self.engine.clock.now())
        return self.engine.noted_vm(vm, "reportHostAsFaulty")

    def _stop_vm(self, call: Call, vm: Vm) -> Body:
        if vm.model == "FLEX_START":
            raise invalid("Flex-start VMs cannot be stopped; they can only be deleted.")
        self.engine.stop(vm, self.engine.clock.now(), "stopped")
        return self.engine.noted_vm(vm, "stop")

    def _start_vm(self, call: Call, vm: Vm) -> Body:
        if vm.status != "TERMINATED":
            return self.engine.noted_vm(vm, "start")
        return self.engine.start_vm(vm, self.engine.clock.now())

    def _reset_vm(self, call: Call, vm: Vm) -> Body:
        if vm.status != "RUNNING":
            raise call_error("not-ready", target=call.target())
        self.engine.hosts.boot(vm, metadata.values_of(vm))
        return self.engine.noted_vm(vm, "reset")

    def _set_labels(self, call: Call, vm: Vm) -> Body:
        if call.body.get("labelFingerprint") != f"l-{vm.number}-{vm.revision}":
            raise call_error("stale-fingerprint")
        validation.labels(call.body.get("labels") or {}, "labels")
        vm.properties = {**vm.properties, "labels": call.body.get("labels") or {}}
        vm.revision += 1
        return self.engine.noted_vm(vm, "setLabels")

    def _set_metadata(self, call: Call, vm: Vm) -> Body:
        if call.body.get("fingerprint") != f"m-{vm.number}-{vm.revision}":
            raise call_error("stale-fingerprint")
        items = call.body.get("items") or []
        vm.properties = {**vm.properties, "metadata": {"items": items}}
        vm.revision += 1
        for key, value in vm.metadata.items():
            self.engine.hosts.publish(vm, f"attributes/{key}", value)
        return self.engine.noted_vm(vm, "setMetadata")

    def _set_scheduling(self, call: Call, vm: Vm) -> Body:
        """Of a running VM the run time may be changed, of one that starts nothing."""
        if vm.status not in ("RUNNING", "TERMINATED"):
            raise call_error("not-ready", target=call.target())
        if vm.status == "RUNNING" and set(call.body) - {*vm.scheduling, "maxRunDuration"}:
            raise invalid("Scheduling can be changed of stopped instances only.")
        wanted = {**vm.properties, "scheduling": {**vm.scheduling, **call.body}}
        validation.scheduling(wanted, "scheduling")
        vm.properties = wanted
        self.engine.limit_run(vm)
        return self.engine.noted_vm(vm, "setScheduling")

    def _guest_attributes(self, call: Call, vm: Vm) -> Body:
        path = call.query.get("queryPath", "")
        found = self.engine.hosts.guest_attributes(vm, path)
        if not found:
            raise call_error("not-found", target=f"{call.target()}/guestAttributes")
        items = [
            {"namespace": space, "key": key, "value": value}
            for (space, key), value in sorted(found.items())
        ]
        return {
            "kind": "compute#guestAttributes", "queryPath": path, "queryValue": {"items": items},
        }  # fmt: skip

    # Operations
    def _operations(self) -> dict[str, Handler]:
        found = self.engine.operations
        return {
            "get": self._operation,
            "wait": self._wait,
            "list": lambda call: self._page(
                call, [operation for _, operation in found.inside(call.scope)]
            ),
            "aggregatedList": lambda call: self._aggregated(call, found.inside()),
            "delete": self._delete_operation,
        }

    def _operation(self, call: Call) -> Body:
        operation = self.engine.operations.get(call.scope, call.name)
        if operation is None:
            raise call_error("not-found", target=call.target())
        return operation

    def _wait(self, call: Call) -> Body:
        """Until it is DONE, at most two minutes; on a manual clock not at all."""
        operation = self._operation(call)
        if isinstance(self.engine.clock, SystemClock):
            deadline = self.engine.clock.uptime() + timedelta(seconds=WAIT_SECONDS)
            while operation["status"] != "DONE":
                if self.closing.is_set() or self.engine.clock.uptime() >= deadline:
                    break
                self.engine.changed.wait(0.2)
                self.engine.run_due()
        return operation

    def _delete_operation(self, call: Call) -> Body:
        self._operation(call)
        self.engine.operations.remove(call.scope, call.name)
        return {}

    # Reservations
    def _reservation_routes(self) -> dict[str, Handler]:
        known = self.engine.reservations
        view = lambda call, each: known.to_api(each, call.project)
        return {
            "reservations.insert": lambda call: self._reserve(call, known.create),
            "reservations.get": lambda call: view(
                call, known.get(call.project, call.place, call.name)
            ),
            "reservations.list": lambda call: self._page(call, [
                view(call, each) for (zone, _), each in known.known.items() if zone == call.place
            ]),
            "reservations.aggregatedList": lambda call: self._aggregated(call, [
                (f"zones/{zone}", view(call, each)) for (zone, _), each in known.known.items()
            ]),
            "reservations.delete": self._delete_reservation,
            "futureReservations.insert": lambda call: self._reserve(call, known.create_future),
            "futureReservations.get": lambda call: known.future_to_api(
                known.get_future(call.project, call.place, call.name)
            ),
            "futureReservations.list": lambda call: self._page(call, [
                known.future_to_api(each) for (zone, _), each in known.future.items()
                if zone == call.place
            ]),
            "futureReservations.delete": self._keep_future,
            "futureReservations.cancel": self._keep_future,
            "futureReservations.patch": self._keep_future,
        }  # fmt: skip

    def _reserve(self, call: Call, create: Callable[[str, str, Body], int]) -> Body:
        name = validation.name_of(call.body)
        self._check_scope(call)
        known = self.engine.reservations
        if (call.place, name) in (known.future if call.kind[0] == "f" else known.known):
            raise call_error("exists", target=call.target(name))
        number = create(call.project, call.place, call.body)
        return self._done_later(call, "insert", name, number)

    def _done_later(
        self,
        call: Call,
        verb: str,
        name: str,
        number: int,
        then: Callable[[], object] = lambda: None,
    ) -> Body:
        operation = self.engine.operations.begin(
            call.project, call.scope, verb, f"{call.kind}/{name}", number
        )

        def done(at: datetime) -> None:
            then()
            self.engine.operations.finish(operation)

        self.engine.after(self.engine.clock.now(), "operation", name, done)
        return operation

    def _delete_reservation(self, call: Call) -> Body:
        known = self.engine.reservations
        found = known.get(call.project, call.place, call.name)
        known.delete(found)
        return self._done_later(call, "delete", call.name, found.number)

    def _keep_future(self, call: Call) -> Body:
        known = self.engine.reservations
        known.refuse_change(known.get_future(call.project, call.place, call.name))
        raise AssertionError("refused")

    # Listings
    def _page(self, call: Call, items: list[Body]) -> Body:
        """With those of the kind that have no TPUs."""
        items = items + [
            each for scope, each in self.others.items(call.kind) if scope == call.scope
        ]
        found = listings.matching(items, call.query.get("filter", ""))
        shown, token = listings.page(found, call.query, self.engine.switches.page_size)
        singular = SINGULAR.get(call.kind, call.kind.removesuffix("s"))
        more = {"nextPageToken": token} if token else {}
        return {"kind": f"compute#{singular}List", "items": shown, **more}

    def _aggregated(self, call: Call, items: Iterable[tuple[str, Body]]) -> Body:
        pairs = [
            (scope, item) for scope, item in [*items, *self.others.items(call.kind)]
            if listings.matching([item], call.query.get("filter", ""))
        ]  # fmt: skip
        keyed = [{"name": f"{scope}/{item['name']}", "_item": item, "_scope": scope}
                 for scope, item in pairs]  # fmt: skip
        shown, token = listings.page(keyed, call.query, self.engine.switches.page_size)
        scopes: Body = {}
        for each in shown:
            scopes.setdefault(each["_scope"], {call.kind: []})[call.kind].append(each["_item"])
        if not scopes:
            scopes["global"] = {"warning": {"code": "NO_RESULTS_ON_PAGE"}}
        return {"items": scopes, **({"nextPageToken": token} if token else {})}


def _configured(properties: Body, config: Body) -> Body:
    """The properties of a template with labels and metadata that a group gives all of its VMs
    (cloud.google.com/compute/docs/instance-groups/set-mig-aic)."""
    own = config.get("properties") or {}
    items = (properties.get("metadata") or {}).get("items", [])
    metadata = {item["key"]: item["value"] for item in items} | (own.get("metadata") or {})
    return {
        **properties,
        "labels": {**properties.get("labels", {}), **(own.get("labels") or {})},
        "metadata": {"items": [{"key": key, "value": metadata[key]} for key in metadata]},
    }
