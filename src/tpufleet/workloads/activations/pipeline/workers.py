"""One worker: claims units, runs them through the model, writes and commits them concurrently.

prepare -> compute -> fetch -> write -> commit: stages joined by bounded queues, so that devices do
not wait for disks and memory stays bounded when a disk is slow. A pool of writer threads hashes
and writes pieces of several shards at once.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from tpufleet.errors import BadInput, Fenced
from tpufleet.runtime.units import Claim, Units
from tpufleet.workloads.activations import plans
from tpufleet.workloads.activations.io import shard_writer, unit_writer
from tpufleet.workloads.activations.io.storage import Storage
from tpufleet.workloads.activations.model import engines
from tpufleet.workloads.activations.pipeline import batches, preparation, stages
from tpufleet.workloads.activations.pipeline.gangs import Outcome
from tpufleet.workloads.activations.pipeline.locations import Locations
from tpufleet.workloads.activations.pipeline.progress_meter import Meter

log = logging.getLogger(__name__)


class Coordinator(Protocol):
    """Decides which units this process runs, and commits them: see `gangs`."""

    @property
    def part(self) -> int: ...

    @property
    def parts(self) -> int: ...

    def claims(self) -> Iterator[Claim | None]: ...

    def should_stop(self) -> bool: ...

    def commit(self, claim: Claim, file: Mapping[str, Any], outcome: Outcome) -> None: ...


class ModelEngine(Protocol):
    """What a worker needs of `engines.Engine`."""

    @property
    def compute_type(self) -> str: ...

    @property
    def row_multiple(self) -> int: ...

    def start(self, batch: batches.Batch) -> Callable[[], list[engines.OutputBlock]]: ...

    def rows(self, count: int) -> frozenset[int]: ...

    def flops(self, batch: batches.Batch) -> float: ...

    def peak_flops(self) -> float | None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOptions:
    """Concurrency and queue sizes. None of it changes what is written."""

    preparers: int = 0  # tokenizing processes; 0: one thread
    prefetch_units: int = 2  # prepared before they are needed
    batches_in_flight: int = 2  # on the devices
    batches_fetched: int = 2  # in host memory, waiting to be written
    writers: int = 8  # threads that hash and write
    backlog: int = 64  # pieces waiting for a writer
    committers: int = 2  # units flushed and committed concurrently


@dataclass(frozen=True, slots=True)
class _Step:
    """A batch in the pipeline, or with `batch` None the end of a unit; `drop` means not to
    commit that unit."""

    claim: Claim
    prepared: preparation.PreparedUnit
    batch: batches.Batch | None = None
    fetch: Callable[[], list[engines.OutputBlock]] | None = None
    blocks: Sequence[engines.OutputBlock] = ()
    drop: bool = False


class Worker:
    def __init__(
        self,
        storage: Storage,
        plan: plans.ExtractionPlan,
        locations: Locations,
        engine: ModelEngine,
        coordinator: Coordinator,
        *,
        meter: Meter | None = None,
        options: WorkerOptions = WorkerOptions(),  # noqa: B008
    ):
        self._storage, self._plan, self._locations = storage, plan, locations
        self._engine, self._coordinator, self._options = engine, coordinator, options
        self.meter = meter or Meter(plan, peak=engine.peak_flops())
        self._writer: unit_writer.UnitWriter | None = None  # of the unit being written
        self._unfinished: set[unit_writer.UnitWriter] = set()
        self._writer_pool = shard_writer.WriterPool(options.writers, options.backlog)

    def run(self, on_progress: Callable[[Meter], None] = lambda meter: None) -> Meter:
        """Run until every unit is committed, or until asked to stop."""
        pipeline, options = stages.Pipeline(), self._options
        preparers = preparation.PreparerPool(
            self._plan, self._locations, self._engine.row_multiple, options.preparers
        )
        sizes = (1, options.batches_in_flight, options.batches_fetched, 1)
        ready, computed, fetched, written = (stages.StageQueue(pipeline, size) for size in sizes)
        self.meter.attach(
            pipeline, {"ready": ready, "computed": computed, "fetched": fetched, "written": written}
        )
        for name, process, source, output, threads in (
            ("prepare", _await, self._submitted(pipeline, preparers), ready, 1),
            ("fetch", _fetch, computed, fetched, 1),
            ("write", self._write, fetched, written, 1),
            ("commit", self._commit, written, None, options.committers),
        ):
            stages.Stage(pipeline, name, process, source, output, threads).start()
        try:
            self._compute(ready, computed, on_progress)
            pipeline.join()
        except stages.PipelineStopped:
            pipeline.check()
        except BaseException as error:
            pipeline.fail(error)
            raise
        finally:
            pipeline.wait()
            preparers.close()
            for writer in self._unfinished:
                writer.abandon()
            self._writer_pool.close()
        on_progress(self.meter)
        return self.meter

    def _submitted(
        self, pipeline: stages.Pipeline, preparers: preparation.PreparerPool
    ) -> Iterator[tuple[Claim, Future[preparation.PreparedUnit]]]:
        waiting: deque[tuple[Claim, Future[preparation.PreparedUnit]]] = deque()
        for claim in self._coordinator.claims():
            if pipeline.failed:
                return
            if claim is not None:
                waiting.append((claim, preparers.submit(claim.unit)))
            while waiting and (claim is None or len(waiting) >= self._options.prefetch_units):
                yield waiting.popleft()
        yield from waiting

    def _compute(
        self,
        ready: stages.StageQueue,
        computed: stages.StageQueue,
        on_progress: Callable[[Meter], None],
    ) -> None:
        units = iter(ready)
        for claim, prepared in units:
            for batch in prepared.batches:
                if self._coordinator.should_stop():
                    break
                fetch = self._engine.start(batch)
                computed.put(_Step(claim, prepared, batch, fetch))
                self.meter.computed(batch, self._engine.flops(batch))
                on_progress(self.meter)
            stop = self._coordinator.should_stop()
            computed.put(_Step(claim, prepared, drop=stop))
            if stop:
                break
        for _ in units:
            pass  # prepared after the stop: left to other workers
        computed.close()

    def _write(self, step: _Step) -> Any:
        if self._writer is None:
            self._writer = self._open_writer(step)
            self._unfinished.add(self._writer)
        if step.batch is None:
            writer, self._writer = self._writer, None
            if not step.drop:
                return step, writer
            writer.abandon()
            self._unfinished.discard(writer)
            return None
        for block in step.blocks:
            if self._plan.dtype == "f16":
                _check_range(step, block)
            _append(self._writer, step.batch, block)
        return None

    def _open_writer(self, step: _Step) -> unit_writer.UnitWriter:
        prepared, part = step.prepared, self._coordinator.part
        rows = [self._engine.rows(len(batch.tokens)) for batch in prepared.batches]
        samples = prepared.stored_samples(rows, include_skipped=part == 0)
        return unit_writer.UnitWriter(
            self._storage, self._plan, step.claim, samples, part=part, executor=self._writer_pool
        )

    def _commit(self, item: tuple[_Step, unit_writer.UnitWriter]) -> None:
        step, writer = item
        unit, compute = step.claim.unit, self._engine.compute_type
        file = writer.finish()
        self._unfinished.discard(writer)
        try:
            self._coordinator.commit(
                step.claim,
                file,
                lambda files: unit_writer.commit_outcome(self._plan, unit, files, compute),
            )
        except Fenced:
            # Another worker has taken the unit over; this shard is not referenced by any commit.
            self._storage.delete(file["name"])
            self.meter.fenced += 1
            return
        self.meter.committed(step.prepared)


class HeartbeatThread:
    """Sends a worker's heartbeats in the background, so that its units are not taken over."""

    def __init__(self, units: Units, interval: float):
        self._units, self._interval = units, interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="extract-heartbeat", daemon=True)

    def __enter__(self) -> HeartbeatThread:
        self._units.heartbeat()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self._units.leave()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            try:
                self._units.heartbeat()
            except Exception as error:
                # A missed heartbeat costs at most a unit; the next one may succeed.
                log.warning("heartbeat failed: %s; retrying in %.0f s", error, self._interval)


