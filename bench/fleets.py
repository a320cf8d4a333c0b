"""Generated fleets: rows as a controller would have written them, in any number."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.fake_provider import FakeProvider
from tpufleet.model.fleet.hosts import Host, HostLiveness, Phase, Progress, host_id
from tpufleet.model.fleet.slices import SliceId, SliceState, TpuSlice
from tpufleet.model.job.attempts import Attempt, AttemptState, attempt_id
from tpufleet.model.job.jobs import Capacity, Job, JobId, JobSpec, JobState
from tpufleet.model.tpu import type_lookup
from tpufleet.providers.base import Order
from tpufleet.stores.base import ChangeSet, LiveState, Store

PROVIDER = "fake"
ZONES = ("us-central1-a", "us-east5-b", "europe-west4-b", "us-west4-a", "asia-southeast1-b")
OWNERS = tuple(f"person-{number}" for number in range(40))
PORT = 8476
BOOT = "benchmark-boot"


@dataclass
class Rows:
    """Everything of a fleet."""

    jobs: list[Job] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    slices: list[TpuSlice] = field(default_factory=list)
    hosts: list[Host] = field(default_factory=list)

    def live(self, **more: Sequence) -> LiveState:
        return LiveState(
            jobs=self.jobs, attempts=self.attempts, slices=self.slices, hosts=self.hosts, **more
        )


def spec(number: int, accelerator: str, **more: object) -> JobSpec:
    """No two alike, as people's jobs are."""
    return JobSpec(
        name=f"train-{number}",
        command=("python", "train.py", f"seed={number}", "lr=0.01"),
        accelerator=accelerator,
        **{
            "env": {"RUN": str(number)},
            "priority": number % 5,
            "tags": (f"sweep-{number % 100}",),
            **more,
        },
    )


def waiting_job(number: int, accelerator: str, now: datetime, **more: object) -> Job:
    return Job(
        id=JobId(f"waiting-{number:06}"),
        spec=spec(number, accelerator, **more),
        owner=OWNERS[number * 7 % len(OWNERS)],
        submitted_at=now - timedelta(hours=2) + timedelta(milliseconds=number),
        checkpoint=f"/checkpoints/waiting-{number:06}",
    )


def running(rows: Rows, count: int, accelerator: str, now: datetime, **more: object) -> None:
    """Adds jobs that run, one slice each, with their hosts."""
    first = len(rows.jobs)
    for number in range(first, first + count):
        _add_running(rows, number, accelerator, now, **more)


def _add_running(rows: Rows, number: int, accelerator: str, now: datetime, **more: object) -> None:
    job_id = JobId(f"running-{number:06}")
    began = now - timedelta(hours=1) + timedelta(milliseconds=number)
    pool = more.get("pool")
    tpu_slice = free_slice(number, accelerator, began, pool)
    job = Job(
        id=job_id,
        spec=spec(number, accelerator, **more),
        owner=OWNERS[number % len(OWNERS)],
        submitted_at=began,
        state=JobState.RUNNING,
        reason="attempt 0 runs on all hosts",
        checkpoint=f"/checkpoints/{job_id}",
    )
    attempt = Attempt(
        id=attempt_id(job_id, 0),
        job_id=job_id,
        number=0,
        slices=(tpu_slice.id,),
        created_at=began,
        state=AttemptState.RUNNING,
        running_at=began,
    )
    rows.jobs.append(job)
    rows.attempts.append(attempt)
    rows.slices.append(
        TpuSlice(
            id=tpu_slice.id,
            provider=PROVIDER,
            accelerator=accelerator,
            zone=tpu_slice.zone,
            capacity=Capacity.SPOT,
            request_group=tpu_slice.request_group,
            requested_at=began,
            pool=tpu_slice.pool,
            job_id=job_id,
            state=SliceState.READY,
            reason="ready after 94 s",
            ready_at=began,
        )
    )
    rows.hosts.extend(
        Host(
            id=host_id(tpu_slice.id, index),
            slice_id=tpu_slice.id,
            index=index,
            address=f"10.{number // 65536}.{number // 256 % 256}.{number % 256}",
            coordinator_port=PORT,
            boot=BOOT,
            attempt_id=attempt.id,
            phase=Phase.RUNNING,
            up_at=began,
        )
        for index in range(type_lookup.find(accelerator).hosts)
    )


def free_slice(
    number: int, accelerator: str, now: datetime, pool: object, zones: Sequence[str] = ZONES
) -> TpuSlice:
    return TpuSlice(
        id=SliceId(f"tpf-running-{number:06}-{number * 2654435761 % 2**32:08x}"),
        provider=PROVIDER,
        accelerator=accelerator,
        zone=zones[number % len(zones)],
        capacity=Capacity.SPOT,
        request_group=f"order-{number}",
        requested_at=now,
        pool=str(pool) if pool else None,
        state=SliceState.READY,
        reason="free",
        ready_at=now,
        idle_since=now,
    )


def pulses(rows: Rows, now: datetime) -> list[HostLiveness]:
    return [
        HostLiveness(
            host_id=host.id, seen_at=now, attempt_id=host.attempt_id, progress=progress(1, now)
        )
        for host in rows.hosts
    ]


def progress(step: int, now: datetime) -> Progress:
    return Progress(step=step, total=100_000, checkpoint_step=step // 100 * 100, at=now)


def put(rows: Rows, store: Store, now: datetime) -> None:
    """Into the store, a thousand jobs a commit."""
    for jobs in _parts(rows.jobs):
        store.commit(ChangeSet(new_jobs=jobs))
    for attempts in _parts(rows.attempts):
        store.commit(ChangeSet(attempts=attempts))
    for slices in _parts(rows.slices):
        store.commit(ChangeSet(slices=slices))
    for hosts in _parts(rows.hosts):
        store.commit(ChangeSet(hosts=hosts))
    for reports in _parts(pulses(rows, now)):
        store.record_heartbeats(reports)


def build_machines(cloud: FakeProvider, slices: Sequence[TpuSlice]) -> None:
    """Have the cloud own what the store says we hold."""
    boot, cloud.boot = cloud.boot, timedelta(0)
    for tpu_slice in slices:
        cloud.request(
            Order(
                id=tpu_slice.request_group,
                slices=(tpu_slice.id,),
                accelerator=tpu_slice.accelerator,
                zone=tpu_slice.zone,
                capacity=tpu_slice.capacity,
                tokens={},
                server_url="",
                fleet="bench",
                job_id=tpu_slice.job_id,
                pool=tpu_slice.pool,
            )
        )
    cloud.boot = boot
    cloud.requested.clear()


def now() -> datetime:
    return datetime.now(UTC)


def _parts(items: Sequence) -> Iterator[Sequence]:
    for start in range(0, len(items), 1000):
        yield items[start : start + 1000]
