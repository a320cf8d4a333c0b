"""From a planned dataset to a running worker: checks, devices, identity, progress."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from tpufleet import runtime
from tpufleet.errors import BadInput, Conflict
from tpufleet.runtime.units import LEASE, Commit, Units
from tpufleet.workloads.activations import inputs, plans, tokenizing
from tpufleet.workloads.activations.io import remote_files
from tpufleet.workloads.activations.io.storage import Storage
from tpufleet.workloads.activations.model import engines, weights
from tpufleet.workloads.activations.pipeline import gangs, workers
from tpufleet.workloads.activations.pipeline.progress_meter import Meter


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtractionSettings:
    """How this worker runs. The plan says what is made; nothing here may change it."""

    compute: str = "bf16"
    mesh: Mapping[str, int] = field(default_factory=dict)
    scope: str = "local"  # a mesh of this process's devices, or "global" over all processes
    kernel: str | None = None
    memory: str = "auto"  # or "pinned", "plain": see `engines.landing`
    lease: timedelta = LEASE
    steal_after: timedelta | None = None
    name: str = ""
    poll: float = gangs.POLL_SECONDS
    options: workers.WorkerOptions = field(default_factory=workers.WorkerOptions)


def run(
    storage: Storage,
    settings: ExtractionSettings = ExtractionSettings(),  # noqa: B008
    *,
    model: str | None = None,
    data: str | None = None,
    should_stop: Callable[[], bool] = runtime.should_stop,
    on_progress: Callable[[Meter], None] | None = None,
) -> Meter:
    """Run this process's share of the dataset's plan until everything is committed.

    `model` and `data` say where these lie on this machine, if not where they were planned.
    """
    import jax

    plan = _located(plans.load(storage), model, data)
    folder = remote_files.model_folder(plan.model)
    check_digests(plan, folder)
    if settings.scope not in ("local", "global"):
        raise BadInput(f"scope is {settings.scope!r}; choose local or global")
    together = settings.scope == "global" and jax.process_count() > 1
    engine = engines.open_engine(
        folder,
        plan.sites,
        dtype=plan.dtype,
        compute=settings.compute,
        mesh_sizes=settings.mesh,
        devices=jax.devices() if together else jax.local_devices(),
        kernel=settings.kernel,
        memory=settings.memory,
    )
    units = _units(storage, plan, settings, jax.process_index() if not together else 0)
    committed = units.committed()
    check_compute_dtype(committed.values(), settings.compute)
    before = sum(len(plan.sample_range(unit)) for unit in committed)
    meter = Meter(plan, samples_before=before, peak=engine.peak_flops())
    report = ProgressReporter(on_progress)
    crew: workers.Coordinator = gangs.SoloCoordinator(units, should_stop, settings.poll)
    if together:
        crew = _crew(storage, units, should_stop, settings.poll)
    worker = workers.Worker(storage, plan, engine, crew, meter=meter, options=settings.options)
    if together and jax.process_index():
        return worker.run(report)
    with workers.HeartbeatThread(units, settings.lease.total_seconds() / 4):
        return worker.run(report)


def check_digests(plan: plans.ExtractionPlan, folder: Any) -> None:
    """A plan made for one model and one dataset is not run with others."""
    words = tokenizing.Tokenizer(remote_files.model_folder(plan.tokenizer))
    found = {
        "model": (plan.model_digest, weights.Checkpoint(folder).digest()),
        "tokenizer": (plan.tokenizer_digest, words.digest()),
        "data": (plan.data_digest, inputs.open_source(plan.data, plan.seed).digest()),
    }
    for what, (planned, now) in found.items():
        if planned != now:
            raise Conflict(f"the {what} is not the one that the plan was made for; plan again")


def check_compute_dtype(committed: Iterable[Commit], compute: str) -> None:
    """Units that were computed in different types are not one dataset."""
    other = {commit.outcome.get("compute") for commit in committed} - {compute, "", None}
    if other:
        raise Conflict(
            f"this dataset was begun with --compute {other.pop()}; go on with that, "
            "or choose another folder"
        )


def _located(
    plan: plans.ExtractionPlan, model: str | None, data: str | None
) -> plans.ExtractionPlan:
    """The plan with places of this machine. Places are no part of a plan's identity."""
    if model is not None:
        beside = plan.tokenizer == plan.model
        plan = replace(plan, model=model, tokenizer=model if beside else plan.tokenizer)
    return plan if data is None else replace(plan, data={**plan.data, "path": data})


class ProgressReporter:
    """Tells the platform, and whoever else asks, how far this worker is."""

    def __init__(self, also: Callable[[Meter], None] | None):
        self._also = also

    def __call__(self, meter: Meter) -> None:
        facts = meter.snapshot()
        runtime.progress(
            facts["samples"],
            total=facts["total"],
            checkpoint_step=facts["samples"],
            message=f"limited by {facts['limit']}" if facts["limit"] else "",
            tokens_per_second=facts["tokens_per_second"],
            mfu=facts["mfu"] or 0.0,
            units=facts["units"],
        )
        if self._also is not None:
            self._also(meter)


def _units(
    storage: Storage, plan: plans.ExtractionPlan, settings: ExtractionSettings, process: int
) -> Units:
    """Inside the platform a worker keeps its name over attempts, and takes its units back at once;
    alone its name is new each time, so that two on one machine are never mistaken for one. Who is
    given a name is told from the one before by the time at which it began."""
    here = runtime.context()
    if settings.name:
        name = settings.name
    elif here.alone:
        name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    else:
        name = f"{here.job_id}-{here.slice_index}-{process}"
    return Units(
        storage,
        count=plan.units,
        worker=name,
        incarnation=time.time_ns() if here.alone else here.attempt,
        lease=settings.lease,
        steal_after=settings.steal_after,
    )


def _crew(
    storage: Storage, units: Units, should_stop: Callable[[], bool], poll: float
) -> workers.Coordinator:
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    # The gang's name is new each time: news of an earlier run must not be taken for today's.
    mine = np.frombuffer(uuid.uuid4().bytes, np.uint8).astype(np.int32)
    gang = bytes(np.asarray(multihost_utils.broadcast_one_to_all(mine)).astype(np.uint8)).hex()
    part, parts = jax.process_index(), jax.process_count()
    if part == 0:
        return gangs.GangLeader(units, should_stop, gang=gang, parts=parts, poll=poll)
    return gangs.GangMember(storage, gang=gang, part=part, parts=parts, poll=poll)
