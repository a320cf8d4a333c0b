"""VMs and managed groups of the emulated Compute Engine over time. No wire protocol here. Callers
hold `lock`."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from tpufleet.clocks import Clock
from tpufleet_testbed import faults
from tpufleet_testbed.cloud_tpu.billing import BillingEntry, BillingLedger
from tpufleet_testbed.compute_engine import capacity, catalog, metadata, views
from tpufleet_testbed.compute_engine.api_errors import (
    ErrorBody,
    RestError,
    call_error,
    operation_error,
)
from tpufleet_testbed.compute_engine.capacity import Verdict, Want
from tpufleet_testbed.compute_engine.fault_plan import NO_FAULTS, ComputeFaultPlan
from tpufleet_testbed.compute_engine.operations import Operations
from tpufleet_testbed.compute_engine.records import Group, Maintenance, Member, Vm
from tpufleet_testbed.compute_engine.reservations import Reservations
from tpufleet_testbed.compute_engine.vm_hosts import VmHosts
from tpufleet_testbed.timeline import Action, Timeline

LETTERS = "0123456789bcdfghjklmnpqrstvwxz"  # of random names
FLEX = "FLEX_START"
Record = Vm | Group | Member


class ComputeEngine:
    def __init__(
        self,
        clock: Clock,
        *,
        plan: ComputeFaultPlan = NO_FAULTS,
        hosts: VmHosts | None = None,
    ) -> None:
        self.clock = clock
        self.plan = plan
        self.stock, self.quota = plan.stock, plan.quota  # both may be set later
        self.switches = plan.switches
        self.latencies = plan.latencies
        self.hosts = hosts or VmHosts()
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._timeline = Timeline(clock)
        self.operations = Operations(clock.now, self.changed)
        self.ledger = BillingLedger()
        self.started_at = clock.now()
        self.vms: dict[tuple[str, str], Vm] = {}  # by zone and name
        self.groups: dict[tuple[str, str], Group] = {}  # by scope and name
        self.failing_topologies: set[str] = set()  # names of groups
        self._numbers = itertools.count(1)
        self._draws: Counter[tuple[str, str]] = Counter()
        self.reservations = Reservations(self)

    # Time and chance
    def run_due(self) -> datetime:
        return self._timeline.run_due()

    def schedule(self, at: datetime, action: Action) -> None:
        self._timeline.schedule(at, action)

    def number(self) -> int:
        return next(self._numbers)

    def latency(self, kind: str, key: str) -> timedelta:
        """A name that is used again takes another time."""
        self._draws[kind, key] += 1
        return self.latencies.draw(kind, self.plan.seed, f"{key}/{self._draws[kind, key]}")

    def after(self, at: datetime, kind: str, key: str, action: Action) -> None:
        self.schedule(at + self.latency(kind, key), action)

    def _after(self, record: Record, at: datetime, kind: str, action: Action) -> None:
        """Unless something else becomes of it before."""
        self.after(at, kind, record.name, _unless_changed(record, action))

    def _vm_operation(self, vm: Vm, kind: str, *, pending: bool = True) -> dict[str, Any]:
        scope, target = f"zones/{vm.zone}", f"instances/{vm.name}"
        return self.operations.begin(vm.project, scope, kind, target, vm.number, pending=pending)

    def _group_operation(self, group: Group, verb: str, *, pending: bool = True) -> dict[str, Any]:
        kind, target = (
            f"compute.instanceGroupManagers.{verb}",
            f"instanceGroupManagers/{group.name}",
        )
        return self.operations.begin(
            group.project, group.scope, kind, target, group.number, pending=pending
        )

    # Single VMs
    def create_vm(self, want: Want, name: str, valid_for: timedelta | None) -> dict[str, Any]:
        now = self.clock.now()
        vm = self._new_vm(want, name, now)
        vm.status = "PENDING" if want.model == FLEX and valid_for is not None else "PROVISIONING"
        verdict = self.verdict(want)
        quota = verdict.error is not None and "QUOTA" in str(verdict.error["code"])
        if quota and verdict.error is not None and self.switches.quota_refusal == "call":
            self.ledger.denied += 1
            raise RestError(403, "quotaExceeded", str(verdict.error["message"]))
        vm.operation = self._vm_operation(vm, "insert", pending=False)
        self.vms[want.zone, name] = vm
        if verdict.granted:
            vm.quota_kind = verdict.quota_kind
            self._boot(vm, now)
        elif want.model == FLEX and valid_for is not None:
            deadline = now + valid_for
            self._wait_for_stock(vm, want, deadline, now)
        elif want.model == FLEX and self.switches.flex_failure == "internal":
            vm.status = "STAGING"
            error = operation_error("internal", **want.texts)
            self._after(vm, now, "flex_failure", lambda at: self._fail_creation(vm, error))
        else:
            error = verdict.error or capacity.stockout(want, self._zones_with_stock(want))
            self._after(vm, now, "stockout", lambda at: self._fail_creation(vm, error))
        return vm.operation

    def _wait_for_stock(self, vm: Vm, want: Want, deadline: datetime, now: datetime) -> None:
        def check(at: datetime) -> None:
            verdict = self.verdict(want)
            if verdict.granted:
                vm.quota_kind = verdict.quota_kind
                self._boot(vm, at)
            elif at >= deadline:
                stockout = capacity.stockout(want, self._zones_with_stock(want))
                self._fail_creation(vm, verdict.error or stockout)
            else:
                wait = min(self.latency("check", vm.name), max(deadline - at, timedelta(0)))
                self.schedule(at + wait, _unless_changed(vm, check))

        check(now)

    def _fail_creation(self, vm: Vm, error: ErrorBody) -> None:
        self.ledger.denied += 1
        vm.generation += 1
        self.vms.pop((vm.zone, vm.name), None)
        self.operations.finish(vm.operation, [error])

    def _new_vm(self, want: Want, name: str, now: datetime) -> Vm:
        return Vm(
            name=name,
            project=want.project,
            zone=want.zone,
            number=self.number(),
            properties=dict(want.properties),
            machine=want.machine,
            model=want.model,
            created_at=now,
            reservation=want.reservation if want.reserved else "",
        )

    def _boot(self, vm: Vm, now: datetime) -> None:
        """A VM that has its machine."""
        vm.generation += 1
        vm.boots += 1
        vm.status = "PROVISIONING"
        if vm.model == FLEX:
            self._bill(vm, now)  # from its creation

        def staging(at: datetime) -> None:
            vm.status = "STAGING"
            self._after(vm, at, "boot", lambda moment: self._running(vm, moment))

        self._after(vm, now, "provision", staging)

    def _running(self, vm: Vm, at: datetime) -> None:
        vm.status, vm.started_at, vm.preempted = "RUNNING", at, False
        self._bill(vm, at)
        self._limit_run(vm, at)
        with_slice = self.switches.metadata == "boot" or not (vm.group and vm.group.topology)
        self.hosts.boot(vm, metadata.values_of(vm, with_slice=with_slice))
        self.operations.finish(vm.operation)
        if vm.group is not None:
            member = vm.group.members.get(vm.name)
            if member is not None and member.vm is vm:
                member.action, member.errors = "NONE", []
            if vm.group.topology_state == "INCOMPLETE" and not vm.group.repairs:
                creating = any(each.action == "CREATING" for each in vm.group.members.values())
                vm.group.in_progress = vm.group.in_progress and creating
            self._settle(vm.group, at)

    def _limit_run(self, vm: Vm, at: datetime) -> None:
        limit = vm.scheduling.get("maxRunDuration", {}).get("seconds")
        until = [at + timedelta(seconds=int(limit))] if limit else []
        if vm.scheduling.get("terminationTime"):
            until.append(datetime.fromisoformat(vm.scheduling["terminationTime"]))
        if reserved := self.reservations.end_of(vm.zone, vm.reservation):
            until.append(reserved)
        vm.terminates_at = min(until, default=None)
        if vm.terminates_at is not None:
            end = lambda at: self.stop(vm, at, "expired")
            self.schedule(vm.terminates_at, _unless_changed(vm, end))

    def _bill(self, vm: Vm, at: datetime) -> None:
        if self.ledger.is_running(vm.key):
            return
        self.ledger.begin(
            vm.key,
            BillingEntry(
                node=vm.name, zone=vm.zone, chips=vm.machine.chips,
                labels=dict(vm.properties.get("labels", {})), began_at=at,
            ),
        )  # fmt: skip

    def limit_run(self, vm: Vm) -> None:
        """Its run time was changed."""
        if vm.started_at is not None and vm.status == "RUNNING":
            vm.generation += 1
            self._limit_run(vm, vm.started_at)

    def start_vm(self, vm: Vm, now: datetime) -> dict[str, Any]:
        """One that was stopped, if there is capacity."""
        want = Want(
            project=vm.project, zone=vm.zone, machine=vm.machine, model=vm.model, count=1,
            properties=vm.properties,
        )  # fmt: skip
        verdict = self.verdict(want)
        vm.operation = self._vm_operation(vm, "start")
        if verdict.granted:
            vm.quota_kind = verdict.quota_kind
            self._boot(vm, now)
        else:
            error = verdict.error or capacity.stockout(want, ())
            operation = vm.operation
            finish = lambda at: self.operations.finish(operation, [error])
            self.after(now, "stockout", vm.name, finish)
        return vm.operation

    def noted_vm(self, vm: Vm, kind: str) -> dict[str, Any]:
        """An operation on it that is soon DONE."""
        operation = self._vm_operation(vm, kind)
        now = self.clock.now()
        self.after(now, "operation", vm.name, lambda at: self.operations.finish(operation))
        return operation

    def noted(self, group: Group, verb: str) -> dict[str, Any]:
        operation = self._group_operation(group, verb)
        self._scheduled(operation, group, self.clock.now())
        return operation

    def vm(self, project: str, zone: str, name: str) -> Vm:
        vm = self.vms.get((zone, name))
        if vm is None:
            target = f"projects/{project}/zones/{zone}/instances/{name}"
            raise call_error("not-found", target=target)
        return vm

    # The end of VMs
    def stop(self, vm: Vm, at: datetime, reason: str) -> None:
        """It is preempted, its time or its reservation is over, or its host failed: soft off, then
        it is terminated or deleted, as its scheduling says."""
        if vm.status not in ("PROVISIONING", "STAGING", "RUNNING", "REPAIRING"):
            return
        vm.generation += 1
        creating = vm.status in ("PROVISIONING", "STAGING")
        vm.status = "STOPPING"
        if reason == "preempted":
            vm.preempted = True
            self.hosts.publish(vm, "preempted", "TRUE")
            self.operations.finish(self._vm_operation(vm, "compute.instances.preempted"))
            if creating:
                self.operations.finish(
                    vm.operation, [operation_error("unsupported", name=vm.name)]
                )  # fmt: skip
        if vm.group is not None:
            if reason == "expired" and vm.group.topology_state == "ACTIVE":
                self._set_topology(vm.group, "DEACTIVATING", at)
            self._settle(vm.group, at)
        graceful = reason in ("preempted", "expired", "maintenance")
        kind = "notice_period" if graceful else "stop"
        self._after(vm, at, kind, lambda moment: self._stopped(vm, moment, reason))

    def _stopped(self, vm: Vm, at: datetime, reason: str) -> None:
        self._end_hosts(vm, at, reason)
        always = reason == "expired" and vm.model in (FLEX, "RESERVATION_BOUND")
        if vm.deletes_itself or always:
            self._remove(vm, at)
        else:
            vm.status = "TERMINATED"
            if vm.group is not None:
                self._lost(vm.group, vm, at)

    def _end_hosts(self, vm: Vm, at: datetime, reason: str) -> None:
        self.ledger.end(vm.key, at, reason)
        self.hosts.end(vm)

    def _remove(self, vm: Vm, at: datetime) -> None:
        vm.generation += 1
        vm.status = "TERMINATED"
        if self.vms.get((vm.zone, vm.name)) is vm:
            del self.vms[vm.zone, vm.name]
        self.operations.finish(vm.deletion)
        group = vm.group
        if group is None:
            return
        member = group.members.get(vm.name)
        if member is None or member.vm is not vm:
            return
        member.vm = None
        if member.action == "DELETING":
            del group.members[vm.name]
        self._lost(group, vm, at)

    def delete_vm(self, vm: Vm, now: datetime) -> dict[str, Any]:
        if vm.deletion is not None:
            return vm.deletion
        vm.deletion = self._vm_operation(vm, "delete", pending=False)
        self._delete(vm, now)
        return vm.deletion

    def _delete(self, vm: Vm, now: datetime) -> None:
        vm.generation += 1
        cancelled = {"code": "RESOURCE_NOT_READY", "message": f"{vm.name} was deleted."}
        self.operations.finish(vm.operation, [cancelled])
        self._end_hosts(vm, now, "deleted")
        vm.status = "STOPPING"
        if vm.group is not None:
            self._settle(vm.group, now)
        self._after(vm, now, "deletion", lambda at: self._remove(vm, at))

    # Groups
    def create_group(self, group: Group) -> dict[str, Any]:
        now = self.clock.now()
        self.groups[group.scope, group.name] = group
        operation = self._group_operation(group, "insert")
        self._scheduled(operation, group, now)
        self._grow(group, now)
        return operation

    def _scheduled(self, operation: dict[str, Any], group: Group, now: datetime) -> None:
        """Operations of groups are DONE when the action is scheduled."""
        self.after(now, "operation", group.name, lambda at: self.operations.finish(operation))

    def group(self, project: str, scope: str, name: str) -> Group:
        group = self.groups.get((scope, name))
        if group is None:
            target = f"projects/{project}/{scope}/instanceGroupManagers/{name}"
            raise call_error("not-found", target=target)
        return group

    def resize(self, group: Group, size: int, now: datetime) -> dict[str, Any]:
        operation = self._group_operation(group, "resize")
        self._scheduled(operation, group, now)
        group.target_size = size
        group.version += 1
        surplus = len(group.members) - size
        if surplus > 0:
            self.delete_members(group, list(group.members)[-surplus:], now)
        else:
            self._grow(group, now)
        return operation

    def delete_members(self, group: Group, names: Iterable[str], now: datetime) -> None:
        """Without a change of the target size."""
        group.generation += 1
        group.in_progress = False
        for name in names:
            member = group.members[name]
            member.generation += 1
            if member.vm is None:
                del group.members[name]
                continue
            member.action = "DELETING"
            if member.vm.deletion is None:
                self._delete(member.vm, now)
        self._settle(group, now)
        if group.target_size and not group.in_progress:
            self._grow(group, now)

    def delete_group(self, group: Group, now: datetime) -> dict[str, Any]:
        if group.deletion is None:
            group.deletion = self._group_operation(group, "delete", pending=False)
            group.target_size = 0
            self.delete_members(group, list(group.members), now)
            if not group.members:
                self._after(group, now, "operation", lambda at: self._remove_group(group))
        return group.deletion

    def _remove_group(self, group: Group) -> None:
        group.generation += 1
        if self.groups.get((group.scope, group.name)) is group:
            del self.groups[group.scope, group.name]
        self.operations.finish(group.deletion)

    def _grow(self, group: Group, now: datetime) -> None:
        """Places for the VMs that are missing; of a bulk group all of them, or none."""
        group.generation += 1
        while len(group.members) < group.target_size:
            member = self._new_member(group)
            group.members[member.name] = member
        self._number_workers(group)
        if group.bulk:
            if any(member.action == "CREATING" for member in group.members.values()):
                group.in_progress, group.waiting_since = True, now
                self._after(group, now, "operation", lambda at: self._check(group, at))
            return
        for member in group.members.values():
            if member.vm is None and member.action == "CREATING":
                self._attempt(group, member, now)

    def _new_member(self, group: Group) -> Member:
        base = group.body.get("baseInstanceName", group.name)
        number = self.number()
        stem, hashes, digits = base.partition("-#")
        if hashes:
            taken = {member.name for member in group.members.values()}
            width = len(digits) + 1
            names = (f"{stem}-{index:0{width}d}" for index in itertools.count())
            name = next(each for each in names if each not in taken)
        else:
            chance = random.Random(f"{self.plan.seed}/{base}/{number}")
            name = f"{base}-{''.join(chance.choices(LETTERS, k=4))}"
        return Member(name=name, worker=0, number=number)

    def _number_workers(self, group: Group) -> None:
        """The order of the names in the API is not that of the workers."""
        names = sorted(group.members)
        if self.switches.worker_order == "shuffled":
            random.Random(f"{self.plan.seed}/{group.number}").shuffle(names)
        for worker, name in enumerate(names):
            group.members[name].worker = worker

    def want(self, group: Group, zone: str, count: int) -> Want:
        return Want(
            project=group.project, zone=zone, machine=group.machine, model=group.model,
            count=count, properties=group.properties,
        )  # fmt: skip

    def _check(self, group: Group, at: datetime) -> None:
        """Whether all VMs of a bulk group can be created now."""
        if group.leaving:
            return self._after(group, at, "check", lambda moment: self._check(group, moment))
        zones = group.zones if self.switches.regional_zone_search else group.zones[:1]
        verdict, zone = Verdict(), zones[0]
        for zone in zones:
            verdict = self._slice_verdict(group, zone)
            if verdict.granted:
                break
        group.last_check_at = at
        if verdict.granted:
            group.zone, group.last_error = zone, None
            return self._create_all(group, verdict, at)
        limit = self.switches.waiting_limit
        since = group.waiting_since or at
        self.ledger.denied += 1
        if verdict.error is not None:
            if verdict.error != group.last_error:
                group.errors += [
                    views.listed_error(group, member, verdict.error, at)
                    for member in group.members.values()
                ]
            group.last_error = verdict.error
            for member in group.members.values():
                member.errors = [verdict.error]
        if limit is not None and at - since >= limit:
            group.in_progress = False
            return None
        return self._after(group, at, "check", lambda moment: self._check(group, moment))

    def _slice_verdict(self, group: Group, zone: str) -> Verdict:
        want = self.want(group, zone, len(group.members))
        if group.model not in self.switches.bulk_models:
            return Verdict(error=operation_error("bulk-model"))
        if group.topology and (
            group.topology not in group.machine.topologies
            or catalog.chips_of(group.topology) != want.chips
        ):
            return Verdict(error=operation_error("tpu-config", **want.texts))
        return self.verdict(want)

    def _create_all(self, group: Group, verdict: Verdict, at: datetime) -> None:
        if group.topology:
            self._set_topology(group, "ACTIVATING", at)
        want = self.want(group, group.zone, 1)
        for member in group.members.values():
            if member.vm is None:
                self._create_member(group, member, want, verdict, at)

    def _create_member(
        self, group: Group, member: Member, want: Want, verdict: Verdict, at: datetime
    ) -> None:
        member.errors = []
        vm = self._new_vm(want, member.name, at)
        vm.group, vm.worker, vm.quota_kind = group, member.worker, verdict.quota_kind
        created_by = {
            "key": "created-by",
            "value": f"projects/1/{group.scope}/instanceGroupManagers/{group.name}",
        }
        items = list(vm.properties.get("metadata", {}).get("items", []))
        vm.properties["metadata"] = {"items": [*items, created_by]}
        member.vm = self.vms[vm.zone, vm.name] = vm
        self._boot(vm, at)

    def _attempt(self, group: Group, member: Member, at: datetime) -> None:
        """One VM of a group, which is tried for again until there is capacity."""
        group.zone = group.zone or group.zones[0]
        want = self.want(group, group.zone, 1)
        verdict = self.verdict(want)
        if verdict.granted:
            if group.topology and not group.topology_state:
                self._set_topology(group, "ACTIVATING", at)
            return self._create_member(group, member, want, verdict, at)
        if verdict.error is not None:
            if [verdict.error] != member.errors:
                group.errors.append(views.listed_error(group, member, verdict.error, at))
            member.errors = [verdict.error]
        self.ledger.denied += 1
        return self._after(member, at, "check", partial(self._attempt, group, member))

    def _settle(self, group: Group, at: datetime) -> None:
        """After a change of one of its VMs."""
        if group.deletion is not None or not group.topology:
            if group.all_run:
                group.in_progress = False
            return
        if group.all_run and self._joins(group):
            self._after(group, at, "link", lambda moment: self._linked(group, moment))
        elif not group.members or group.target_size == 0:
            self._unlink(group, at)
        elif not group.all_run and group.topology_state == "ACTIVE":
            self._set_topology(group, self.switches.topology_after_loss, at)
        elif not group.vms and group.topology_state == "DEACTIVATING":
            self._set_topology(group, "INCOMPLETE", at)

    def _joins(self, group: Group) -> bool:
        """Whether its chips are joined once all of its VMs run."""
        recovers = self.switches.topology_recovers
        returning = self.switches.topology_returning if recovers else "REACTIVATING"
        return group.topology_state in ("ACTIVATING", "REACTIVATING", returning)

    def _unlink(self, group: Group, at: datetime) -> None:
        if group.topology_state in ("", "DEACTIVATING"):
            return
        self._set_topology(group, "DEACTIVATING", at)
        self._after(group, at, "unlink", lambda moment: self._set_topology(group, "", moment))

    def _linked(self, group: Group, at: datetime) -> None:
        if not group.all_run or not self._joins(group):
            return
        share, key = self.plan.failing_topologies, f"topology/{group.number}/{group.generation}"
        if group.name in self.failing_topologies or faults.draw(self.plan.seed, share, key):
            self.fail_topology(group, at)
            return
        self._set_topology(group, "ACTIVE", at)
        group.in_progress = False
        if self.switches.metadata == "topology":
            for vm in group.vms:
                for name, value in metadata.slice_attributes(vm).items():
                    self.hosts.publish(vm, f"attributes/{name}", value)

    def fail_topology(self, group: Group, at: datetime) -> None:
        """Its VMs go on."""
        group.topology_error = str(operation_error("topology")["message"])
        self._set_topology(group, "FAILED", at)
        group.in_progress = False

    def _set_topology(self, group: Group, state: str, at: datetime) -> None:
        group.topology_state, group.topology_at = state, at
        if state != "FAILED":
            group.topology_error = ""

    def _lost(self, group: Group, vm: Vm, at: datetime) -> None:
        """A VM of the group has ended."""
        if group.deletion is not None:
            if not group.members:
                self._remove_group(group)
            return
        self._settle(group, at)
        member = group.members.get(vm.name)
        if member is None or member.action == "DELETING":
            return
        if not group.repairs:
            if member.action == "CREATING":
                self._stop_creating(group, member, at)
            return
        if self.switches.topology_recovers and group.topology_state in ("INCOMPLETE", "FAILED"):
            self._set_topology(group, self.switches.topology_returning, at)
        member.action, member.vm = "RECREATING", None
        member.generation += 1
        if vm.status == "TERMINATED":
            self.vms.pop((vm.zone, vm.name), None)
        self._attempt(group, member, at)

    def _stop_creating(self, group: Group, member: Member, at: datetime) -> None:
        """A VM was lost before it ran, and nothing creates it again."""
        error = operation_error("unsupported", name=member.name)
        member.action, member.errors = "NONE", [error]
        group.errors.append(views.listed_error(group, member, error, at))
        if group.topology_state == "ACTIVATING":
            self._set_topology(group, "INCOMPLETE", at)
        if all(each.action != "CREATING" for each in group.members.values()):
            group.in_progress = False

    def recreate_members(self, group: Group, names: Iterable[str], now: datetime) -> None:
        for name in names:
            member = group.members[name]
            member.action = "RECREATING"
            member.generation += 1
            if group.topology and self.switches.topology_recovers:
                self._set_topology(group, self.switches.topology_returning, now)
            old, member.vm = member.vm, None
            if old is not None:
                old.group = None
                self._delete(old, now)
            self._after(member, now, "deletion", partial(self._attempt, group, member))

    # Capacity
    def verdict(self, want: Want) -> Verdict:
        if error := capacity.unusable(want):
            return Verdict(error=error)
        if want.reserved:
            return Verdict(error=self.reservations.refusal(want))
        verdict = capacity.quota_verdict(want, self.quota, self.vms.values())
        if not verdict.granted or self._in_stock(want):
            return verdict
        error = capacity.stockout(want, self._zones_with_stock(want))
        return Verdict(error=error)

    def _in_stock(self, want: Want) -> bool:
        closed = faults.zone_closed(
            self.plan.closings, want.zone, self.clock.now() - self.started_at
        )
        return not closed and capacity.in_stock(want, self.stock, self.vms.values())

    def _zones_with_stock(self, want: Want) -> list[str]:
        return [
            zone
            for zone in want.machine.zones
            if zone != want.zone
            and catalog.region_of(zone) == catalog.region_of(want.zone)
            and self._in_stock(replace(want, zone=zone))
        ]  # fmt: skip

    # Faults
    def preempt(self, vm: Vm, at: datetime) -> None:
        self.stop(vm, at, "preempted")

    def host_error(self, vm: Vm, at: datetime) -> None:
        """The host dies at once; a VM that may restart is there again later, under its name."""
        if not vm.has_machine or vm.status == "STOPPING":
            return
        self._end_hosts(vm, at, "host-error")
        if not vm.restarts:
            self.stop(vm, at, "host-error")
            return
        vm.generation += 1
        vm.status = "REPAIRING"
        if vm.group is not None:
            self._settle(vm.group, at)

        def again(moment: datetime) -> None:
            group = vm.group
            recovers = self.switches.topology_recovers
            if group is not None and group.topology_state == "INCOMPLETE" and recovers:
                self._set_topology(group, self.switches.topology_returning, moment)
            vm.status, vm.boots = "STAGING", vm.boots + 1
            self._after(vm, moment, "boot", lambda later: self._running(vm, later))

        self._after(vm, at, "repair", again)

    def vanish(self, vm: Vm, at: datetime) -> None:
        """Delete it without an operation or a notice."""
        self._end_hosts(vm, at, "vanished")
        self._remove(vm, at)

    def slice_of(self, vm: Vm) -> list[Vm]:
        return vm.group.vms if vm.group is not None and vm.group.topology else [vm]

    def announce_maintenance(
        self, vm: Vm, ahead: timedelta, *, scheduled: bool = True, reason: str = "PLANNED_UPDATE"
    ) -> None:
        """On all VMs of its slice. It begins when its window opens."""
        start = self.clock.now() + ahead
        window = Maintenance(
            start=start, scheduled=scheduled, can_reschedule=scheduled, reason=reason
        )
        for each in self.slice_of(vm):
            each.maintenance = window
            self._publish_maintenance(each)

        def begin(at: datetime) -> None:
            if vm.maintenance is window and not window.ongoing:
                self.begin_maintenance(vm, at)

        self.schedule(start, begin)

    def begin_maintenance(self, vm: Vm, at: datetime) -> None:
        window = vm.maintenance
        assert window is not None
        window.ongoing = True
        for each in self.slice_of(vm):
            self.hosts.publish(each, "maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")
            self._publish_maintenance(each)
            self._after(each, at, "notice_period", partial(self._maintain, each))

    def _maintain(self, vm: Vm, at: datetime) -> None:
        if vm.status != "RUNNING":
            return
        self._end_hosts(vm, at, "maintenance")
        vm.generation += 1
        vm.status = "STOPPING"
        if vm.group is not None:
            self._settle(vm.group, at)

        def over(moment: datetime) -> None:
            vm.maintenance = None
            if not vm.restarts:
                self._stopped(vm, moment, "maintenance")
                return
            group = vm.group
            if group is not None and group.topology_state in ("INCOMPLETE", "FAILED"):
                self._set_topology(group, self.switches.topology_returning, moment)
            vm.status, vm.boots = "STAGING", vm.boots + 1
            self._after(vm, moment, "boot", lambda later: self._running(vm, later))

        self._after(vm, at, "maintenance", over)

    def _publish_maintenance(self, vm: Vm) -> None:
        if vm.maintenance is not None:
            self.hosts.publish(vm, "upcoming-maintenance", metadata.as_json(vm.maintenance))


def _unless_changed(record: Record, action: Action) -> Action:
    generation = record.generation
    return lambda at: action(at) if record.generation == generation else None
