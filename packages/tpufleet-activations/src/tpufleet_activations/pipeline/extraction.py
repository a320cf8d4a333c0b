"""Running a planned extraction in this process: checks, devices, worker identity, progress."""

from __future__ import annotations

import functools
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

from tpufleet import runtime
from tpufleet.errors import BadInput
from tpufleet.runtime.object_store import FolderStore
from tpufleet.runtime.units import INDEXED_UNITS, LEASE, HeldUnit, Units
from tpufleet_activations import plans
from tpufleet_activations.daemon_threads import DaemonThreads
from tpufleet_activations.input_errors import check_choice
from tpufleet_activations.inputs import sources, tokenization
from tpufleet_activations.io.file_digests import file_digest
from tpufleet_activations.io.storage import Storage, translate_disk_errors
from tpufleet_activations.model import devices, encoders, engines, program_cache, weights
from tpufleet_activations.pipeline import (
    batches,
    calibration,
    gangs,
    locations,
    preparation,
    workers,
)
from tpufleet_activations.pipeline.locations import Locations
from tpufleet_activations.pipeline.progress_meter import Meter
from tpufleet_activations.pipeline.stream_server import StreamServer
from tpufleet_activations.start_times import StartTimes
from tpufleet_activations.streams import addresses

# Threads that hash and write wait for the interpreter's lock after each piece, while one that
# prepares batches holds it for as long as it may: at Python's 5 ms, for half of the time.
SWITCH_SECONDS = 0.0002


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtractionSettings:
    """How this worker runs. What it produces is determined by the plan alone."""

    mesh: Mapping[str, int] = field(default_factory=dict)
    scope: str = "local"  # a mesh of this process's devices, or "global" over all processes
    kernel: str | None = None
    memory: str = "auto"  # or "pinned", "plain": see `host_memory.memory_kind`
    lease: timedelta = LEASE
    steal_after: timedelta | None = None
    # None: on accelerators, and other sizes of batches in long runs only; True: those too
    calibrate: bool | None = None
    compile_cache: str | None = None  # see `program_cache.open_cache`
    name: str = ""
    stream: str = ""  # the address where readers get the rows, which are not stored then
    credentials: str | None = None  # of that address
    poll: float = gangs.POLL_SECONDS
    options: workers.WorkerOptions = field(default_factory=workers.WorkerOptions)