def _await(
    item: tuple[Claim, Future[preparation.PreparedUnit]],
) -> tuple[Claim, preparation.PreparedUnit]:
    return item[0], item[1].result()


def _fetch(step: _Step) -> _Step:
    return step if step.fetch is None else replace(step, fetch=None, blocks=step.fetch())


def _check_range(step: _Step, block: engines.OutputBlock) -> None:
    """Raise if an activation is stored as infinity or NaN: float16 ends at 65,504, which residual
    streams of common models exceed."""
    assert step.batch is not None
    for site, values in block.values.items():
        for span in step.batch.spans:
            if not 0 <= span.row - block.first_row < len(values):
                continue
            rows = values[span.row - block.first_row, span.start : span.start + span.length]
            if not np.isfinite(rows).all():
                sample = step.prepared.samples[span.sample]
                raise BadInput(
                    f"sample {sample.index} has activations at {site} that float16 cannot hold "
                    "(more than 65,504, or not a number); run `tpu extract plan --dtype bf16` with "
                    "another output folder"
                )


def _append(
    writer: unit_writer.UnitWriter, batch: batches.Batch, block: engines.OutputBlock
) -> None:
    height = next(iter(block.values.values())).shape[0]
    rows = range(block.first_row, block.first_row + height)
    spans = [span for span in batch.spans if span.row in rows]
    if spans:
        for name, values in block.values.items():
            writer.append(name, *_token_rows(values, spans, block.first_row))


def _token_rows(
    values: np.ndarray, spans: Sequence[batches.SampleSpan], first_row: int
) -> list[np.ndarray]:
    """The rows of [rows, length, ...] that hold tokens, without padding and without copying."""
    length = values.shape[1]
    if all(span.length == length for span in spans):
        return [values[: len(spans)].reshape(-1, *values.shape[2:])]
    return [values[span.row - first_row, span.start : span.start + span.length] for span in spans]
