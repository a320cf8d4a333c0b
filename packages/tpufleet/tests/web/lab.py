"""The server of a lab of five people, with jobs of some days, over a cloud in memory.

    python -m tests.web.lab HOME [--ended 10000]

serves it from the state folder HOME. Tests of the page and the pictures in the docs use it: nothing
is simulated but the cloud and the hosts, so pages show what they show to a lab.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import math
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from msgspec import structs

from tests.fake_provider import FakeProvider
from tests.polling import Patience
from tests.repository import TEST_ROOTS
from tpufleet.client import snapshots
from tpufleet.client.fleet import FleetClient
from tpufleet.clocks import SystemClock
from tpufleet.compose import control_plane
from tpufleet.config import Config
from tpufleet.model.events import Event, EventKind
from tpufleet.model.fleet.hosts import Host, HostLiveness, Phase, Progress, host_id
from tpufleet.model.fleet.inventory import InventoryNote
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.fleet.reservations import Reservation
from tpufleet.model.fleet.slices import LossReason, SliceId, SliceState, TpuSlice
from tpufleet.model.job.attempts import Attempt, AttemptState, attempt_id
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.model.job.jobs import Capacity, Job, JobId, JobSpec, JobState, ParentRelation
from tpufleet.model.job.metric_points import MetricPoint
from tpufleet.model.people.preferences import Preferences
from tpufleet.model.people.users import Role, Token, User
from tpufleet.model.tpu import type_lookup
from tpufleet.providers.base import Order
from tpufleet.service.transport import auth
from tpufleet.stores.base import ChangeSet, Store
from tpufleet.stores.open_store import open_store

PROVIDER = "tpu-vm"
CENTRAL, WEST, EUROPE = "us-central1-a", "us-west4-a", "europe-west4-b"
ZONES = (CENTRAL, WEST, EUROPE)
USERS = {
    "ada": Role.ADMIN, "grace": Role.MEMBER, "linus": Role.MEMBER, "mei": Role.MEMBER,
    "tomas": Role.VIEWER,
}  # fmt: skip
HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)
BEAT_SECONDS = 5.0
STEPS_PER_SECOND = 3.0
STARTS_WITHIN = 180.0  # seconds; the machine may be busy with other tests
TRAIN = """import jax
import optax

def main(lr={lr}, batch={batch}):
    optimizer = optax.adamw(lr, weight_decay=1e-4)
    state = create_state(optimizer)
    for step in range(20_000):
        state, loss = train_step(state, next(data))
        runtime.progress(step, total=20_000, loss=loss){extra}