@contextmanager
def frequent_switches() -> Iterator[None]:
    """Threads take turns more often than Python's default."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@frequent_switches()
def run(
    storage: Storage,
    settings: ExtractionSettings = ExtractionSettings(),  # noqa: B008
    *,
    model: str | None = None,
    data: str | None = None,
    should_stop: Callable[[], bool] = runtime.should_stop,
    on_progress: Callable[[Meter], None] | None = None,
) -> Meter:
    """Run this process's share of the plan until every unit is committed; or, for a stream, the
    units that readers ask for, until they have all.

    `model` and `data` are their locations on this machine, if different from the plan's.
    """
    import jax

    times = StartTimes()
    check_choice("scope", settings.scope, ("local", "global"))
    plan = plans.load(storage)
    devices.start(settings.mesh, weight_bytes=plan.weight_bytes())
    with times.measure("data"):
        resolved = locations.resolve_plan(plan, model=model, data=data)
        resolved = check_digests(plan, resolved)
    if isinstance(storage, FolderStore):
        storage.remove_stale_drafts("units", "workers")
    options = settings.options
    is_gang = settings.scope == "global" and jax.process_count() > 1
    if is_gang and settings.stream:
        raise BadInput("a stream needs --scope local: each process serves readers of its own")
    pool = preparation.PreparerPool(plan, resolved, options.preparers)
    with closing(pool) as preparers, ExitStack() as ends:
        preparers.start()
        meter = Meter(plan, start=times)
        report = ProgressReporter(on_progress)
        units = server = None
        if settings.stream:
            server = ends.enter_context(closing(_server(plan, settings, should_stop)))
        else:
            units = _units(storage, plan, settings, 0 if is_gang else runtime.context().process_id)
            committed = units.committed()
            plans.check_commits(plan, committed)
            units.index_found()
            meter.recount(sum(len(plan.sample_range(unit)) for unit in committed))

        def open_engine() -> workers.OpenedEngine:
            with times.measure("devices"):
                chosen = jax.devices() if is_gang else jax.local_devices()
            engine = engines.open_engine(
                resolved.model,
                plan.model_sites,
                architecture=resolved.architecture,
                dtype=plan.dtype,
                compute=plan.compute,
                mesh_sizes=settings.mesh,
                devices=chosen,
                kernel=settings.kernel,
                memory=settings.memory,
                packed=calibration.packs(plan, varlen=True),
                longest=plan.max_length,
                first_batches=functools.partial(_known_shapes, plan),
                cache=program_cache.open_cache(settings.compile_cache, chosen),
                times=times,
                reserve=workers.outputs_on_host(plan, options),
                encoder=encoders.Encoder(**plan.encode) if plan.encode else None,
            )
            check_weights(plan, resolved)  # they may have been replaced while they were read
            meter.peak = engine.peak_flops()
            # By default on accelerators: a CPU's rate depends on what else it does.
            wanted = settings.calibrate
            if is_gang or not (chosen[0].platform != "cpu" if wanted is None else wanted):
                return workers.OpenedEngine(engine)
            with times.measure("calibration"):
                measured = calibration.calibrate(engine, plan, storage, force=bool(wanted))
            return workers.OpenedEngine(engine, measured)

        def on_wait(held: Sequence[HeldUnit]) -> None:
            waiting, meter.waiting_for = bool(meter.waiting_for), held
            if held or waiting:
                report(meter)

        coordinator: gangs.Coordinator
        if units is None:
            assert server is not None
            coordinator = server
        else:
            coordinator = gangs.SoloCoordinator(units, should_stop, settings.poll, on_wait)
        if is_gang:
            assert units is not None
            # Devices of all processes take part in forming a gang: nothing else uses them then.
            engine: workers.OpenedEngine | Future[workers.OpenedEngine] = open_engine()
            coordinator = _gang_coordinator(storage, units, should_stop, settings.poll, on_wait)
        else:
            with DaemonThreads(1, "extract-engine") as thread:
                engine = thread.submit(open_engine)
        worker = workers.Worker(
            storage,
            plan,
            resolved,
            engine,
            coordinator,
            meter=meter,
            options=options,
            preparers=preparers,
            open_writer=None if server is None else server.open_writer,
        )
        ends.enter_context(translate_disk_errors(storage))
        leads = units is not None and not (is_gang and jax.process_index())
        if units is not None and leads:
            ends.enter_context(workers.HeartbeatThread(units, settings.lease.total_seconds() / 4))
        worker.run(report)
        if units is not None:
            if leads and plan.units >= INDEXED_UNITS and units.finished():
                units.write_index()
            # Other workers have committed units meanwhile.
            meter.recount(sum(len(plan.sample_range(unit)) for unit in units.committed()))
            report(meter)
        return meter


def _server(
    plan: plans.ExtractionPlan, settings: ExtractionSettings, should_stop: Callable[[], bool]
) -> StreamServer:
    address = addresses.parse(settings.stream)
    credentials = addresses.needed(address, settings.credentials)
    if credentials is not None:
        credentials.create_missing()
    return StreamServer(address, credentials, plan, should_stop)


def _known_shapes(plan: plans.ExtractionPlan, engine: engines.Engine) -> Iterable[batches.Batch]:
    """Empty batches of the shapes that are known before any sample is read."""
    if not calibration.packs(plan, varlen=engine.varlen):
        return []
    buckets = preparation.plan_buckets(plan)
    size = calibration.starting_size(plan, varlen=True)
    return [batches.empty_varlen(buckets, size, engine.row_multiple)]


def check_digests(plan: plans.ExtractionPlan, resolved: Locations) -> Locations:
    """Raise Conflict if the model, tokenizer or data differ from those of the plan. The result
    holds the versions of the data files that were checked."""
    versions = sources.check_data(resolved.data, plan.data_digest)
    current = tokenization.Tokenizer(resolved.tokenizer).digest()
    sources.check_digest("tokenizer", plan.tokenizer_digest, current)
    check_weights(plan, resolved)
    return replace(resolved, data=replace(resolved.data, versions=versions))


def check_weights(plan: plans.ExtractionPlan, resolved: Locations) -> None:
    current = weights.ModelCheckpoint(resolved.model).digest()
    sources.check_digest("model", plan.model_digest, current)
    if plan.encode:
        digest = file_digest(Path(plan.encode["path"]))
        sources.check_digest("encoder", plan.encode["digest"], digest)


class ProgressReporter:
    """Reports progress to the platform, and to a callback if there is one."""

    def __init__(self, callback: Callable[[Meter], None] | None):
        self._callback = callback
        self._lock = threading.Lock()  # the thread that claims units reports what it waits for

    def __call__(self, meter: Meter) -> None:
        with self._lock:
            self._report(meter)

    def _report(self, meter: Meter) -> None:
        snapshot = meter.snapshot()
        rates = {name: snapshot[name] for name in ("tokens_per_second", "mfu")}
        runtime.progress(
            snapshot["samples"],
            total=snapshot["total"],
            checkpoint_step=snapshot["samples"],
            message=snapshot["waiting"]
            or (f"limited by {snapshot['limit']}" if snapshot["limit"] else ""),
            units=snapshot["units"],
            **{name: rate for name, rate in rates.items() if rate is not None},
        )
        if self._callback is not None:
            self._callback(meter)


def _units(
    storage: Storage, plan: plans.ExtractionPlan, settings: ExtractionSettings, process: int
) -> Units:
    """In a job, a worker keeps its name over attempts and takes its own units back at once. Outside
    a job every run has a new name, so that two on one machine are never confused. Runs with the
    same name are told apart by incarnation."""
    context = runtime.context()
    if settings.name:
        name = settings.name
    elif context.alone:
        name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    else:
        name = f"{context.job_id}-{context.slice_index}-{process}"
    return Units(
        storage,
        count=plan.units,
        worker=name,
        incarnation=time.time_ns() if context.alone else context.attempt,
        lease=settings.lease,
        steal_after=settings.steal_after,
        indexed=True,
    )


def _gang_coordinator(
    storage: Storage,
    units: Units,
    should_stop: Callable[[], bool],
    poll: float,
    on_wait: Callable[[Sequence[HeldUnit]], None],
) -> gangs.Coordinator:
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    # A new gang id for each run: messages of an earlier run must not be read as this one's.
    own_id = np.frombuffer(uuid.uuid4().bytes, np.uint8).astype(np.int32)
    gang = bytes(np.asarray(multihost_utils.broadcast_one_to_all(own_id)).astype(np.uint8)).hex()
    part, parts = jax.process_index(), jax.process_count()
    if part == 0:
        return gangs.GangLeader(
            units, should_stop, gang=gang, parts=parts, poll=poll, on_wait=on_wait
        )
    return gangs.GangMember(storage, gang=gang, part=part, parts=parts, poll=poll)
