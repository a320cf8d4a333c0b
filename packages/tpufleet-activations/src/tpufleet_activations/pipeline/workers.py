"""One worker: claims units, runs them through the model, writes and commits them concurrently.

prepare -> compute -> fetch -> write -> commit: stages joined by bounded queues, so that devices do
not wait for disks and memory stays bounded when a disk is slow. A pool of writer threads hashes
and writes pieces of several shards at once.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from tpufleet.errors import Fenced
from tpufleet.runtime.units import Claim, Units
from tpufleet_activations import plans
from tpufleet_activations.inputs.contexts import AnyContext
from tpufleet_activations.io import shard_writer, unit_writer
from tpufleet_activations.io.storage import Storage
from tpufleet_activations.io.unit_writer import RowWriter, StoredSample
from tpufleet_activations.model import engines
from tpufleet_activations.pipeline import batches, calibration, preparation, stages
from tpufleet_activations.pipeline.gangs import Coordinator
from tpufleet_activations.pipeline.locations import Locations
from tpufleet_activations.pipeline.progress_meter import Meter

log = logging.getLogger(__name__)


class OpenedEngine(NamedTuple):
    engine: engines.Engine
    calibration: calibration.Calibration | None = None


MOST_PREPARERS = 8  # each tokenizes 0.3 million tokens per second or more
# Tasks that wait for a writer: this share of the host's memory, within these limits.
BACKLOG_SHARE, FEWEST_WAITING, MOST_WAITING = 0.03, 64, 256


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOptions:
    """Concurrency and queue sizes. None of it changes what is written."""

    preparers: int = 0  # tokenizing processes; 0: one thread
    shared_units: int = 64  # at most so many units share batches; each has an open file
    prefetch_units: int = 4  # prepared before they are needed
    batches_in_flight: int = 3  # on the devices; a calibrated engine has its own
    batches_fetched: int = 3  # in host memory, waiting to be written
    writers: int = 8  # threads that hash and write
    # Tasks waiting for a writer, each of at most `shard_writer.TASK` bytes.
    backlog: int = FEWEST_WAITING
    upload_streams: int = 8  # files sent to a bucket concurrently
    committers: int = 2  # units flushed and committed concurrently


def default_options(
    cores: int, *, preparers: int | None = None, writers: int | None = None
) -> WorkerOptions:
    """For a machine with so many cores. A thread hashes 0.7 GB/s (SHA-256, measured beside an
    H200), and four layers of a small model are several GB/s."""
    if preparers is None:
        preparers = min(max(cores // 4, 2), MOST_PREPARERS) if cores >= 8 else 0
    return WorkerOptions(
        preparers=preparers,
        writers=writers or min(max(cores, 8), 32),
        backlog=default_backlog(calibration.host_memory()),
    )


def default_backlog(host_bytes: float) -> int:
    """Tasks that may wait for a writer. When the units of a group are committed and the next ones
    are opened, writers fall behind for some tenths of a second, and devices must not wait."""
    fitting = int(BACKLOG_SHARE * host_bytes / shard_writer.TASK)
    return min(max(fitting, FEWEST_WAITING), MOST_WAITING)


def outputs_on_host(plan: plans.ExtractionPlan, options: WorkerOptions) -> list[int]:
    """The bytes of each batch's outputs that are in host memory at a time, while writers keep up:
    those being copied there, and those that wait to be divided into tasks."""
    rows = calibration.token_bytes(plan)
    size = calibration.starting_size(plan, varlen=True) * rows
    count = options.batches_in_flight + 1 + options.batches_fetched + 1
    most = min(
        calibration.MEMORY_SHARE * calibration.host_memory(),
        float(plan.estimate.get("stored_tokens", 0) * rows),
    )
    return [size] * min(count, int(most // max(size, 1)))


# Units that share batches take at most this long, so that little is lost with a worker.
SHARED_SECONDS = 20.0
# Incomplete batches are at most this part of the tokens of units that share batches, if longer.
INCOMPLETE_SHARE = 0.25
# A smaller part than this is not worth a larger group, which is committed later.
SMALL_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class _Group:
    """Claimed units that share batches."""

    claims: tuple[Claim, ...]
    prepared: preparation.BatchedUnits


@dataclass(frozen=True, slots=True)
class _Step:
    """A batch in the pipeline, or without `batch` the end of a group's last units; `drop` means
    not to commit them."""

    group: _Group
    batch: batches.Batch | None = None
    ended: range = range(0)  # units of the group that are complete after it
    fetch: Callable[[], list[engines.OutputBlock]] | None = None
    blocks: Sequence[engines.OutputBlock] = ()
    drop: bool = False


@dataclass(frozen=True, slots=True)
class _WrittenUnit:
    """All rows of a unit are with its writer."""

    claim: Claim
    unit: preparation.PreparedUnit
    writer: RowWriter


class Worker:
    def __init__(
        self,
        storage: Storage,
        plan: plans.ExtractionPlan,
        locations: Locations,
        engine: OpenedEngine | Future[OpenedEngine],
        coordinator: Coordinator,
        *,
        meter: Meter | None = None,
        options: WorkerOptions = WorkerOptions(),  # noqa: B008
        preparers: preparation.PreparerPool | None = None,
        open_writer: Callable[[Claim, Sequence[StoredSample]], RowWriter] | None = None,
    ):
        """`engine` may be opened while the first units are claimed and tokenized. `preparers` that
        were started earlier; the worker closes them. `open_writer`: where the rows of a unit go, by
        default to the storage."""
        self._storage, self._plan, self._locations = storage, plan, locations
        self._opening, self._coordinator, self._options = engine, coordinator, options
        self._preparers = preparers
        self._open_writer = open_writer or self._unit_writer
        self.meter = meter or Meter(plan, peak=self._engine.peak_flops())
        self._writers: list[RowWriter] = []  # of the group being written
        self._unfinished: set[RowWriter] = set()
        self._writer_pool = shard_writer.WriterPool(options.writers, options.backlog)
        # Files that wait for a stream stay in memory, so there are few of them.
        self._upload_pool = (
            shard_writer.WriterPool(options.upload_streams, 2 * options.upload_streams)
            if storage.file_bytes is not None
            else None
        )

    @property
    def _opened(self) -> OpenedEngine:
        """Waits for it, or raises why it could not be opened."""
        opening = self._opening
        return opening.result() if isinstance(opening, Future) else opening

    @property
    def _engine(self) -> engines.Engine:
        return self._opened.engine

    def run(self, on_progress: Callable[[Meter], None] = lambda meter: None) -> Meter:
        """Run until every unit is committed, or until asked to stop."""
        pipeline, options = stages.Pipeline(), self._options
        preparers = self._preparers or preparation.PreparerPool(
            self._plan, self._locations, options.preparers
        )
        # Devices must not wait while the units of a group, which end together, are committed.
        sizes = (1, options.batches_in_flight, options.batches_fetched, options.shared_units)
        ready, computed, fetched, written = (stages.StageQueue(pipeline, size) for size in sizes)
        self.meter.attach(
            pipeline, {"ready": ready, "computed": computed, "fetched": fetched, "written": written}
        )
        for name, process, source, output, threads in (
            ("prepare", self._batch, self._submitted(pipeline, preparers), ready, 1),
            ("fetch", self._fetch, computed, fetched, 1),
            ("write", functools.partial(self._write, written), fetched, written, 1),
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
            self._writer_pool.shutdown()
            if self._upload_pool is not None:
                self._upload_pool.shutdown()
        if not self._coordinator.should_stop():
            self._engine.finish_saving()
        on_progress(self.meter)
        return self.meter

    def _submitted(
        self, pipeline: stages.Pipeline, preparers: preparation.PreparerPool
    ) -> Iterator[list[tuple[Claim, Future[preparation.PreparedUnit]]]]:
        """Groups of units that are being prepared."""
        waiting: deque[tuple[Claim, Future[preparation.PreparedUnit]]] = deque()

        def group() -> list[tuple[Claim, Future[preparation.PreparedUnit]]]:
            return [waiting.popleft() for _ in range(min(size, len(waiting)))]

        size = 1
        for claim in self._coordinator.claims():
            if pipeline.failed:
                return
            if claim is not None:
                self.meter.claimed += 1
                waiting.append((claim, preparers.submit(claim.unit)))
                if len(waiting) < self._options.prefetch_units:
                    continue  # the first units need not wait for the engine
            size = self._shared_units()
            while waiting and (
                claim is None or len(waiting) >= size - 1 + self._options.prefetch_units
            ):
                yield group()
        size = self._shared_units() if waiting else size
        while waiting:
            yield group()

    def _batching(self) -> str:
        buckets = preparation.plan_buckets(self._plan)
        return batches.resolve_batching(self._plan.batching, buckets, varlen=self._engine.varlen)

    def _batch_tokens(self) -> int:
        calibrated = self._opened.calibration
        if calibrated is None:
            return calibration.starting_size(self._plan, varlen=self._engine.varlen)
        return calibrated.batch_tokens

    def _use_calibration(self, computed: stages.StageQueue) -> None:
        """Batches in flight, for the rate of the devices."""
        chosen = self._opened.calibration
        if chosen is None:
            return
        bytes_per_token = calibration.token_bytes(self._plan)
        in_flight = chosen.batches_in_flight(
            self._options.batches_in_flight, bytes_per_token, calibration.host_memory()
        )
        computed.resize(in_flight)
        self.meter.calibrated = {**chosen.to_json(), "batches_in_flight": in_flight}

    def _shared_units(self) -> int:
        """How many units share batches: so many that incomplete batches hardly matter, as long as
        those take at most SHARED_SECONDS at the present rate.

        Processes of one mesh have to form the same groups, and packing by size places samples in an
        order that depends on the group: they take one unit at a time."""
        plan = self._plan
        batching = self._batching()
        if self._coordinator.parts > 1 or batching == "pack":
            return 1
        shapes = 1 if batching == "varlen" else len(plan.buckets)
        incomplete = shapes / 2 * self._batch_tokens()
        unit_tokens = plan.estimate.get("tokens", 0) / max(plan.units, 1)
        fitting = self.meter.units_per_second() * SHARED_SECONDS
        if unit_tokens:
            fitting = min(fitting, incomplete / SMALL_SHARE / unit_tokens)
            fitting = max(fitting, incomplete / INCOMPLETE_SHARE / unit_tokens)
        return max(1, min(math.ceil(fitting), self._options.shared_units))

    def _batch(self, items: list[tuple[Claim, Future[preparation.PreparedUnit]]]) -> _Group:
        units = [future.result() for _, future in items]
        prepared = preparation.batch_units(
            self._plan,
            units,
            self._engine.row_multiple,
            varlen=self._engine.varlen,
            fill=self._coordinator.parts > 1,
            batch_tokens=self._batch_tokens(),
        )
        return _Group(tuple(claim for claim, _ in items), prepared)

    def _compute(
        self,
        ready: stages.StageQueue,
        computed: stages.StageQueue,
        on_progress: Callable[[Meter], None],
    ) -> None:
        groups = iter(ready)
        for number, group in enumerate(groups):
            if number == 0:  # the engine is open
                self._use_calibration(computed)
            self._engine.compile_ahead(group.prepared.batches)
            last = group.prepared.last_batches()
            ended = 0  # units of the group, in order
            for position, batch in enumerate(group.prepared.batches):
                if self._coordinator.should_stop():
                    break
                fetch = self._engine.start(batch)
                first = ended
                while ended < len(last) and last[ended] <= position:
                    ended += 1
                computed.put(_Step(group, batch, range(first, ended), fetch=fetch))
                self.meter.started(batch)
                self.meter.compiled(self._engine.programs, self._engine.compile_seconds)
                on_progress(self.meter)
            stop = self._coordinator.should_stop()
            if ended < len(group.claims):
                rest = range(ended, len(group.claims))
                computed.put(_Step(group, ended=rest, drop=stop))
            if stop:
                break
        for _ in groups:
            pass  # prepared after the stop: left to other workers
        computed.close()

    def _fetch(self, step: _Step) -> _Step:
        if step.fetch is None or step.batch is None:
            return step
        blocks = step.fetch()
        self.meter.arrived(step.batch, self._engine.flops(step.batch))
        return replace(step, fetch=None, blocks=blocks)

    def _write(self, written: stages.StageQueue, step: _Step) -> None:
        group = step.group
        if not self._writers:
            self._writers = self._open_writers(group)
            self._unfinished.update(self._writers)
        for block in step.blocks:
            assert step.batch is not None
            _append(self._writers, group.prepared, step.batch, block)
        for unit in step.ended:
            writer = self._writers[unit]
            if step.drop:
                writer.abandon()
                self._unfinished.discard(writer)
            else:
                written.put(_WrittenUnit(group.claims[unit], group.prepared.units[unit], writer))
        if len(group.claims) - 1 in step.ended:
            self._writers = []

    def _open_writers(self, group: _Group) -> list[RowWriter]:
        rows = [self._engine.rows(len(batch.tokens)) for batch in group.prepared.batches]
        samples = group.prepared.stored_samples(rows, include_skipped=not self._coordinator.part)
        return list(map(self._open_writer, group.claims, samples))

    def _unit_writer(self, claim: Claim, samples: Sequence[StoredSample]) -> RowWriter:
        return unit_writer.UnitWriter(
            self._storage,
            self._plan,
            claim,
            samples,
            part=self._coordinator.part,
            executor=self._writer_pool,
            uploader=self._upload_pool,
        )

    def _commit(self, written: _WrittenUnit) -> None:
        claim = written.claim
        files = written.writer.finish()
        self._unfinished.discard(written.writer)
        try:
            self._coordinator.commit(
                claim,
                files,
                lambda files: unit_writer.commit_outcome(self._plan, claim.unit, files),
            )
        except Fenced:
            # Another worker has taken the unit over; no commit refers to these files.
            for file in files:
                self._storage.delete(file["name"])
            self.meter.fenced += 1
            return
        self.meter.committed(written.unit)


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


def _append(
    writers: Sequence[RowWriter],
    prepared: preparation.BatchedUnits,
    batch: batches.Batch,
    block: engines.OutputBlock,
) -> None:
    """Append a block's rows to the shards of the units that they belong to."""
    height = next(iter(block.values.values())).shape[0]
    rows = range(block.first_row, block.first_row + height)
    own = [span for span in batch.spans if span.row in rows]
    units = [bisect_right(prepared.first_contexts, span.sample) - 1 for span in own]
    by_unit: dict[int, list[batches.SampleSpan]] = {}
    for unit, span in zip(units, own, strict=True):
        by_unit.setdefault(unit, []).append(span)
    # Units in turn: one thread at a time writes to a file, and others would wait for it.
    for name, values in block.values.items():
        for unit, spans in by_unit.items():
            stored = _token_rows(values, spans, prepared.contexts, block.first_row)
            writers[unit].append(name, *stored)


def _token_rows(
    values: np.ndarray,
    spans: Sequence[batches.SampleSpan],
    contexts: Sequence[AnyContext],
    first_row: int,
) -> list[np.ndarray]:
    """The rows of [rows, length, ...] that are stored, without padding and without copying."""
    length = values.shape[1]
    flat = values.reshape(-1, *values.shape[2:])
    pieces: list[list[int]] = []  # [start, end), adjacent ones joined
    for span in spans:
        origin = (span.row - first_row) * length + span.start
        for start, stop in contexts[span.sample].runs:
            if pieces and pieces[-1][1] == origin + start:
                pieces[-1][1] = origin + stop
            else:
                pieces.append([origin + start, origin + stop])
    return [flat[start:end] for start, end in pieces]
