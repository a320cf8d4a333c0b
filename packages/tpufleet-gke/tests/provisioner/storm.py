"""Days of JobSets on a manual clock, with faults of GKE, tenants and budgets; and a ledger of where
the dollars go that does not ask the provisioner."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from tests.provisioner import builders
from tests.provisioner.harness import ProvisionerHarness
from tpufleet.errors import FleetError
from tpufleet_gke.provisioner.model import label_keys
from tpufleet_gke.provisioner.model.pool_specs import PoolCapacity
from tpufleet_gke.provisioner.planning import budgets
from tpufleet_gke.provisioner.settings import Limit

SECOND, MINUTE, HOUR = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1)
DAY = timedelta(days=1)
ZONE, MACHINE = "us-central1-a", "ct5lp-hightpu-4t"
TENANTS = {"red": 512.0, "green": 256.0, "blue": 128.0}  # chips
SPOT = {"key": label_keys.SPOT, "operator": "Exists", "effect": "NoSchedule"}
NIC = {"containers": [{"resources": {"requests": {label_keys.TPU: "4", "example.com/nic": "1"}}}]}
FITTING: list[dict[str, Any]] = [
    {},
    {"node_selector": {label_keys.TOPOLOGY: "2x2"}},
    {"node_selector": {label_keys.TOPOLOGY: "2x4"}},
    {"node_selector": {label_keys.TOPOLOGY: "4x8"}},
    {"node_selector": {label_keys.SPOT: "true"}, "tolerations": [SPOT]},
]
NEVER: list[dict[str, Any]] = [  # one that is known beforehand, and one that only nodes show
    {"node_selector": {label_keys.SPOT: "true"}},
    NIC,
]
FAULTS_PER_DAY = {
    "create call": 4, "delete call": 3, "list call": 6, "operations call": 4, "creation": 6,
    "slow creation": 4, "lost nodes": 4, "deletion": 4, "stockout": 3, "repair": 6, "restart": 2,
}  # fmt: skip
# Times of GKE that no provisioner changes.
OF_GKE = ("GKE deletes it", "the device plugin starts", "GKE creates its other slices")
TRANSIENT = ("UNAVAILABLE", "INTERNAL", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED")


@dataclass(kw_only=True, eq=False)
class Training:
    """A JobSet and what becomes of it."""

    name: str
    namespace: str
    slices: int
    pod: dict[str, Any]
    work: timedelta  # with all slices
    arrives: datetime
    cancelled: datetime | None  # deleted then, whatever it does
    suspended: tuple[datetime, datetime] | None
    fits: bool
    done: timedelta = timedelta(0)
    state: str = "to come"  # waiting, running, suspended, ended, deleted
    pods: list[Any] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace, self.name

    @property
    def is_over(self) -> bool:
        return self.state in ("ended", "deleted")


class Storm:
    def __init__(
        self, seed: int, days: float, per_day: int = 200, *,
        creation: timedelta = 90 * SECOND, deletion: timedelta = 60 * SECOND,
    ) -> None:  # fmt: skip
        self.chosen = random.Random(seed)
        self.harness = ProvisionerHarness(
            simulate_nodes=True, budget_chips=Limit(None, TENANTS), poll_interval=10 * SECOND
        )
        self.gke, self.clock = self.harness.gke, self.harness.clock
        assert self.harness.simulated is not None
        self.nodes = self.harness.simulated
        self.nodes.exclusive = True
        self.gke.creation_time, self.gke.deletion_time = creation, deletion
        self.gke.device_plugin_delay = 15 * SECOND
        self.began = self.clock.now()
        self.ends = self.began + days * DAY
        self.trainings = [self._training(n, days) for n in range(int(per_day * days))]
        self.by_key = {training.key: training for training in self.trainings}
        self.live: dict[tuple[str, str], Training] = {}
        self.faults = sorted(
            (self._moment(days), kind)
            for kind, count in FAULTS_PER_DAY.items()
            for _ in range(round(count * days))
        )
        self.dollars: Counter[str] = Counter()  # by cause
        self.used_pools: set[str] = set()
        self.creating: set[tuple[str, str]] = set()  # owners of pools
        self.most_over_budget = 0.0

    def close(self) -> None:
        self.harness.close()

    def run(self) -> None:
        """Until all JobSets have ended and the node pools have had the time to go."""
        to_come = sorted(self.trainings, key=lambda each: each.arrives)
        last: datetime | None = None
        while last is None or self.clock.now() < last + HOUR:
            now = self.clock.now()
            while to_come and to_come[0].arrives <= now:
                self._submit(to_come.pop(0))
            while self.faults and self.faults[0][0] <= now:
                self._inflict(self.faults.pop(0)[1])
            self.gke.advance()
            changed = self._follow()
            wait = self._reconcile()
            if changed:
                wait = min(wait, SECOND)
            events = [each.arrives for each in to_come[:1]] + [at for at, _ in self.faults[:1]]
            events += filter(None, [self.gke.next_due, *map(self._next_change, self.live.values())])
            until = min([now + wait, *events])
            self._pass(max(until - now, SECOND))
            if not to_come and not self.live and last is None:
                last = now

    def unused(self, but: Collection[str] = ()) -> float:
        """Share of the bill; without these causes."""
        total = sum(self.dollars.values())
        return (total - sum(self.dollars[cause] for cause in ("used", *but))) / total

    def report(self) -> str:
        total = sum(self.dollars.values())
        lines = [f"{len(self.trainings)} JobSets, {len(self.gke.created)} pools, ${total:.0f}"]
        for cause, dollars in self.dollars.most_common():
            lines.append(f"{cause:28} ${dollars:10.2f} {100 * dollars / total:7.3f} %")
        ours = 100 * self.unused(but=OF_GKE)
        lines.append(f"unused: {100 * self.unused():.3f} %, without the times of GKE {ours:.3f} %")
        return "\n".join(lines)

    # What happens

    def _moment(self, days: float) -> datetime:
        return self.began + self.chosen.random() * days * DAY

    def _training(self, number: int, days: float) -> Training:
        arrives = self._moment(days)
        fits = self.chosen.random() > 0.02
        cancelled = self.chosen.random() < 0.05 or not fits
        suspended = arrives + self.chosen.uniform(0.2, 3) * HOUR
        (tenant,) = self.chosen.choices(list(TENANTS), list(TENANTS.values()))
        return Training(
            name=f"job-{number}", namespace=tenant,
            slices=self.chosen.choice([1, 1, 1, 1, 2, 2, 3]),
            pod=self.chosen.choice(FITTING if fits else NEVER), fits=fits,
            work=MINUTE * 5 * 144 ** self.chosen.random(), arrives=arrives,
            cancelled=arrives + self.chosen.uniform(0, 6) * HOUR if cancelled else None,
            suspended=(suspended, suspended + self.chosen.uniform(0.02, 1) * HOUR)
            if self.chosen.random() < 0.03 else None,
        )  # fmt: skip

    def _submit(self, training: Training) -> None:
        self.live[training.key] = training
        self.harness.jobsets.append(builders.jobset(training.name, namespace=training.namespace))
        self._start(training)

    def _start(self, training: Training) -> None:
        training.state = "waiting"
        training.pods = [
            builders.pod(
                training.name, namespace=training.namespace, job=number, since=self.clock.now(),
                **training.pod,
            )
            for number in range(training.slices)
        ]  # fmt: skip
        self._list_pods()

    def _stop(self, training: Training, state: str, **status: Any) -> None:
        training.state, training.pods = state, []
        self._list_pods()
        rest = [
            one for one in self.harness.jobsets
            if (one["metadata"]["namespace"], one["metadata"]["name"]) != training.key
        ]  # fmt: skip
        if state != "deleted":
            rest.append(builders.jobset(training.name, namespace=training.namespace, **status))
        self.harness.jobsets = rest
        if training.is_over:
            del self.live[training.key]

    def _list_pods(self) -> None:
        self.harness.pod_list = [pod for each in self.live.values() for pod in each.pods]

    def _follow(self) -> bool:
        """JobSets that run, end, are cancelled or suspended, or lose nodes."""
        now, changed = self.clock.now(), False
        before = {id(pod): pod["spec"].get("nodeName") for pod in self.harness.pod_list}
        self.nodes.schedule(self.harness.pod_list)
        for training in list(self.live.values()):
            state = training.state
            bound = [pod["spec"].get("nodeName") for pod in training.pods]
            lost = [
                pod for pod in training.pods
                if before.get(id(pod)) and pod["spec"].get("nodeName") != before[id(pod)]
            ]  # fmt: skip
            if training.cancelled is not None and training.cancelled <= now:
                self._stop(training, "deleted")
            elif training.done >= training.work:
                self._stop(training, "ended", Completed=now)
            elif training.suspended and training.suspended[0] <= now and state != "suspended":
                self._stop(training, "suspended", Suspended=now)
            elif state == "suspended" and training.suspended and training.suspended[1] <= now:
                training.suspended = None
                self._stop(training, "waiting")
                self._start(training)
            elif lost:  # JobSet recreates all pods
                self._start(training)
            elif bound:
                training.state = "running" if all(bound) else "waiting"
            changed = changed or training.state != state or bool(lost)
        return changed

    def _next_change(self, training: Training) -> datetime | None:
        if training.state == "running":
            return self.clock.now() + training.work - training.done
        return None

    def _inflict(self, fault: str) -> None:
        code = self.chosen.choice(TRANSIENT)
        match fault.split():
            case [method, "call"]:
                self.gke.fail_next_call(method, code, "try again", self.chosen.randint(1, 3))
            case ["creation"]:
                self.gke.fail_next_creation(13, "internal error")
            case ["slow", "creation"]:
                self.gke.slow_next_creation(self.chosen.uniform(5, 35) * MINUTE)
            case ["lost", "nodes"]:
                self.gke.lose_nodes_of_next_creation(1)
            case ["deletion"]:
                self.gke.fail_next_deletion(13, "internal error")
            case ["stockout"]:
                self.gke.stock = {(ZONE, MACHINE): self.chosen.randint(40, 120)}
                over = self.clock.now() + self.chosen.uniform(0.2, 2) * HOUR
                self.faults = sorted([*self.faults, (over, "stock")])
            case ["stock"]:
                self.gke.stock = {}
            case ["repair"]:
                running = [name for name, pool in self.gke.pools.items() if _is_running(pool)]
                if running:
                    self.gke.start_repair(self.chosen.choice(running))
            case ["restart"]:
                self.harness.restart()

    def _reconcile(self) -> timedelta:
        provisioner = self.harness.provisioner
        try:
            wait = provisioner.reconcile()
        except FleetError:
            wait = self.harness.settings.poll_interval
        provisioner.collect_results(timeout=900)
        return wait

    def _pass(self, span: timedelta) -> None:
        chips: Counter[str] = Counter()
        runs_on = {
            pod["spec"]["nodeName"]: training
            for training in self.live.values()
            for pod in training.pods
            if "nodeName" in pod["spec"]
        }
        self.creating = {
            (labels[label_keys.OWNER_NAMESPACE], labels[label_keys.OWNER_NAME])
            for name, pool in self.gke.pools.items()
            for labels in [pool.config.labels]
            if self._is_being_created(name, pool)
        }
        for name, pool in self.gke.pools.items():
            labels = pool.config.labels
            owner = labels[label_keys.OWNER_NAMESPACE], labels[label_keys.OWNER_NAME]
            nodes = pool.initial_node_count
            chips[owner[0]] += 4 * nodes
            if name in self.nodes.created:
                kind = PoolCapacity.SPOT if pool.config.spot else PoolCapacity.ON_DEMAND
                price = budgets.chip_hour_dollars(MACHINE, kind, self.harness.settings) or 0.0
                there = len(self.nodes.created[name])
                cost = 4 * there * price * (span / HOUR)
                self.dollars[self._cause(name, pool, self.by_key[owner], runs_on)] += cost
        for tenant, limit in TENANTS.items():
            self.most_over_budget = max(self.most_over_budget, chips[tenant] - limit)
        for training in self.live.values():
            if training.state == "running":
                training.done += span
        self.clock.advance(span)

    def _is_being_created(self, name: str, pool: Any) -> bool:
        """For no longer than GKE usually takes."""
        usual = self.gke.creation_time + self.gke.device_plugin_delay
        early = self.clock.now() < self.gke.created_at[name] + usual
        return early and (pool.status.name == "PROVISIONING" or name in self.nodes.without_chips)

    def _cause(self, name: str, pool: Any, owner: Training, runs_on: Mapping[str, Training]) -> str:
        names = [node["metadata"]["name"] for node, _ in self.nodes.created[name]]
        users = [runs_on[node] for node in names if node in runs_on]
        if users:
            self.used_pools.add(name)
            if users[0].state == "running":
                return "used"
            # What GKE takes beyond its usual time is ours: another pool might be quicker.
            return OF_GKE[2] if owner.key in self.creating else "waits for other slices"
        if pool.status.name == "STOPPING":
            return OF_GKE[0]
        if owner.is_over:
            return f"its JobSet is {owner.state}"
        if owner.state == "suspended":
            return "its JobSet is suspended"
        if not owner.fits:
            return "its pod fits no node"
        if pool.status.name != "RUNNING":
            return f"it is {pool.status.name}"
        if name in self.nodes.without_chips:
            return OF_GKE[1]
        return "idle after use" if name in self.used_pools else "not used yet"


def _is_running(pool: Any) -> bool:
    return bool(pool.status.name == "RUNNING")