"""


@dataclass(frozen=True, kw_only=True)
class LabJob:
    """One line of the story; times are hours before now."""

    name: str
    owner: str
    kind: str = "v5litepod-16"
    zone: str = CENTRAL
    state: JobState = JobState.RUNNING
    began: float = 5.0  # hours ago
    lasted: float = 3.0  # hours, of ended jobs
    reason: str = "attempt runs on all hosts"
    end: EndReason | None = None
    message: str = ""
    preempted: int = 0  # earlier attempts
    loss: float = 0.6  # where its curve ends
    steps: int = 12_000
    pool: str | None = None
    tags: tuple[str, ...] = ()
    notes: str = ""
    capacity: Capacity = Capacity.SPOT
    lr: str = "0.01"
    batch: str = "256"
    extra: str = ""
    parent: str | None = None
    priority: int = 0
    timeout: timedelta | None = None
    advice: str = ""
    node: str = ""  # adopted, on which it runs

    @property
    def id(self) -> JobId:
        letters = random.Random(self.name).choices("abcdefghijklmnopqrstuvwxyz234567", k=12)
        return JobId("".join(letters))


BUSY_NODE = "linus-by-hand"  # another, on which a job runs

LAB: tuple[LabJob, ...] = (
    LabJob(name="vit-l16-imagenet21k", owner="grace", tags=("vision", "paper"), preempted=2,
           began=9),
    LabJob(name="gemma-2b-finetune-lora-r16-alpha32-warmup500-seed1234", owner="mei", zone=WEST,
           kind="v5litepod-64", tags=("gemma", "lora", "sweep-7"), preempted=1, began=14, loss=1.31,
           notes="repeat of the run that diverged at step 900; gradient clipping at 0.5"),
    LabJob(name="gemma-2b-eval", owner="mei", zone=WEST, kind="v5litepod-8", began=0.4, loss=1.2),
    LabJob(name="diffusion-256", owner="linus", zone=EUROPE, kind="v5litepod-32", began=22,
           preempted=3, tags=("diffusion",), loss=0.21),
    LabJob(name="diffusion-256-ema", owner="linus", zone=EUROPE, kind="v5litepod-32", began=3,
           tags=("diffusion", "ema"), loss=0.24),
    LabJob(name="lab-baseline", owner="grace", pool="lab", began=4, lr="0.01", loss=0.43,
           timeout=8 * HOUR, tags=("sweep-lr",), capacity=Capacity.ON_DEMAND),
    LabJob(name="lab-sweep-lr-3e-3", owner="grace", pool="lab", began=4, lr="0.003", loss=0.36,
           timeout=8 * HOUR, tags=("sweep-lr",), parent="lab-baseline",
           extra="\n        state = clip(state, 0.5)", capacity=Capacity.ON_DEMAND),
    LabJob(name="lab-sweep-lr-1e-3", owner="linus", pool="lab", began=2, lr="0.001", loss=0.52,
           timeout=6 * HOUR, tags=("sweep-lr",), batch="512", capacity=Capacity.ON_DEMAND),
    LabJob(name="tokenizer-tests", owner="ada", pool="lab", began=0.7, loss=2.1,
           timeout=2 * HOUR, capacity=Capacity.ON_DEMAND),
    LabJob(name="kernels-on-a-node", owner="mei", kind="v4-8", pool="by-hand", began=0.5, loss=1.7,
           node=BUSY_NODE, capacity=Capacity.ON_DEMAND),
    LabJob(name="queue-ablation-depth-24", owner="mei", pool="lab", state=JobState.QUEUED,
           reason="submitted", began=1.5, timeout=4 * HOUR),
    LabJob(name="queue-ablation-depth-12", owner="mei", pool="lab", state=JobState.QUEUED,
           reason="submitted", began=1.4, timeout=4 * HOUR),
    LabJob(name="queue-distill", owner="grace", pool="lab", state=JobState.QUEUED,
           reason="submitted", began=1.0, priority=1, timeout=2 * HOUR),
    LabJob(name="moe-8x7b-pretrain", owner="linus", kind="v6e-256", state=JobState.QUEUED,
           reason="submitted", began=2.5, tags=("moe",)),
    LabJob(name="resnet-50-reference", owner="grace", state=JobState.SUCCEEDED, began=30, lasted=6,
           end=EndReason.FINISHED, message="exit status 0 on all hosts", reason="finished",
           preempted=1, steps=20_000, loss=0.31, tags=("vision", "paper")),
    LabJob(name="llama-7b-out-of-memory", owner="mei", state=JobState.FAILED, began=27, lasted=0.3,
           end=EndReason.OUT_OF_HBM, kind="v5litepod-8", steps=3, loss=7.1,
           reason="out of HBM on host 0: RESOURCE_EXHAUSTED: Attempting to allocate 18.2G",
           message="exit status 1 on host 0 (rank 0): RESOURCE_EXHAUSTED: Attempting to allocate "
           "18.2G. That was not possible. There are 15.4G free.",
           advice="reduce the batch size, or shard the model over more chips"),
    LabJob(name="data-pipeline-typo", owner="linus", state=JobState.FAILED, began=20, lasted=0.1,
           end=EndReason.USER_ERROR, steps=1, reason="exit status 1 on host 2 (rank 2)",
           message="exit status 1 on host 2 (rank 2): KeyError: 'label'"),
    LabJob(name="diffusion-128-cancelled", owner="linus", state=JobState.CANCELLED, began=40,
           lasted=2, end=EndReason.CANCELLED, reason="cancelled by linus", loss=0.5),
    LabJob(name="eval-nightly", owner="ada", state=JobState.SUCCEEDED, began=12, lasted=1,
           end=EndReason.FINISHED, reason="finished", message="exit status 0 on all hosts",
           kind="v5litepod-4", steps=500, loss=0.9, tags=("nightly",)),
)  # fmt: skip
_BY_NAME = {each.name: each for each in LAB}
POOLS = (
    Pool(name="lab", provider=PROVIDER, accelerator="v5litepod-16", largest=4, zones=(CENTRAL,),
         capacity=(Capacity.ON_DEMAND,), slices_per_user=2, hold_after_failure=30 * MINUTE),
    Pool(name="paper-deadline", provider=PROVIDER, accelerator="v4-32", largest=2,
         members=("ada", "grace", "mei"), capacity=(Capacity.SPOT, Capacity.ON_DEMAND)),
    Pool(name="by-hand", provider=PROVIDER, accelerator="v4-8", largest=2, zones=(CENTRAL,),
         capacity=(Capacity.ON_DEMAND,)),
)  # fmt: skip
ADOPTED = SliceId("tpf-by-hand-4d2f")  # mei-by-hand, a node that a person made
RESERVED = "demo4"  # an active reservation


def fill(store: Store, now: datetime, code: dict[str, str], ended: int = 0) -> None:
    """`code`: digests of snapshots by name of the job."""
    for name, role in USERS.items():
        store.put_user(User(name=name, role=role, created_at=now - timedelta(days=90)))
        hashed = auth.token_hash(token_of(name))
        created = now - timedelta(days=30)
        store.put_token(
            Token(id=f"{name}-laptop", user=name, hash=hashed, created_at=created, note="laptop")
        )
    store.commit(ChangeSet(pools=POOLS))
    for start in range(0, ended, 2_000):
        numbers = range(start, min(start + 2_000, ended))
        jobs = [_old_job(number, now) for number in numbers]
        store.commit(ChangeSet(new_jobs=jobs))
        store.commit(ChangeSet(attempts=[_old_attempt(job) for job in jobs]))
    for each in LAB:
        _add(store, each, now, code.get(each.name))
    store.commit(ChangeSet(slices=_free_slices(now)))
    for reservation in _reservations(now):
        store.update_document(Reservation, reservation.id, lambda _, new=reservation: new)
    first = store.slices(job_id=_BY_NAME["diffusion-256"].id)[0]
    note = InventoryNote(id=first.id, alias="euro-1", note="keep: profiling", belongs_to="vision")
    store.update_document(InventoryNote, note.id, lambda _: note)
    view = Preferences(owner="ada", views={"sweeps": "tag:sweep-*", "paper": "tag:paper since:30d"})
    store.update_document(Preferences, "ada", lambda _: view)


def _free_slices(now: datetime) -> list[TpuSlice]:
    """One that no job uses, one that is held for the owner of a job that failed, and a node that a
    person made."""
    free = TpuSlice(
        id=SliceId("tpf-paper-7c1e"), provider=PROVIDER, accelerator="v4-32", zone=CENTRAL,
        capacity=Capacity.SPOT, request_group="order-free", requested_at=now - HOUR,
        pool="paper-deadline", state=SliceState.READY, reason="free", up_at=now - HOUR,
        ready_at=now - HOUR, idle_since=now,
    )  # fmt: skip
    held = replace(
        free, id=SliceId("tpf-paper-9b40"), request_group="order-held", reason="held for grace",
        reserved_for="grace", reserved_until=now + 25 * MINUTE,
    )  # fmt: skip
    adopted = replace(
        free, id=ADOPTED, request_group=ADOPTED, pool="by-hand", accelerator="v4-8",
        capacity=Capacity.ON_DEMAND, node="mei-by-hand", reason="ada adopted mei-by-hand",
    )  # fmt: skip
    return [free, held, adopted]


def token_of(name: str) -> str:
    return f"tpf_token-of-{name}-in-the-lab-that-only-tests-and-pictures-use"


def _old_job(number: int, now: datetime) -> Job:
    owner = list(USERS)[number % 4]
    at = now - timedelta(days=3) - number * MINUTE
    good = number % 9 != 0
    return Job(
        id=JobId(f"old{number:08}"),
        spec=JobSpec(
            name=f"sweep-{number // 100}-run-{number % 100}",
            command=("python", "train.py", f"seed={number}"),
            accelerator="v5litepod-8",
            tags=(f"sweep-{number // 100}",),
        ),
        owner=owner,
        submitted_at=at,
        state=JobState.SUCCEEDED if good else JobState.FAILED,
        reason="finished" if good else "exit status 1 on host 0 (rank 0)",
        ended_at=at + HOUR,
        end_reason=EndReason.FINISHED if good else EndReason.USER_ERROR,
    )


def _old_attempt(job: Job) -> Attempt:
    return Attempt(
        id=attempt_id(job.id, 0), job_id=job.id, number=0, slices=(SliceId(f"tpf-{job.id}"),),
        created_at=job.submitted_at, running_at=job.submitted_at + MINUTE, ended_at=job.ended_at,
        state=AttemptState.ENDED, end_reason=job.end_reason, message=job.reason, start_step=0,
        last_step=1000, total_steps=1000, metrics={"loss": 0.5 + (hash(job.id) % 100) / 100},
    )  # fmt: skip


def _add(store: Store, each: LabJob, now: datetime, snapshot: str | None) -> None:
    submitted = now - each.began * HOUR
    ended_at = submitted + each.lasted * HOUR if each.end is not None else None
    parent = _BY_NAME[each.parent].id if each.parent else None
    job = Job(
        id=each.id,
        spec=JobSpec(
            name=each.name,
            command=("python", "train.py", f"lr={each.lr}", f"batch={each.batch}"),
            accelerator=each.kind, tags=each.tags, notes=each.notes, pool=each.pool,
            capacity=(each.capacity,), priority=each.priority, timeout=each.timeout,
            zones=() if each.state is not JobState.QUEUED or each.pool else ZONES,
        ),
        owner=each.owner,
        submitted_at=submitted,
        state=each.state,
        reason=each.reason,
        snapshot=snapshot,
        checkpoint=f"gs://lab-checkpoints/{each.id}",
        parent=parent,
        parent_relation=ParentRelation.RERUN if parent else None,
        ended_at=ended_at,
        end_reason=each.end,
        advice=each.advice,
    )  # fmt: skip
    store.commit(ChangeSet(new_jobs=[job], events=[_event(job, "queued", "submitted", submitted)]))
    if each.state is JobState.QUEUED:
        return
    until = ended_at or now
    spans = _spans(submitted, until, each.preempted)
    for number, (start, end) in enumerate(spans):
        last = number == len(spans) - 1
        _add_attempt(store, each, job, number, start, end if not last else ended_at, now)
    store.record_metrics(_curve(each, job, submitted, until))


def _spans(start: datetime, end: datetime, breaks: int) -> list[tuple[datetime, datetime]]:
    """Of attempts, with some minutes between them."""
    length = (end - start) / (breaks + 1)
    return [
        (start + index * length + 3 * MINUTE, start + (index + 1) * length)
        for index in range(breaks + 1)
    ]


def _add_attempt(
    store: Store, each: LabJob, job: Job, number: int, start: datetime, end: datetime | None,
    now: datetime,
) -> None:  # fmt: skip
    slice_id = SliceId(f"tpf-{job.id}-{number}")
    final = end is None or number == each.preempted
    reason = (each.end if final else EndReason.PREEMPTED) if end is not None else None
    steps = each.steps // (each.preempted + 1)
    first, last = number * steps, (number + 1) * steps
    attempt = Attempt(
        id=attempt_id(job.id, number), job_id=job.id, number=number, slices=(slice_id,),
        created_at=start, running_at=start + 2 * MINUTE, ended_at=end,
        state=AttemptState.RUNNING if end is None else AttemptState.ENDED,
        end_reason=reason,
        message="" if end is None else each.message if final
        else f"slice {slice_id} was preempted in {each.zone}",
        start_step=first,
        **({} if end is None else {
            "last_step": last, "total_steps": 20_000, "metrics": {"loss": each.loss},
            "checkpoint_step": last if reason is EndReason.FINISHED else last - steps // 20,
        }),
    )  # fmt: skip
    gone = end + MINUTE if end is not None else None
    tpu_slice = TpuSlice(
        id=slice_id, provider=PROVIDER, accelerator=each.kind, zone=each.zone,
        capacity=each.capacity, request_group=f"order-{slice_id}", requested_at=start - MINUTE,
        pool=each.pool, job_id=job.id, up_at=start, ready_at=start + MINUTE,
        state=SliceState.READY if end is None else SliceState.GONE,
        reason="all hosts are up" if end is None else "deleted",
        loss=None if final else LossReason.PREEMPTED, lost_at=end, gone_at=gone, node=each.node,
    )  # fmt: skip
    events = [
        _event(job, "ready", f"slice {slice_id}: all hosts are up", start + MINUTE, slice_id),
        _event(job, "running", f"attempt {number} runs on all hosts", start + 2 * MINUTE),
    ]
    if end is not None:
        state = job.state if final else "preempted"
        events.append(_event(job, state, attempt.message or job.reason, end, slice_id))
    if end is None:
        store.commit(ChangeSet(hosts=_hosts(tpu_slice, attempt)))
    store.commit(ChangeSet(attempts=[attempt], slices=[tpu_slice], events=events))


def _hosts(tpu_slice: TpuSlice, attempt: Attempt) -> list[Host]:
    return [
        Host(
            id=host_id(tpu_slice.id, index), slice_id=tpu_slice.id, index=index,
            address=f"10.128.{len(tpu_slice.id) % 20}.{index + 2}", coordinator_port=8476,
            boot="boot", attempt_id=attempt.id, phase=Phase.RUNNING, up_at=tpu_slice.ready_at,
        )
        for index in range(type_lookup.find(tpu_slice.accelerator).hosts)
    ]  # fmt: skip


def _event(
    job: Job, state: str, message: str, at: datetime, slice_id: SliceId | None = None
) -> Event:
    kind = EventKind.JOB if slice_id is None else EventKind.SLICE
    return Event(at=at, kind=kind, state=state, message=message, job_id=job.id,
                 slice_id=slice_id, pool=job.spec.pool)  # fmt: skip


def loss_at(each: LabJob, step: int) -> float:
    noise = math.sin(step * 0.7 + len(each.name)) * 0.02 + math.sin(step * 0.013) * 0.015
    return each.loss * (1 + noise) + 4.2 * math.exp(-step / (300 + 2500 * each.loss))


def accuracy_at(each: LabJob, step: int) -> float:
    return max(0.0, 0.9 - loss_at(each, step) / 3)


def _curve(each: LabJob, job: Job, begin: datetime, end: datetime) -> Sequence[MetricPoint]:
    count = min(200, each.steps)
    return [
        MetricPoint(
            job_id=job.id, at=begin + (end - begin) * index / count,
            step=(step := each.steps * index // count),
            values={"loss": loss_at(each, step), "accuracy": accuracy_at(each, step)},
        )
        for index in range(count)
    ]  # fmt: skip


def _reservations(now: datetime) -> list[Reservation]:
    def made(name: str, pool: str, owner: str, slices: int, start: float, hours: float, note: str):
        starts = (now + start * HOUR).replace(minute=0, second=0, microsecond=0)
        return Reservation(id=name, pool=pool, slices=slices, owner=owner, starts_at=starts,
                           ends_at=starts + hours * HOUR, created_at=now, note=note)  # fmt: skip

    return [
        made("demo1", "lab", "grace", 2, 20, 6, "demo for visitors"),
        made("demo2", "lab", "mei", 2, 22, 12, "ablations"),
        made("demo3", "lab", "linus", 4, 50, 24, "profiling week"),
        made(RESERVED, "paper-deadline", "grace", 1, -2, 30, "camera ready"),
        made("demo5", "paper-deadline", "mei", 1, 30, 40, "rebuttal runs"),
        made("demo6", "paper-deadline", "ada", 2, 90, 20, "maintenance"),
    ]


def beat(store: Store, stop: threading.Event) -> None:
    """What the agents of the hosts would report."""
    began = time.monotonic()
    live = {each.id: each for each in LAB if each.end is None}
    while not stop.is_set():
        now, reports = datetime.now(UTC), []
        for tpu_slice in store.slices():
            each = live.get(tpu_slice.job_id) if tpu_slice.job_id is not None else None
            for host in store.hosts(tpu_slice.id) if each is not None else ():
                step = each.steps + int((time.monotonic() - began) * STEPS_PER_SECOND)
                progress = Progress(
                    step=step, total=20_000, checkpoint_step=step // 500 * 500, at=now,
                    metrics={"loss": loss_at(each, step), "accuracy": accuracy_at(each, step)},
                )  # fmt: skip
                reports.append(
                    HostLiveness(
                        host_id=host.id, seen_at=now, attempt_id=host.attempt_id, progress=progress
                    )
                )
        store.record_heartbeats(reports)
        stop.wait(BEAT_SECONDS)


def serve(home: Path, ended: int, listen: str | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    budgets: dict[str, Any] = {"users": {"grace": 900, "mei": 1500, "linus": 1200, "*": 300}}
    settings = Config(
        home=home, config_file=home / "config.yaml", providers=(PROVIDER,), budgets=budgets
    )
    if listen is not None:
        settings = structs.replace(settings, listen=listen)
    cloud = FakeProvider(SystemClock(), name=PROVIDER, zones=ZONES)
    with contextlib.closing(open_store(settings.store_url)) as store:
        fill(store, datetime.now(UTC), write_code(home), ended)
        cloud.boot = timedelta(0)
        for each in store.slices():
            cloud.request(
                Order(id=each.request_group, slices=(each.id,), accelerator=each.accelerator,
                      zone=each.zone, capacity=each.capacity, tokens={}, server_url="",
                      fleet="lab", job_id=each.job_id, pool=each.pool)
            )  # fmt: skip
        cloud.stock = {(zone, name): 0 for zone in ZONES for name in type_lookup.all_types()}
        stop = threading.Event()
        agents = threading.Thread(target=beat, args=(store, stop), daemon=True)
        agents.start()
        control_plane.ControlPlane(settings, store, {PROVIDER: cloud}).run()
        stop.set()
        agents.join()


def write_code(home: Path) -> dict[str, str]:
    """The snapshots of the sweep, where the server keeps them. Returns their digests."""
    digests: dict[str, str] = {}
    target = home / "snapshots"
    target.mkdir(parents=True, exist_ok=True)
    for each in LAB:
        if "sweep-lr" not in each.tags:
            continue
        with tempfile.TemporaryDirectory() as folder:
            text = TRAIN.format(lr=each.lr, batch=each.batch, extra=each.extra)
            (Path(folder) / "train.py").write_text(text)
            (Path(folder) / "README.md").write_text("# Sweep\n")
            scan, out = snapshots.scan(folder), io.BytesIO()
            snapshots.pack(scan, out)
        (target / f"{scan.digest}.tar.gz").write_bytes(out.getvalue())
        digests[each.name] = scan.digest
    return digests


@dataclass(frozen=True, kw_only=True)
class LabServer:
    url: str
    pid: int

    def client(self, name: str = "ada") -> FleetClient:
        return FleetClient(self.url, token_of(name), timeout=900)


@contextlib.contextmanager
def lab_server(home: Path, ended: int = 0) -> Iterator[LabServer]:
    """The server in a process of its own."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.web.lab", str(home), "--ended", str(ended)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, TEST_ROOTS))}
    with (home / "lab.log").open("wb") as log:
        child = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
    try:
        yield LabServer(url=_until_serving(child, home), pid=child.pid)
    finally:
        child.terminate()
        try:
            child.wait(timeout=900)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _until_serving(child: subprocess.Popen[bytes], home: Path) -> str:
    patience = Patience(STARTS_WITHIN)
    while not patience.is_over and child.poll() is None:
        with contextlib.suppress(OSError, ValueError):
            return str(json.loads((home / "server.json").read_text())["url"])
        time.sleep(0.05)
    raise RuntimeError(f"the server did not start:\n{(home / 'lab.log').read_text()[-3000:]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("home", type=Path)
    parser.add_argument("--ended", type=int, default=0, help="jobs that ended some days ago")
    parser.add_argument("--listen")
    options = parser.parse_args()
    os.umask(0o077)
    serve(options.home, options.ended, options.listen)
