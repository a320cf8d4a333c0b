"""A fleet in one process on a manual clock: the real controller, service and store, a cloud in
memory and simulated hosts. The invariants are checked after every tick."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

from msgspec.structs import replace

from tests.fake_provider import FakeProvider, InlineExecutor
from tests.journeys.invariants import Invariants
from tests.journeys.simulated_hosts import Disk, Program, SimulatedHost
from tpufleet.clocks import ManualClock
from tpufleet.controller.loop import Controller
from tpufleet.controller.reconcile import ControllerSettings
from tpufleet.model.fleet.agent_protocol import HeartbeatReply
from tpufleet.model.fleet.hosts import NoticeKind
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.fleet.slices import SliceId, TpuSlice
from tpufleet.model.job.attempts import Attempt
from tpufleet.model.job.end_reasons import END_REASONS, RetryBudget
from tpufleet.model.job.jobs import Job, JobId, JobState
from tpufleet.model.people.budgets import Budget
from tpufleet.model.people.users import Role, User
from tpufleet.model.tpu import type_lookup
from tpufleet.providers.base import Fault, Provider
from tpufleet.service.files.secrets import JobSecrets
from tpufleet.service.files.snapshots import SnapshotFiles
from tpufleet.service.fleet import pool_commands
from tpufleet.service.hosts.assignments import Assignments
from tpufleet.service.hosts.heartbeats import Heartbeats
from tpufleet.service.jobs import commands, submission
from tpufleet.service.jobs.commands import CommandContext
from tpufleet.service.jobs.submission import JobStorage
from tpufleet.service.transport.auth import Caller
from tpufleet.stores.base import Store

SECOND = timedelta(seconds=1)


class SameThread(ThreadPoolExecutor):
    """For `asyncio.to_thread`: journeys have one thread, since most of their time would go into
    handing over to others."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return InlineExecutor().submit(function, *args, **kwargs)


class Cloud(Provider, Protocol):
    """A provider whose slices a journey can look at."""

    def existing(self) -> list[SliceId]: ...
    def is_up(self, slice_id: SliceId) -> bool: ...


class AdvancingCloud(Cloud, Protocol):
    def advance(self) -> None:
        """Do what is due by the clock."""
        ...


class SimulatedFleet:
    def __init__(
        self,
        folder: Path,
        store: Store,
        *,
        zones: tuple[str, ...] = ("zone-a",),
        slices_per_user: int | None = None,
        boot_limit: timedelta = timedelta(minutes=5),
        budgets: Sequence[Budget] = (),
        other_clouds: Callable[[ManualClock], Sequence[AdvancingCloud]] = lambda clock: (),
    ) -> None:
        """`other_clouds` makes providers besides `fake`; they are tried before it."""
        self.clock = ManualClock()
        self.store = store
        self.cloud = FakeProvider(self.clock, zones=zones)
        self._other_clouds = other_clouds(self.clock)
        self.clouds: list[Cloud] = [*self._other_clouds, self.cloud]
        names = tuple(cloud.name for cloud in self.clouds)
        self.disk = Disk()
        self._users: set[str] = set()  # those that have called
        self.programs: dict[JobId, Program] = {}
        self.hosts: dict[SliceId, list[SimulatedHost]] = {}
        self.reachable = True  # agents reach the server
        self.unreachable_hosts: set[str] = set()
        self.late_hosts: set[str] = set()  # hosts that never come up
        self.heartbeat_clock_error = timedelta(0)  # of the server that receives heartbeats
        self.host_clock_error = timedelta(0)  # of the hosts; changing it steps their clocks
        self._names = (f"{number:04d}" for number in itertools.count())
        self._boots = itertools.count()
        self.server_url = "http://127.0.0.1"  # of controllers that start from now on
        self._settings = ControllerSettings(
            default_providers=names,
            zones_by_provider={cloud.name: cloud.zones for cloud in self.clouds},
            slices_per_user=slices_per_user,
            boot_timeout=boot_limit,
            budgets=tuple(budgets),
        )
        self._job_storage = JobStorage(
            snapshots=SnapshotFiles(folder / "snapshots"),
            secrets=JobSecrets(self.store, [b"k" * 32], self.clock),
            checkpoints="/checkpoints",
            providers=names,
        )
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(SameThread())
        self.times_of_reports_are_late = False
        self._heartbeats = Heartbeats(
            store, Assignments(store, self._job_storage.secrets, b"secret"), lambda: None
        )
        self.controllers = [self.new_controller("one")]
        self.invariants = Invariants(self)

    def close(self) -> None:
        self._loop.close()

    # User actions.
    def submit(self, program: Program | None = None, *, owner: str = "ann", **fields) -> JobId:
        document = {"command": ["python", "train.py"], "accelerator": "v5litepod-16", **fields}
        job_id = JobId(f"job-{len(self.programs):03d}")
        self.programs[job_id] = program or Program()
        body = json.dumps({"jobs": [{"id": job_id, "spec": document}]}).encode()
        submission.submit(self.context(owner), self._job_storage, body)
        return job_id

    def cancel(self, job: JobId, by: str = "ann") -> None:
        commands.cancel(self.context(by), self.job(job))

    def put_pool(self, **fields) -> None:
        fields = {"provider": "fake", "accelerator": "v5litepod-16", **fields}
        pool_commands.put_pool(self.context("root"), Pool(**fields), ("fake", "gke"))

    def delete_pool(self, name: str) -> None:
        pool_commands.delete_pool(self.context("root"), name)

    # Faults.
    def preempt(self, job: JobId, which: int = 0) -> None:
        self.cloud.inject(self.gang(job)[which].id, Fault.PREEMPT)

    def send_notice(self, job: JobId, which: int = 0, kind: Fault = Fault.PREEMPT_NOTICE) -> None:
        slice_id = self.gang(job)[which].id
        self.cloud.inject(slice_id, kind)
        notice = NoticeKind.PREEMPTED if kind is Fault.PREEMPT_NOTICE else NoticeKind.MAINTENANCE
        for host in self.hosts.get(slice_id, []):
            host.notice = notice

    def stall_host(self, job: JobId, index: int = 0, which: int = 0) -> None:
        self.hosts[self.gang(job)[which].id][index].stalled = True

    def kill_host(self, job: JobId, index: int = 0) -> None:
        self.cloud.inject(self.gang(job)[0].id, Fault.KILL_HOST, index)
        self.stall_host(job, index)

    def restart_agent(self, job: JobId, index: int = 0) -> None:
        """The agent and its processes are gone; a new agent starts on the same host."""
        slice_id = self.gang(job)[0].id
        self.hosts[slice_id][index] = SimulatedHost(slice_id, index, f"boot-{next(self._boots)}")

    def restart_controller(self, **settings: Any) -> None:
        """Kill it without warning; another process starts from the store, with these settings."""
        self._settings = replace(self._settings, **settings)
        self.controllers = [self.new_controller(f"again-{next(self._boots)}")]

    def new_controller(self, holder: str) -> Controller:
        return Controller(
            self.store,
            {cloud.name: cloud for cloud in self.clouds},
            self.clock,
            executor=InlineExecutor(),
            holder=holder,
            fleet="test",
            server_url=self.server_url,
            slice_token=lambda slice_id: f"token of {slice_id}",
            bootstrap_token=lambda slice_id: f"bootstrap token of {slice_id}",
            settings=self._settings,
            new_name=lambda: next(self._names),
        )

    # Time.
    def tick(self) -> None:
        """One second: hosts run and send heartbeats, then every controller ticks."""
        self.clock.advance(SECOND)
        for cloud in self._other_clouds:
            cloud.advance()
        self.run_hosts()
        self.heartbeat()
        for controller in list(self.controllers):
            controller.tick()
        self.invariants.check()

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.tick()

    def until(self, condition: Callable[[], bool], limit: int = 900) -> None:
        for _ in range(limit):
            if condition():
                return
            self.tick()
        raise AssertionError(f"not reached in {limit} s:\n{self.event_log()}")

    def until_state(self, job: JobId, state: JobState, limit: int = 900) -> None:
        self.until(lambda: self.job(job).state is state, limit)

    def settle(self, *jobs: JobId, limit: int = 3600) -> None:
        """Until these jobs (or all) have ended and only pool slices are left in the cloud."""
        awaited = jobs or tuple(self.programs)
        self.until(lambda: all(self.job(job).ended for job in awaited), limit)
        self.until(lambda: not self.unpooled_slices(), 120)

    def run_hosts(self) -> None:
        for slice_id in self.existing():
            if slice_id not in self.hosts and self.is_up(slice_id):
                accelerator = self.store.slice(slice_id).accelerator
                self.hosts[slice_id] = [
                    SimulatedHost(slice_id, index, f"boot-{next(self._boots)}")
                    for index in range(type_lookup.find(accelerator).hosts)
                    if f"{slice_id}/{index}" not in self.late_hosts
                ]
        for slice_id in list(self.hosts):
            if not self.is_up(slice_id):
                del self.hosts[slice_id]
        now = self.host_now()
        for host in self.all_hosts():
            if host.workload and not host.stalled and not host.left:
                program = self.programs[host.workload.assignment.job_id]
                host.run_second(now, program, self.disk, self._gang_runs(host))

    def heartbeat(self) -> None:
        """All hosts at the same time."""
        hosts = [
            host
            for host in self.all_hosts()
            if self.reachable
            and not (host.stalled or host.left or host.id in self.unreachable_hosts)
        ]
        replies = self._loop.run_until_complete(self._send(hosts))
        for host, reply in zip(hosts, replies, strict=True):
            host.apply_reply(reply, self.host_now())

    async def _send(self, hosts: Sequence[SimulatedHost]) -> list[HeartbeatReply]:
        now = self.clock.now() + self.heartbeat_clock_error
        heartbeats = [host.heartbeat(self.host_now(), self.disk) for host in hosts]
        replies = await asyncio.gather(*(
            self._heartbeats.receive(heartbeat, host.slice_id, now)
            for host, heartbeat in zip(hosts, heartbeats, strict=True)
        ))  # fmt: skip
        if not self.times_of_reports_are_late:
            await self._heartbeats.flush()
        return replies

    # Queries.
    def job(self, job: JobId) -> Job:
        stored = self.store.job(job)
        assert stored is not None
        return stored

    def attempts(self, job: JobId) -> list[str]:
        return [str(attempt.end_reason or attempt.state) for attempt in self.store.attempts(job)]

    def attempt(self, job: JobId) -> Attempt:
        return self.store.attempts(job)[-1]

    def failures(self, job: JobId) -> int:
        """Attempts charged to the user's failure budget."""
        return sum(
            1
            for attempt in self.store.attempts(job)
            if attempt.end_reason and END_REASONS[attempt.end_reason].budget is RetryBudget.FAILURE
        )

    def gang(self, job: JobId) -> list[TpuSlice]:
        return [item for item in self.store.slices(job_id=job) if item.live]

    def unpooled_slices(self) -> list[SliceId]:
        return [
            slice_id
            for slice_id in self.existing()
            if (stored := self.store.slice(slice_id)) is None or stored.pool is None
        ]

    def existing(self) -> list[SliceId]:
        return [slice_id for cloud in self.clouds for slice_id in cloud.existing()]

    def is_up(self, slice_id: SliceId) -> bool:
        return any(cloud.is_up(slice_id) for cloud in self.clouds)

    def all_hosts(self) -> list[SimulatedHost]:
        return [host for hosts in self.hosts.values() for host in hosts]

    def running(self, job: JobId) -> bool:
        return self.job(job).state is JobState.RUNNING

    def running_attempt(self, job: JobId) -> int | None:
        """The number of the running attempt, if any."""
        return self.attempt(job).number if self.running(job) else None

    def now(self) -> datetime:
        return self.clock.now()

    def host_now(self) -> datetime:
        """Hosts have clocks of their own, which do not step with that of the server."""
        return ManualClock().now() + self.clock.uptime() + self.host_clock_error

    def event_log(self) -> str:
        from tpufleet.stores.base import EventQuery

        start = ManualClock().now()
        return "\n".join(
            f"{(event.at - start).total_seconds():6.0f} {event.kind:8} {event.state:12} "
            f"{event.message}"
            for event in self.store.events(EventQuery(limit=10_000))
        )

    def _gang_runs(self, host: SimulatedHost) -> bool:
        """A step needs every process of the gang; a lost peer blocks the others."""
        assert host.workload is not None
        attempt = host.workload.assignment
        peers = [
            peer
            for peer in self.all_hosts()
            if peer.workload and peer.workload.assignment.attempt_id == attempt.attempt_id
        ]
        alive = [peer for peer in peers if peer.workload.running_since and not peer.stalled]
        return len(alive) == attempt.num_processes

    def context(self, who: str) -> CommandContext:
        role = Role.ADMIN if who == "root" else Role.MEMBER
        if who not in self._users:
            self.store.put_user(User(name=who, role=role, created_at=self.clock.now()))
            self._users.add(who)
        return CommandContext(
            store=self.store, caller=Caller(name=who, role=role), now=self.clock.now()
        )
